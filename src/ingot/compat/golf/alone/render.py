"""In place of ingot.config.render: the YAML of a run folder, its values as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ingot.config.schema import Config


def dump_yaml(config: Config, origins: Mapping[str, str] | None = None) -> str:
    """Every value of a config, with its origin beside it where origins are given; loads back to an equal config."""
    lines: list[str] = []
    for section, settings in config.model_dump(mode="json").items():
        lines.append(f"{section}:")
        for name, value in settings.items():
            origin = f"  # {origins.get(f'{section}.{name}', 'default')}" if origins is not None else ""
            lines.append(f"  {name}: {json.dumps(value)}{origin}")
    return "\n".join(lines) + "\n"
