"""Write a config and its schema as text: YAML, commented YAML, docs/configuration.md and the JSON schema."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from textwrap import fill
from typing import Any

from ingot.config.fields import DEFAULT_FAMILY, Setting, sections, settings_of, value_of
from ingot.config.schema import FAMILIES, Config
from ingot.config.text import format_value

_WIDTH = 100
_INTRODUCTION = """# Configuration

This page is generated from the schema by `ingot config docs -o docs/configuration.md`.

A run is described by one config. Each setting has a section and a name, and its value comes from the last of these places that
sets it:

1. the default below,
2. the recipe: `--recipe demo`, or `base: demo` at the top of a config file,
3. the config file: `--config c.yaml`,
4. the environment: `INGOT_TRAINING__SEED=1` sets `training.seed` (capitals, two underscores between section and name),
5. the command line: `--training.seed 1` or `--training.seed=1`,
6. a sweep: `--vary` and `--arms` of `ingot sweep`,
7. Python: the settings given to `ingot.train`.

`ingot config show` prints the outcome and where each value came from; a run folder keeps both in its `config.yaml`. Everything is
checked together after all places are merged. An unknown name is an error that suggests the right one.

A config file is YAML with the sections as keys. It sets what it wants to change; `ingot init -o config.yaml` writes one with
every setting and its meaning.

```yaml
base: demo  # a recipe, or a YAML file beside this one; it may have a base itself
optimizer:
  learning_rate: 1e-3
training:
  output_dir: runs/first
```

On the command line a boolean needs no value (`--model.bias` is `--model.bias true`), `null` and `none` unset a setting that may
be null, and entries of a mapping are set by their path: `--model.settings.depth 3`. A list is given as a whole, as YAML or JSON:
`--training.stages '[{steps: 100, seq_len: 128}, {steps: 100}]'`. A place that chooses another model family drops what the places
before it set for the old family alone."""


def dump_yaml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """Return a config as YAML, with the origin of each value as a comment if given; loads back to an equal config."""
    lines: list[str] = []
    for section in sections(config.model.family):
        lines.append(f"{section}:")
        for setting in settings_of(section, config.model.family):
            lines += _entry(config, setting, origins or {})
    return "\n".join(lines) + "\n"


def commented_yaml(config: Config, heading: str) -> str:
    """Return a config as YAML with the meaning, allowed values and default of each setting; loads back to an equal config."""
    lines = [_comment(heading)]
    for section, model in sections(config.model.family).items():
        lines += ["", _comment(describe(model)), f"{section}:"]
        for setting in settings_of(section, config.model.family):
            lines += [_comment(setting.description, "  "), _comment(f"({_limits(setting)})", "  ")]
            lines += _entry(config, setting, {})
            for key, item in setting.items.items():  # below the setting, where an entry would be
                lines.append(_comment(f"{key}: {item.description} ({_limits(item)})", "    ", "  "))
            lines.append("")
        lines.pop()
    return "\n".join(lines) + "\n"


def _entry(config: Config, setting: Setting, origins: Mapping[str, str]) -> list[str]:
    """Return the YAML lines of one setting."""

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
    """Return the meaning of a section."""
    return " ".join((model.__doc__ or "").split())


def markdown() -> str:
    """Return the text of docs/configuration.md."""
    parts = [_INTRODUCTION]
    for section, model in sections().items():
        if section == "model":
            for family, family_model in FAMILIES.items():
                parts += [f"## model, family {family}", describe(family_model), _table(settings_of(section, family))]
        else:
            found = settings_of(section, DEFAULT_FAMILY)
            parts += [f"## {section}", describe(model), _table(found)]
            for listed in (setting for setting in found if setting.items):
                parts += [f"### An entry of {listed.path}", _table(listed.items.values())]
    return "\n\n".join(parts) + "\n"


def _portable(setting: Setting) -> str:
    """Return which values of a model setting can be exported to files of other programs, if not all can."""
    told: dict[str, list[str] | str] = setting.schema.get("portable") or {}
    limits = [f"{target} {' or '.join(map(str, values))}" for target, values in told.items() if values != "any"]
    everything = all(set(values) >= set(setting.choices) for values in told.values() if values != "any")
    return f" Portable: {', '.join(limits)}." if limits and not everything else ""


def _table(settings: Iterable[Setting]) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for setting in settings:
        default = "required" if setting.required else f"`{format_value(setting.default)}`"
        cells = [f"`{setting.path}`", setting.allowed, default, f"{setting.description}{_portable(setting)}"]
        rows.append("| " + " | ".join(re.sub(r"\||<(?=[a-z])", r"\\\g<0>", cell) for cell in cells) + " |")
    return "\n".join(rows)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a config file, for editors."""
    schema = Config.model_json_schema()
    base = {
        "type": "string",
        "description": "A recipe (`ingot recipes`) or YAML file whose values hold where this file sets none.",
    }
    schema["properties"] = {"base": base, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Ingot config"}
