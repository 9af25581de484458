"""In place of ingot.config.schema and ingot.model.registry, where the one file trains by settings: the frontier family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ingot.model.frontier import Frontier
from ingot.model.settings import FrontierSettings, ModelSettings

AnyModel = FrontierSettings
Kernel = str
FAMILIES: dict[str, type[ModelSettings]] = {"frontier": FrontierSettings}
OURS = (Frontier,)


def build(settings: Mapping[str, Any]) -> nn.Module:
    """The model that a `model` section describes."""
    return Frontier(**{name: value for name, value in settings.items() if name != "family"})
