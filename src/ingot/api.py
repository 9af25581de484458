"""The Python side of every verb: train, load, generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ingot.config.loading import load_config
from ingot.config.schema import Config
from ingot.plan.validate import check_before_training
from ingot.runs.report import Reporter
from ingot.runs.result import TrainingResult
from ingot.runtime.ranks import ranks_from_environment
from ingot.train.start import run
from ingot.trained.model import LoadedModel, find_tokenizer, open_model
from ingot.trained.weights import open_weights


def train(
    config: str | Path | Config | dict[str, Any] | None = None,
    *,
    recipe: str | None = None,
    reporter: Reporter | None = None,
    **overrides: Any,
) -> TrainingResult:
    """Train as a YAML file, a recipe, a Config or a dict of sections says; overrides are sections: training={"max_steps": 10}."""
    if isinstance(config, Config):
        config = {name: getattr(config, name).model_dump() for name in type(config).model_fields}
    if isinstance(config, dict):
        merged = {name: {**config.get(name, {}), **overrides.get(name, {})} for name in config.keys() | overrides.keys()}
        resolved = load_config(recipe=recipe, python=merged)
    else:
        resolved = load_config(recipe=recipe, file=config, python=overrides)
    told = reporter if reporter is not None else Reporter()
    dataset = check_before_training(resolved.config, ranks_from_environment().world_size, told.message)
    return run(resolved, reporter, dataset=dataset)


def load(
    path: str | Path,
    *,
    which: str = "latest",
    device: str = "auto",
    tokenizer: str | None = None,
    data: str | None = None,
    dtype: str | None = None,
) -> LoadedModel:
    """Load a run folder (its latest or best checkpoint), one checkpoint, or an artifact; to write with, as another `dtype`.

    An artifact that was exported without its tokenizer takes it from `tokenizer`, a name or file, or from the folder `data`.
    """
    weights = open_weights(Path(path), which)
    return open_model(weights, find_tokenizer(weights, tokenizer, data), device, dtype)


def generate(path: str | Path, prompt: str = "", *, which: str = "latest", device: str = "auto", **options: Any) -> str:
    """Load a model and let it continue a prompt."""
    return load(path, which=which, device=device).generate(prompt, **options)
