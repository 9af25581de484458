"""In place of ingot.config.schema and ingot.model.registry: one family, and models of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ingot.model.golf import Golf
from ingot.model.registry import build_own
from ingot.model.settings import FileSettings, GolfSettings, ModelSettings

AnyModel = FileSettings | GolfSettings
Kernel = str
FAMILIES: dict[str, type[ModelSettings]] = {"golf": GolfSettings, "file": FileSettings}
OURS = (Golf,)


def build(settings: Mapping[str, Any]) -> nn.Module:
    """The model that a `model` section describes."""
    if settings["family"] == "file":
        return build_own(settings)
    return Golf(**{name: value for name, value in settings.items() if name != "family"})
