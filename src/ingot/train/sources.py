"""What a run begins with that lies elsewhere: another run's checkpoint, and what --force may not delete."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ingot.config.schema import Config
from ingot.errors import CheckpointError, ConfigError, Setting
from ingot.runs.checkpoints import Checkpoint, save_checkpoint
from ingot.runs.finding import find_checkpoint
from ingot.runs.folder import RunFolder
from ingot.runs.steps import named_path
from ingot.runtime.files import user_path, writing
from ingot.train.resume import check_fits

NAME_A_CHECKPOINT = "name a checkpoint or a run folder, auto or never"


def copy_named(
    named: str, folder: RunFolder, newest: Checkpoint | None, facts: dict[str, Any], say: Callable[[str], None]
) -> Checkpoint:
    """A copy, in the run's folder, of the checkpoint that training.resume names; or what an earlier session made of it."""
    path = named_path(named, folder.path)
    origin = str(path.resolve())
    if newest is not None and newest.progress.get("resumed_from") == origin:
        return newest  # the same command again: the state was copied by an earlier session
    if not path.exists():
        raise CheckpointError(f"{{0}}: there is no {path}", Setting("training.resume", named), advice=NAME_A_CHECKPOINT)
    source = find_checkpoint(path)
    if newest is not None:
        if source.path.resolve() == newest.path.resolve():
            return newest
        why = "has newer checkpoints" if path.resolve().is_relative_to(folder.path.resolve()) else "holds another run"
        raise CheckpointError(
            f"{{0}}: {folder.path} {why}, the newest at step {newest.step}",
            Setting("training.resume", named),
            Setting("training.output_dir"),
            Setting("training.resume", "auto"),
            advice="choose another {1} to go on from there, or go on with this run by {2}",
        )
    check_fits(source, facts)
    progress = {**source.progress, "resumed_from": origin}
    with writing(folder.checkpoints):
        tensors = {group: list(records.values()) for group, records in source.tensors.items()}
        copy = save_checkpoint(folder.checkpoints, source.step, tensors, progress)
    say(f"begins with the state of {source.path}")
    return replace(source, path=copy, progress=progress, kind="regular")


def check_sources(config: Config, folder: RunFolder, facts: dict[str, Any]) -> None:
    """Refuse to empty a folder for a run that would begin with what lies in it, or with a state that does not fit."""
    named = {"training.weights": config.training.weights, "training.resume": config.training.resume}
    for setting, value in named.items():
        if value in (None, "auto", "never"):
            continue
        path = user_path(str(value))
        if path.resolve().is_relative_to(folder.path.resolve()):
            what = Setting(setting, value)
            raise ConfigError("{0} lies in the folder that --force empties", what, advice="leave out one of them")
        if setting == "training.resume":
            check_fits(find_checkpoint(path), facts)
