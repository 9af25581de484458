"""Which models other programs' files can hold: what the schema says of every setting of a model, applied to one.

A setting that says nothing is not portable: whoever adds one decides, and a test reads the schema to see that they did.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ingot.config.families import FAMILIES
from ingot.errors import ConfigError, Setting
from ingot.model.settings import ModelSettings

ANY = "any"
SHOWN = {"huggingface": "Hugging Face's layout", "gguf": "GGUF"}


def portable_values(model: type[ModelSettings], name: str, target: str) -> list[Any] | None:
    """The values of a setting that a kind of file can hold; None: all of them."""
    extra = model.model_fields[name].json_schema_extra
    told = extra.get("portable") if isinstance(extra, dict) else None
    values: Any = told.get(target, []) if isinstance(told, dict) else []
    return None if values == ANY else list(values)


def refuse_unportable(settings: Mapping[str, Any], target: str) -> None:
    """Refuse a section `model` that a kind of file cannot hold, with the setting that is in the way and what would do."""
    model = FAMILIES[settings["family"]]
    for name in sorted(settings, key="family".__ne__):  # its other settings say nothing where the family has no place
        values = portable_values(model, name, target)
        if values is not None and settings[name] not in values:
            others = f"{' and '.join(map(str, values))} {'has' if len(values) == 1 else 'have'} one; " if values else ""
            advice = f"{others}--format ingot takes any model"
            raise ConfigError(f"{{0}} has no place in {SHOWN[target]}", Setting(f"model.{name}", settings[name]), advice=advice)
