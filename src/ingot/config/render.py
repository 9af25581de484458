"""Format a config and its schema: as YAML, commented YAML, docs/configuration.md and a JSON schema."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib import resources
from textwrap import fill
from typing import Any

from ingot.config.fields import DEFAULT_FAMILY, SettingSpec, sections, settings, value_of
from ingot.config.schema import FAMILIES, Config
from ingot.config.text import format_value

WIDTH = 100  # maximum line length of the commented YAML


def dump_yaml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """Return a config as YAML that loads back to an equal config; `origins` adds the origin of each value as a comment."""
    lines: list[str] = []
    for section in sections(config.model.family):
        lines.append(f"{section}:")
        for setting in _settings_of(section, config.model.family):
            lines += _entry(config, setting, origins or {})
    return "\n".join(lines) + "\n"


def commented_yaml(config: Config, heading: str) -> str:
    """Return a config as YAML that can be loaded, with each setting's description, allowed values and default in comments."""

    def comment(text: str, indent: str = "", hanging: str = "") -> str:
        start = f"{indent}# "
        rest = f"{start}{hanging}"
        return fill(text, WIDTH, initial_indent=start, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False)

    lines = [comment(heading)]
    for section, model in sections(config.model.family).items():
        lines += ["", comment(_meaning(model)), f"{section}:"]
        for setting in _settings_of(section, config.model.family):
            lines += [comment(setting.description, "  "), comment(f"({setting.allowed}; {_default(setting)})", "  ")]
            lines += _entry(config, setting, {})
            for key, item in setting.items.items():  # describe the keys of list entries, indented like an entry
                text = f"{key}: {item.description} ({item.allowed}; {_default(item)})"
                lines.append(comment(text, "    ", "  "))
            lines.append("")
        lines.pop()
    return "\n".join(lines) + "\n"


def _settings_of(section: str, family: str) -> list[SettingSpec]:
    return [setting for path, setting in settings(family).items() if path.startswith(f"{section}.")]


def _entry(config: Config, setting: SettingSpec, origins: Mapping[str, str]) -> list[str]:
    def lines(path: tuple[str, ...], value: Any) -> list[str]:
        start = "  " * (len(path) - 1) + format_value(path[-1]) + ":"
        if isinstance(value, dict) and value:
            return [start, *[line for key, item in value.items() for line in lines((*path, key), item)]]
        entries = value if setting.items else []
        origin = "".join(char if char.isprintable() else "?" for char in origins.get(".".join(path), ""))
        first = start if entries else f"{start} {format_value(value)}"
        return [first + (f"  # {origin}" if origin else ""), *(f"    - {format_value(entry)}" for entry in entries)]

    section, _, name = setting.path.partition(".")
    return lines((section, name), value_of(config, setting))


def _default(setting: SettingSpec) -> str:
    return "required" if setting.required else f"default {format_value(setting.default)}"


def _meaning(model: type) -> str:
    return " ".join((model.__doc__ or "").split())


def markdown() -> str:
    """Return the text of docs/configuration.md."""
    parts = [resources.files("ingot.config").joinpath("introduction.md").read_text(encoding="utf-8").rstrip()]
    for family, family_model in FAMILIES.items():
        parts += [f"## model, family {family}", _meaning(family_model), _table(_settings_of("model", family))]
    for section, model in list(sections().items())[1:]:
        listed = _settings_of(section, DEFAULT_FAMILY)
        parts += [f"## {section}", _meaning(model), _table(listed)]
        for setting in listed:
            if setting.items:
                parts += [f"### An entry of {setting.path}", _table(setting.items.values())]
    return "\n\n".join(parts) + "\n"


def _table(listed: Iterable[SettingSpec]) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for setting in listed:
        default = "required" if setting.required else f"`{format_value(setting.default)}`"
        # `portable` lists the values of a model setting that each export format supports; shown if a format does not support all.
        targets: dict[str, list[str]] = {k: v for k, v in setting.schema.get("portable", {}).items() if v != "any"}
        limits = [f"{' or '.join(map(str, values))} to {target}" for target, values in targets.items()]
        everything = all(set(values) >= set(setting.choices) for values in targets.values())
        meaning = setting.description + ("" if everything else f" Values that can be exported: {', '.join(limits)}.")
        cells = [f"`{setting.path}`", setting.allowed, default, meaning]
        rows.append("| " + " | ".join(re.sub(r"\||<(?=[a-z])", r"\\\g<0>", cell) for cell in cells) + " |")
    return "\n".join(rows)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a config file, for editors."""
    schema = Config.model_json_schema()
    base = {
        "type": "string",
        "description": "A recipe (`ingot recipes`) or YAML file that provides the values that this file does not set.",
    }
    schema["properties"] = {"base": base, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Ingot config"}
