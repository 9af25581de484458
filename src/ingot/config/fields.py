"""A table of all settings by dotted path, built from the schema: allowed values, default and description.

Loading, `ingot init` and the documentation all use this table, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from typing import Any, cast, get_args

from pydantic import BaseModel

from ingot.config.schema import FAMILIES, Config

DEFAULT_FAMILY = "gpt2"


@dataclass(frozen=True)
class SettingSpec:
    """One setting: its path, the JSON schema of its value, its default and its description."""

    path: str
    schema: Mapping[str, Any]
    default: Any
    required: bool
    description: str
    items: Mapping[str, SettingSpec] = field(default_factory=dict)  # settings of each entry, if the value is a list of mappings

    @property
    def _alternatives(self) -> list[Mapping[str, Any]]:
        return list(self.schema.get("anyOf", [self.schema]))

    @property
    def types(self) -> set[str]:
        """Return the JSON types that the value of the setting may have; an empty set means any type."""
        return {part["type"] for part in self._alternatives if "type" in part}

    @property
    def choices(self) -> list[str]:
        """Return the allowed values if the schema enumerates them, else an empty list."""
        return [word for part in self._alternatives for word in _words(part)]

    @property
    def takes_any_text(self) -> bool:
        """Return True if the value may be an arbitrary string."""
        return any(part.get("type") == "string" and not _words(part) for part in self._alternatives)

    @property
    def free_form(self) -> bool:
        """Return True if the value is a mapping with arbitrary keys."""
        return self.types == {"object"}

    @property
    def allowed(self) -> str:
        """Describe the allowed values, for example `integer >= 1 or null`."""
        words: list[str] = []
        for part in self._alternatives:
            items = part.get("items", {})
            listed = "mappings" if "$ref" in items else "words" if items.get("type") == "string" else "numbers"
            mapping = "mapping of names to numbers" if isinstance(part.get("additionalProperties"), dict) else "mapping"
            names = {"string": "text", "object": mapping, "array": f"list of {listed}"}
            signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
            # Bounds of 2**31 and more only prevent overflow or rounding and are not shown.
            bounds = [f"{sign} {part[key]:g}" for key, sign in signs.items() if key in part and part[key] < 2**31]
            kind = names.get(part.get("type", ""), part.get("type"))
            boolean = ["true", "false"] if kind == "boolean" else []
            words += _words(part) or boolean or [f"{kind} {' and '.join(bounds)}".strip()]
        return either(*words)


def _words(part: Mapping[str, Any]) -> list[str]:
    return list(part.get("enum", [part["const"]] if "const" in part else []))


def either(*words: str) -> str:
    """Join words as alternatives: `a, b or c`."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def sections(family: str = DEFAULT_FAMILY) -> dict[str, type[BaseModel]]:
    """Return the pydantic class of each config section, in order; `family` selects the class of the model section."""
    others = {name: cast("type[BaseModel]", field.annotation) for name, field in Config.model_fields.items() if name != "model"}
    return {"model": FAMILIES[family], **others}


@cache
def settings(family: str = DEFAULT_FAMILY) -> dict[str, SettingSpec]:
    """Return every setting of a run that uses this model family, by dotted path, in the order of the schema."""
    return {path: setting for section, model in sections(family).items() for path, setting in _described(section, model).items()}


def _described(prefix: str, model: type[BaseModel]) -> dict[str, SettingSpec]:
    specs: dict[str, SettingSpec] = {}
    schemas = model.model_json_schema()["properties"]
    for name in sorted(model.model_fields, key="family".__ne__):  # `family` first: it determines the other fields
        info, path = model.model_fields[name], f"{prefix}.{name}"
        schema = {"enum": list(FAMILIES), "type": "string"} if path == "model.family" else schemas[name]
        items = _described(path, get_args(info.annotation)[0]) if "$ref" in schema.get("items", {}) else {}
        by_name = {item.path.removeprefix(f"{path}."): item for item in items.values()}
        specs[path] = SettingSpec(path, schema, info.default, info.is_required(), info.description or "", by_name)
    return specs


@cache
def known() -> list[str]:
    """Return the dotted paths of all settings of all model families."""
    return list(dict.fromkeys(path for family in FAMILIES for path in settings(family)))


def setting_at(path: tuple[str, ...], family: str) -> SettingSpec | None:
    """Return the setting at a path, or None; a path inside a free-form mapping resolves to the setting that holds the mapping."""
    setting = settings(family).get(".".join(path[:2]))
    return setting if setting and (len(path) == 2 or setting.free_form) else None


def item_at(path: tuple[str, ...], family: str) -> SettingSpec | None:
    """Return the setting at a path inside a list of mappings, such as training.stages.0.share, or None if there is none."""
    listed = setting_at(path[:2], family)
    item = listed.items.get(path[3]) if listed and len(path) > 3 else None
    return replace(item, path=".".join(path[:4])) if item else None


def suggest(path: str) -> list[str]:
    """Suggest existing settings for an unknown dotted path."""
    section, _, name = path.rpartition(".")
    same = [setting for setting in known() if setting.partition(".")[2] == name]
    if same:
        return get_close_matches(path, same, n=1, cutoff=0.0) if section and section not in sections() else same
    if section:
        return get_close_matches(path, known(), n=1)
    names = get_close_matches(name, {setting.partition(".")[2] for setting in known()}, n=1)
    return [setting for setting in known() if setting.partition(".")[2] in names]


def leaf_values(config: Config) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every value of a config with its path, in the order of `settings`; a free-form mapping is yielded entry by entry."""

    def walk(path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                yield from walk((*path, key), item)
        else:
            yield path, value

    for setting in settings(config.model.family).values():
        section, _, name = setting.path.partition(".")
        yield from walk((section, name), value_of(config, setting))


def value_of(config: Config, setting: SettingSpec) -> Any:
    """Return the value of a setting in a config; a list of sections becomes a list of dicts without default values."""
    section, _, name = setting.path.partition(".")
    value = getattr(getattr(config, section), name)
    return [item.model_dump(exclude_defaults=True) for item in value] if setting.items else value
