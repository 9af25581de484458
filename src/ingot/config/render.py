"""A config and its schema as text: the commented YAML, the YAML of a run folder, docs/configuration.md and the JSON schema."""

from __future__ import annotations

import re
from collections.abc import Mapping
from textwrap import fill
from typing import Any

from ingot.config.fields import DEFAULT_FAMILY, Setting, sections, settings
from ingot.config.schema import FAMILIES, Config
from ingot.config.text import format_value

_WIDTH = 100


def dump_yaml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """Every value of a config, with its origin beside it where origins are given; loads back to an equal config."""
    lines: list[str] = []
    for section in sections(config.model.family):
        lines.append(f"{section}:")
        for setting in _settings_of(section, config.model.family):
            lines += _entry(config, setting, origins or {})
    return "\n".join(lines) + "\n"


def commented_yaml(config: Config, heading: str) -> str:
    """Every value of a config below its meaning, what it may be and its default; loads back to an equal config."""
    lines = [_comment(heading)]
    for section, model in sections(config.model.family).items():
        lines += ["", _comment(_doc(model)), f"{section}:"]
        for setting in _settings_of(section, config.model.family):
            default = "required" if setting.required else f"default {format_value(setting.default)}"
            lines += [_comment(setting.description, "  "), _comment(f"({setting.allowed}; {default})", "  ")]
            lines += [*_entry(config, setting, {}), ""]
        lines.pop()
    return "\n".join(lines) + "\n"


def _settings_of(section: str, family: str) -> list[Setting]:
    return [setting for setting in settings(family).values() if setting.path.startswith(f"{section}.")]


def _entry(config: Config, setting: Setting, origins: Mapping[str, str]) -> list[str]:
    """The YAML lines of one setting."""

    def lines(path: tuple[str, ...], value: Any) -> list[str]:
        start = "  " * (len(path) - 1) + format_value(path[-1]) + ":"
        if isinstance(value, dict) and value:
            return [start, *[line for key, item in value.items() for line in lines((*path, key), item)]]
        origin = "".join(char if char.isprintable() else "?" for char in origins.get(".".join(path), ""))
        return [f"{start} {format_value(value)}" + (f"  # {origin}" if origin else "")]

    section, _, name = setting.path.partition(".")
    return lines((section, name), getattr(getattr(config, section), name))


def _comment(text: str, indent: str = "") -> str:
    start = f"{indent}# "
    return fill(text, _WIDTH, initial_indent=start, subsequent_indent=start, break_long_words=False, break_on_hyphens=False)


def _doc(model: type) -> str:
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


def markdown() -> str:
    """The text of docs/configuration.md."""
    parts = [_INTRODUCTION]
    for section, model in sections().items():
        if section == "model":
            for family, family_model in FAMILIES.items():
                parts += [f"## model, family {family}", _doc(family_model), _table(section, family)]
        else:
            parts += [f"## {section}", _doc(model), _table(section, DEFAULT_FAMILY)]
    return "\n\n".join(parts) + "\n"


def _table(section: str, family: str) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for setting in _settings_of(section, family):
        default = "required" if setting.required else f"`{format_value(setting.default)}`"
        cells = [f"`{setting.path}`", setting.allowed, default, setting.description]
        rows.append("| " + " | ".join(re.sub(r"\||<(?=[a-z])", r"\\\g<0>", cell) for cell in cells) + " |")
    return "\n".join(rows)


_INTRODUCTION = """# Configuration

This page is made from the schema by `ingot config docs -o docs/configuration.md`.

A run is described by one config. Each setting has a section and a name, and its value comes from the last of these places that
sets it:

1. the default below,
2. the recipe: `--recipe demo`, or `base: demo` at the top of a config file,
3. the config file: `--config c.yaml`,
4. the environment: `INGOT_TRAINING__SEED=1` sets `training.seed` (capitals, two underscores between section and name),
5. the command line: `--training.seed 1` or `--training.seed=1`,
6. Python: the settings given to `ingot.train`.

`ingot config show` prints the outcome and where each value came from; a run folder keeps both in its `config.yaml`. Everything is
checked together after the last place has spoken. A name that does not exist is an error that suggests the right one.

A config file is YAML with the sections as keys. It sets what it wants to change; `ingot init -o config.yaml` writes one with
every setting and its meaning.

```yaml
base: demo  # a recipe, or a YAML file beside this one; it may have a base itself
optimizer:
  learning_rate: 1e-3
training:
  output_dir: runs/first
```

On the command line a truth value may stand alone (`--model.bias` is `--model.bias true`), `null` and `none` empty a setting that
may be empty, and the entries of a mapping have paths of their own: `--model.settings.depth 3`. A place that chooses another model
family drops what the places before it set for the old family alone."""
