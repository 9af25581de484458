"""In place of ingot.config.render: the YAML of a run folder with its values as JSON, which is YAML too."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ingot.config.schema import Config


def dump_yaml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """Every value of a config, with its origin beside it where origins are given; loads back to an equal config."""
    lines = []
    for section, values in config.model_dump(mode="json").items():
        lines.append(f"{section}:")
        for name, value in values.items():
            origin = (origins or {}).get(f"{section}.{name}")
            lines.append(f"  {name}: {json.dumps(value)}" + (f"  # {origin}" if origin else ""))
    return "\n".join(lines) + "\n"
