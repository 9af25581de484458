"""docs/configuration.md, made from the schema."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ingot.config.families import FAMILIES
from ingot.config.fields import DEFAULT_FAMILY, Setting, sections, settings_of
from ingot.config.render import describe
from ingot.config.text import format_value

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
may be empty, and the entries of a mapping have paths of their own: `--model.settings.depth 3`. A list is given whole, as YAML or
JSON: `--training.stages '[{steps: 100, seq_len: 128}, {steps: 100}]'`. A place that chooses another model family drops what the
places before it set for the old family alone."""


def markdown() -> str:
    """The text of docs/configuration.md."""
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
    """In which files of other programs only some values of a setting of a model have a place."""
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
