"""What a run begins with that lies elsewhere: another run's checkpoint, and what --force may not delete."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ingot.config.schema import Config
from ingot.errors import ConfigError, Setting
from ingot.runs.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from ingot.runs.finding import find_checkpoint, find_named
from ingot.runs.folder import RunFolder
from ingot.runs.steps import named_path
from ingot.runtime.files import writing
from ingot.train.resume import check_fits


def copy_named(
    named: str, folder: RunFolder, newest: Checkpoint | None, facts: dict[str, Any], say: Callable[[str], None]
) -> Checkpoint:
    """A copy, in the run's folder, of the checkpoint that training.resume names; or what an earlier session made of it."""
    found = find_named(named, folder.path, newest)
    if newest is not None:
        return newest  # it is what is named, or begins with a copy of that
    source = load_checkpoint(found)
    check_fits(source, facts)
    progress = {**source.progress, "resumed_from": str(named_path(named, folder.path).resolve())}
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
        path = Path(str(value)).expanduser()
        if path.resolve().is_relative_to(folder.path.resolve()):
            what = Setting(setting, value)
            raise ConfigError("{0} lies in the folder that --force empties", what, advice="leave out one of them")
        if setting == "training.resume":
            check_fits(find_checkpoint(path), facts)
