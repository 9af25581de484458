"""`ingot.train(...)`: the door for Python and notebooks. Settings are sections, mistakes are raised, progress goes to stderr."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ingot.config.loading import Sources
from ingot.config.schema import Config
from ingot.doors.display import make_reporter
from ingot.plan.auto import RECIPE, resolve_auto
from ingot.plan.validate import check_before_training
from ingot.runs.report import Reporter
from ingot.runs.result import TrainingResult
from ingot.runtime.ranks import ranks_from_environment
from ingot.train.finished import COMPLETE, completed
from ingot.train.start import run


def train(
    config: str | Path | Config | dict[str, Any] | None = None,
    *,
    recipe: str | None = None,
    quiet: bool = False,
    reporter: Reporter | None = None,
    **overrides: Any,
) -> TrainingResult:
    """Train as a YAML file, a recipe, a Config or a dict of sections says; overrides are sections: training={"max_steps": 10}.

    Progress is shown on stderr, as on the command line; `quiet` shows nothing, and a `reporter` of one's own is told instead.
    """
    if isinstance(config, Config):
        config = {name: getattr(config, name).model_dump() for name in type(config).model_fields}
    file, given = (None, config) if isinstance(config, dict) else (config, overrides)
    if isinstance(config, dict):
        given = {**config, **{name: _over(config.get(name), section) for name, section in overrides.items()}}
    sources, world_size = Sources(recipe, file, python=given), ranks_from_environment().world_size
    resolved = sources.load() if recipe != RECIPE else None  # a mistake is raised before anything is shown
    with nullcontext(reporter or Reporter()) if quiet or reporter is not None else make_reporter() as shown:
        resolved = resolved or resolve_auto(sources, world_size, shown.message)
        if (result := completed(resolved.config)) is not None:
            shown.message(f"{COMPLETE.format(result.run_dir)} in another training.output_dir")
            return result
        dataset = check_before_training(resolved.config, world_size, shown.message)
        return run(resolved, shown, dataset=dataset)


def _over(section: Any, changes: Any) -> Any:
    both = isinstance(section, Mapping) and isinstance(changes, Mapping)
    return {**section, **changes} if both else changes  # what is no section is told as a mistake when all is merged
