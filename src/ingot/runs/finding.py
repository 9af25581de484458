"""Which checkpoint a path means: itself, or the latest or best one of a run folder."""

from __future__ import annotations

from pathlib import Path

from ingot.errors import CheckpointError, ConfigError
from ingot.runs.checkpoints import Checkpoint, load_checkpoint, read_index
from ingot.runs.steps import INDEX, saved_steps


def find_checkpoint(path: Path, which: str = "latest") -> Checkpoint:
    """The checkpoint that a path means: itself, or the latest or best one of a run folder."""
    return load_checkpoint(locate_checkpoint(path, which))


def locate_checkpoint(path: Path, which: str = "latest") -> Path:
    """Where that checkpoint is; its tensors are not read."""
    if which not in ("latest", "best"):
        raise ConfigError(f"which checkpoint is {which!r}; choose latest or best")
    if (path / INDEX).is_file():
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    steps = saved_steps(folder)
    if not steps:
        raise CheckpointError(f"there is no checkpoint in {path}; give a run folder, a checkpoint or an artifact")
    newest = steps[max(steps)]
    if which == "latest":
        return newest
    best = read_index(newest)["progress"].get("best_step")
    if best not in steps:
        raise CheckpointError(f"{path} has no best checkpoint yet: it was not evaluated; use the latest")
    return steps[best]
