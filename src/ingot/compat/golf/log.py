"""The log of a golf run, on the console and in logs/RUN_ID.txt. Lines that the original does not have start with `note:`."""

from __future__ import annotations

from pathlib import Path

from ingot.compat.golf.variables import LOG
from ingot.runs.metrics import LineFile

RULE = "=" * 100


class RunLog:
    """Prints lines and appends them to the log and, once there is a run folder, to a copy of this session's lines in it.

    Nothing is printed before `show` and no file is created before `write`, so a run that fails to start leaves no log.
    """

    def __init__(self, path: Path | None):
        self._path = path  # None on ranks that write no log
        self._files: list[LineFile] = []
        self._unwritten: list[str] = []  # lines not yet in the run folder's copy
        self._unshown: list[str] | None = []  # lines not yet on the console
        self._has_copy = False
        self.writes = path is not None

    def line(self, text: str, console: bool = True) -> None:
        """Write a line to the log and, with `console`, print it too."""
        if self._path is None:
            return
        if console and self._unshown is not None:
            self._unshown.append(text)
        elif console:
            print(text, flush=True)
        for file in self._files:
            file.append(text)
        if not self._has_copy:
            self._unwritten.append(text)

    def show(self) -> None:
        """Print the path of the log and the lines so far; from now on every line is printed."""
        lines, self._unshown = self._unshown or [], None
        for text in (str(self._path), *lines) if self.writes else ():
            print(text, flush=True)

    def write(self, folder: Path | None = None) -> None:
        """Open the log and, given a run folder, the copy in it; write the lines so far."""
        if self._path is None:
            return
        lines, self._unwritten, self._has_copy = self._unwritten, [], folder is not None
        self._files = [LineFile(path) for path in (self._path, folder / LOG if folder is not None else None) if path is not None]
        for file in self._files if lines else ():
            file.append("\n".join(lines))

    def note(self, text: str) -> None:
        """Write a line that the original's log does not have, prefixed with `note:`."""
        self.line(f"note: {text}")
