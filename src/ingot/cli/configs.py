"""The config that a verb's words describe, whichever of the two kinds of YAML file they name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ingot.config.loading import ResolvedConfig, load_config
from ingot.errors import ConfigError


def resolve(
    recipe: str | None,
    file: Path | None,
    overrides: Mapping[str, Any],
    world_size: int = 1,
    told: Callable[[str], None] | None = None,
) -> ResolvedConfig:
    """The config of a recipe, a file and settings; a file with gpt-simple's keys is translated as its own door does, and told."""
    from ingot.compat.gpt_simple.reading import is_gpt_simple, read_config

    if file is None or not file.is_file() or not is_gpt_simple(file):
        return load_config(recipe=recipe, file=file, overrides=overrides)
    if recipe is not None:
        raise ConfigError(f"{file} has gpt-simple's keys, so the recipe {recipe} cannot be given as well; keep one")
    from ingot.compat.gpt_simple.translate import kept_tokens, tell_batch, translate

    config = read_config(file, overrides)
    kept = kept_tokens(config)
    if told is not None:
        told(f"{file} has gpt-simple's keys and is read as `gpt-simple train --config` reads it")
        tell_batch(config, world_size, kept, told)
    return translate(config, world_size, kept)
