"""The Python interface: `ingot.train`, `ingot.load` and `ingot.generate`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from ingot.backends.sampling import Sampling
from ingot.config.loading import Sources
from ingot.config.schema import Config
from ingot.console.progress import make_reporter
from ingot.inference.model import LoadedModel, find_tokenizer, open_model, open_weights
from ingot.preflight.auto import RECIPE, resolve_auto
from ingot.preflight.validate import check_before_training
from ingot.runs.mirror import local_run
from ingot.runs.reporter import Reporter
from ingot.runs.state import TrainingResult
from ingot.runtime.ranks import ranks_from_environment
from ingot.train.resume import COMPLETE, completed_result, fetch_runs
from ingot.train.start import run


def load(
    path: str | Path,
    *,
    which: str = "latest",
    device: str = "auto",
    tokenizer: str | None = None,
    data: str | None = None,
    dtype: str | None = None,
) -> LoadedModel:
    """Load a model from a run folder, a checkpoint or an artifact; `dtype` casts the weights for generation.

    `which` selects the `latest` or `best` checkpoint of a run. If no tokenizer is stored with the model, pass `tokenizer` (a name
    or file) or `data` (a prepared folder).
    """
    weights = open_weights(local_run(str(path)), which)
    return open_model(weights, find_tokenizer(weights, tokenizer, data), device, dtype)


def generate(
    path: str | Path,
    prompt: str = "",
    *,
    which: str = "latest",
    device: str = "auto",
    tokens: int = 200,
    temperature: float = Sampling.temperature,
    top_k: int | None = Sampling.top_k,
    top_p: float | None = Sampling.top_p,
    seed: int | None = Sampling.seed,
    use_cache: bool = Sampling.use_cache,
    repetition_penalty: float = Sampling.repetition_penalty,
    stop_at_end: bool = False,
) -> str:
    """Load a model and return a prompt followed by the completion that the model generates."""
    return load(path, which=which, device=device).generate(
        prompt,
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        use_cache=use_cache,
        repetition_penalty=repetition_penalty,
        stop_at_end=stop_at_end,
    )


def train(
    config: str | Path | Config | dict[str, Any] | None = None,
    *,
    recipe: str | None = None,
    quiet: bool = False,
    reporter: Reporter | None = None,
    **overrides: Any,
) -> TrainingResult:
    """Train with the settings of a YAML file, a recipe, a Config or a dict; training={"max_steps": 10} overrides one setting.

    Progress is shown on stderr, unless `quiet` is set or a custom `reporter` is given.
    """
    if isinstance(config, Config):
        config = {name: getattr(config, name).model_dump() for name in type(config).model_fields}
    file, given = (None, config) if isinstance(config, dict) else (config, overrides)
    if isinstance(config, dict):
        given = {**config, **{name: _merged(config.get(name), section) for name, section in overrides.items()}}
    sources, world_size = Sources(recipe, file, python=given), ranks_from_environment().world_size
    resolved = sources.load() if recipe != RECIPE else None  # report config errors before showing progress
    with nullcontext(reporter or Reporter()) if quiet or reporter is not None else make_reporter() as shown:
        resolved = resolved or resolve_auto(sources, world_size, shown.message)
        fetch_runs(resolved.config)
        if (result := completed_result(resolved.config)) is not None:
            shown.message(f"{COMPLETE.format(result.run_dir)} in another training.output_dir")
            return result
        dataset = check_before_training(resolved.config, world_size, shown.message)
        return run(resolved, shown, dataset=dataset)


def _merged(section: Any, changes: Any) -> Any:
    both = isinstance(section, Mapping) and isinstance(changes, Mapping)
    return {**section, **changes} if both else changes  # validation rejects anything that is not a mapping
