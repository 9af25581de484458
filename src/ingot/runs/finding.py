"""Which checkpoint is meant: by a path, by a run folder, and by the setting training.resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.errors import CheckpointError, ConfigError, Setting, Unreadable
from ingot.runs.checkpoints import Checkpoint, load_checkpoint, read_index
from ingot.runs.steps import INDEX, named_path, saved_steps

PassedOver = Callable[[Path, CheckpointError], None]  # is told of a checkpoint that is damaged
NAME_A_CHECKPOINT = "name a checkpoint or a run folder, auto or never"


@dataclass(frozen=True)
class Index:
    """A checkpoint by what its checkpoint.json says; the tensors are not read."""

    path: Path
    step: int
    progress: dict[str, Any]


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
        why = "it was not evaluated" if best is None else f"its best score is that of step {best}, which is not saved"
        raise CheckpointError(f"{path} has no best checkpoint: {why}; use the latest")
    return steps[best]


def going_on_from(asked: str, run: Path | None, passed_over: PassedOver = lambda path, error: None) -> Index | None:
    """What a run in this folder goes on from, by training.resume; None where it begins."""
    if asked == "never":
        return None
    newest = newest_index(run, passed_over)
    return newest if asked == "auto" else open_index(find_named(asked, run, newest))


def newest_index(run: Path | None, passed_over: PassedOver = lambda path, error: None) -> Index | None:
    """The newest checkpoint of a run that is not damaged; None where there is none."""
    for path in reversed(saved_steps(run / "checkpoints").values()) if run is not None else ():
        try:
            return open_index(path)
        except Unreadable:
            raise  # it may be sound: a run does not go back
        except CheckpointError as error:
            passed_over(path, error)
    return None


def open_index(path: Path) -> Index:
    """What a checkpoint says of itself."""
    index = read_index(path)
    return Index(path, index["step"], index["progress"])


def find_named(named: str, run: Path | None, newest: Index | Checkpoint | None) -> Path:
    """The checkpoint that a run begins with because training.resume names it; `newest` is that of the run's own folder.

    `newest` itself, where the same command was given before: an earlier session has begun with a copy of what is named.
    """
    path = named_path(named, run)
    if newest is not None and began_with(newest, path):
        return newest.path
    if not path.exists():
        raise CheckpointError(f"{{0}}: there is no {path}", Setting("training.resume", named), advice=NAME_A_CHECKPOINT)
    source = locate_checkpoint(path)
    if newest is not None and run is not None and source.resolve() != newest.path.resolve():
        why = "has newer checkpoints" if path.resolve().is_relative_to(run.resolve()) else "holds another run"
        raise occupied(named, run, why, newest.step)
    return source


def began_with(newest: Index | Checkpoint, path: Path) -> bool:
    """Whether the run of a checkpoint began with the state of a checkpoint or run that lies elsewhere."""
    return newest.progress.get("resumed_from") == str(path.resolve())


def occupied(named: str, run: Path, why: str, step: int) -> CheckpointError:
    """What is said where a named state cannot be begun with, because the folder has a run that would be lost."""
    return CheckpointError(
        f"{{0}}: {run} {why}, the newest at step {step}",
        Setting("training.resume", named),
        Setting("training.output_dir"),
        Setting("training.resume", "auto"),
        advice="choose another {1} to go on from there, or go on with this run by {2}",
    )
