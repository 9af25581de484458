"""In place of ingot.model.registry: one model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ingot.model.golf import Golf


def build(settings: Mapping[str, Any]) -> nn.Module:
    """The model that a `model` section describes."""
    return Golf(**{name: value for name, value in settings.items() if name != "family"})
