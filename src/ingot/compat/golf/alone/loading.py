"""In place of ingot.config.loading: settings come from Python alone, so there is nothing to merge and no YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ingot.config.schema import Config
from ingot.errors import ConfigError, Setting


@dataclass(frozen=True)
class ResolvedConfig:
    """A validated config, where each of its values came from, and a name for the run."""

    config: Config
    origins: dict[str, str]
    recipe: str | None
    files: tuple[Path, ...] = ()  # none: there is no file to read settings from


def load_config(python: Mapping[str, Any], environment: Mapping[str, str]) -> ResolvedConfig:
    """The config of these values by dotted path; the first mistake is the ConfigError raised."""
    tree: dict[str, dict[str, Any]] = {}
    for path, value in python.items():
        section, _, name = path.partition(".")
        tree.setdefault(section, {})[name] = value
    try:
        return ResolvedConfig(Config.model_validate(tree), dict.fromkeys(python, "python"), None)
    except ValidationError as error:
        raise _said(error.errors()[0]) from None


def _said(detail: Any) -> ConfigError:
    if "error" in detail.get("ctx", {}):
        return ConfigError(str(detail["ctx"]["error"]))
    place = detail["loc"]
    setting = Setting(f"{place[0]}.{place[-1]}", detail["input"])
    return ConfigError(f"{{0}}: {detail['msg'].replace('Input should be', 'must be')}", setting)
