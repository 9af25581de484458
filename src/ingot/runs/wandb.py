"""Weights & Biases: a run there that goes on when ours is resumed.

Its id is kept in the run folder. Nothing is imported before a run asks for it, and a mishap there never ends training.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ingot.errors import ConfigError, RunError
from ingot.runtime.files import write_atomically, writing

NAME = "wandb.json"


def check_installed(setting: str) -> None:
    """Refuse a setting that needs the package where it is missing."""
    try:
        importlib.import_module("wandb")
    except ImportError:
        raise ConfigError(f"{setting} needs Weights & Biases; install it with: pip install 'ingot[wandb]'") from None


class WandbRun:
    """A run of Weights & Biases, begun or continued; a context that ends it."""

    def __init__(
        self, folder: Path, project: str, name: str, config: Mapping[str, Any], warn: Callable[[str], None], continued: bool
    ) -> None:
        wandb = importlib.import_module("wandb")
        self._warn, self._lost = warn, False
        known = read_id(folder / NAME) if continued else None
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=project, name=name, config=dict(config), dir=str(folder), id=known, resume="allow" if known else None
            )
        except Exception as error:  # whatever it raises: its errors have changed with its versions
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise RunError(
                f"Weights & Biases does not start: {reason}; log in with `wandb login`, or set WANDB_MODE=offline, or go without"
            ) from None
        with writing(folder / NAME):
            write_atomically(folder / NAME, json.dumps({"id": self._run.id}))

    def log(self, values: Mapping[str, Any]) -> None:
        """Send values; if that fails, say so once."""
        try:
            self._run.log(dict(values))
        except Exception as error:
            if not self._lost:
                self._lost = True
                self._warn(f"Weights & Biases takes no more values: {' '.join(str(error).split())[:200]}; training goes on")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with suppress(Exception):
            self._run.finish(exit_code=0 if error is None else 1)


def read_id(path: Path) -> str | None:
    """The id of the run of Weights & Biases that a file of ours names; None where there is none."""
    try:
        known = json.loads(path.read_bytes())["id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return known if isinstance(known, str) else None
