"""A config and its schema as text: the commented YAML, the YAML of a run folder, and the JSON schema."""

from __future__ import annotations

import re
from collections.abc import Mapping
from textwrap import fill
from typing import Any

from ingot.config.fields import Setting, sections, settings_of, value_of
from ingot.config.schema import Config
from ingot.config.text import format_value

_WIDTH = 100


def dump_yaml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """Every value of a config, with its origin beside it where origins are given; loads back to an equal config."""
    lines: list[str] = []
    for section in sections(config.model.family):
        lines.append(f"{section}:")
        for setting in settings_of(section, config.model.family):
            lines += _entry(config, setting, origins or {})
    return "\n".join(lines) + "\n"


def is_record(text: str) -> bool:
    """Whether a text is the YAML that a run writes of itself, with the origin of every value, and not a user's own."""
    values = [line for line in text.splitlines() if re.match(r"  \w+: ", line)]
    return text.startswith("model:\n") and all("  # " in line for line in values)


def commented_yaml(config: Config, heading: str) -> str:
    """Every value of a config below its meaning, what it may be and its default; loads back to an equal config."""
    lines = [_comment(heading)]
    for section, model in sections(config.model.family).items():
        lines += ["", _comment(describe(model)), f"{section}:"]
        for setting in settings_of(section, config.model.family):
            lines += [_comment(setting.description, "  "), _comment(f"({_limits(setting)})", "  ")]
            lines += _entry(config, setting, {})
            for key, item in setting.items.items():  # below, where an entry would stand
                lines.append(_comment(f"{key}: {item.description} ({_limits(item)})", "    ", "  "))
            lines.append("")
        lines.pop()
    return "\n".join(lines) + "\n"


def _entry(config: Config, setting: Setting, origins: Mapping[str, str]) -> list[str]:
    """The YAML lines of one setting."""

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


def _limits(setting: Setting) -> str:
    return f"{setting.allowed}; " + ("required" if setting.required else f"default {format_value(setting.default)}")


def _comment(text: str, indent: str = "", hanging: str = "") -> str:
    start = f"{indent}# "
    rest = f"{start}{hanging}"
    return fill(text, _WIDTH, initial_indent=start, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False)


def describe(model: type) -> str:
    """The meaning of a section."""
    return " ".join((model.__doc__ or "").split())


def json_schema() -> dict[str, Any]:
    """The JSON schema of a config file, for editors."""
    schema = Config.model_json_schema()
    base = {
        "type": "string",
        "description": "A recipe (`ingot recipes`) or YAML file whose values hold where this file sets none.",
    }
    schema["properties"] = {"base": base, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Ingot config"}
