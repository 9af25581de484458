"""Which checkpoints a folder has, by their names alone: whoever only looks on loads nothing to read them with."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

from ingot.errors import Unreadable
from ingot.runtime.files import user_path

Kind = Literal["regular", "shutdown", "final"]  # of a checkpoint: on the way, of a stop, of a completed run
INDEX = "checkpoint.json"
PARTIAL, DAMAGED = ".partial", ".damaged"
_NAME = re.compile(r"step-(\d{8,})")


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder with this name is a checkpoint."""
    return _NAME.fullmatch(name) is not None


def step_of(path: Path) -> int:
    """The step of a checkpoint of ours, by its name."""
    return int(path.name.rpartition("-")[2])


def saved_steps(folder: Path) -> dict[int, Path]:
    """The checkpoints of a folder by step, oldest first, without looking inside."""
    try:
        with os.scandir(folder) as entries:
            found = [(_NAME.fullmatch(entry.name), folder / entry.name) for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:  # not none: a run would begin anew where one is
        raise Unreadable(folder, error.strerror) from None
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def named_path(name: str, run: Path | None) -> Path:
    """The file or folder that a setting names, from the working folder or else from the run's folder on."""
    path = user_path(name)
    return run / path if run is not None and not path.exists() and (run / path).exists() else path
