"""Whether a run is complete already: the same settings given again would take no step and score it a second time."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ingot.config.fields import leaf_values
from ingot.config.schema import Config
from ingot.errors import CheckpointError, ConfigError
from ingot.runs.checkpoints import read_index
from ingot.runs.result import TrainingResult, result_of
from ingot.runs.run import Run
from ingot.runs.steps import saved_steps
from ingot.runtime.files import user_path

COMPLETE = "{} is complete: raise training.max_steps or budget.seconds to go on, or begin anew"
# What does not decide what a run comes to.
NOT_COMPARED = ("training.output_dir", "training.resume", "training.max_runtime_seconds", "training.walltime_reserve_seconds")


def completed(config: Config, kept: bool = True) -> TrainingResult | None:
    """What the run in training.output_dir came to, where it is complete with these very settings.

    `kept`: only if its last checkpoint and its artifact are still there.
    """
    if config.training.output_dir is None or config.training.resume == "never":
        return None
    folder = user_path(config.training.output_dir)
    result, saved = result_of(folder), saved_config(folder)
    if saved is None and not kept:
        with suppress(ConfigError):
            saved = Run(folder).config
    if result is None or result.status != "completed" or saved is None or compared(saved) != compared(config):
        return None
    lost = result.total_steps not in saved_steps(folder / "checkpoints")
    lost |= result.artifact_path is not None and not result.artifact_path.is_file()
    return None if lost and kept else result


def saved_config(folder: Path) -> Config | None:
    """Every setting of a run as its newest checkpoint knows it; None where there is none that this version understands."""
    steps = saved_steps(folder / "checkpoints")
    try:
        return Config.model_validate(read_index(steps[max(steps)])["progress"]["config"]) if steps else None
    except (CheckpointError, ValidationError, KeyError, TypeError):
        return None


def compared(config: Config) -> dict[str, Any]:
    """The settings that decide what a run comes to, by their names."""
    leaves = {".".join(path): value for path, value in leaf_values(config)}
    return {name: value for name, value in leaves.items() if name not in NOT_COMPARED and not name.startswith("tracking.")}
