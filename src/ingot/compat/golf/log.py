"""The log of a golf run, on the console and in logs/RUN_ID.txt. Lines that golf's own script does not log start with `note:`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ingot.compat.golf.variables import LOG, as_text
from ingot.config.loading import ResolvedConfig
from ingot.config.render import dump_yaml
from ingot.runs.metrics import LineFile
from ingot.runtime.files import writing
from ingot.runtime.machine import made_by

RULE = "=" * 100


class RunLog:
    """A log that prints lines and appends them to logs/RUN_ID.txt and to train_gpt.log in the run folder.

    Nothing is printed before `show` and no file is created before `write`, so a run that fails to start leaves no log.
    """

    def __init__(self, path: Path | None):
        self._path = path  # None on ranks that write no log
        self._files: list[LineFile] = []
        self._unwritten: list[str] | None = []  # lines logged before `write` is called; None afterwards
        self._unshown: list[str] | None = []  # lines logged before `show` is called; None afterwards

    def line(self, text: str, console: bool = True) -> None:
        """Write a line to the log and, with `console`, print it too."""
        if self._path is None:
            return
        if console and self._unshown is not None:
            self._unshown.append(text)
        elif console:
            print(text, flush=True)
        if self._unwritten is not None:
            self._unwritten.append(text)
        for file in self._files:
            file.append(text)

    def head(self, values: Mapping[str, Any], resolved: ResolvedConfig, sources: Sequence[str], machine: Sequence[str]) -> None:
        """Write the variables, config, source code, and library and GPU versions to the log, without printing them."""
        variables = [f"{name}={as_text(value)}" for name, value in values.items() if value is not None]
        program = [made_by(), *variables, dump_yaml(resolved.config, resolved.origins), *sources]
        self.line("\n".join([*program, RULE, f"Running Python {sys.version}", *machine, RULE]), console=False)

    def show(self) -> None:
        """Print the path of the log and all lines logged so far; from now on, print every new line at once."""
        lines, self._unshown = self._unshown or [], None
        if self._path is not None:
            print("\n".join([str(self._path), *lines]), flush=True)

    def write(self, folder: Path | None = None) -> None:
        """Open the log and, if a run folder is given, a second log in it; write all lines logged so far."""
        if self._path is None:
            return
        with writing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
        lines, self._unwritten = self._unwritten or [], None
        self._files = [LineFile(path) for path in (self._path, folder / LOG if folder is not None else None) if path is not None]
        for file in self._files if lines else ():
            file.append("\n".join(lines))

    def note(self, text: str) -> None:
        """Write a line that golf's own script does not log, prefixed with `note:`."""
        self.line(f"note: {text}")


def torch_sources() -> list[str]:
    """Return the source code of each module that defines the model, the loss or the optimizer."""
    from ingot.model import golf, layers, loss
    from ingot.optim import groups, muon, schedules

    return [inspect.getsource(module) for module in (golf, layers, loss, groups, muon, schedules)]
