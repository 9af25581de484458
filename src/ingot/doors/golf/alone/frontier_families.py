"""In place of ingot.config.families, where the one file trains by settings: the frontier family."""

from __future__ import annotations

from ingot.model.frontier_settings import FrontierSettings
from ingot.model.settings import ModelSettings

AnyModel = FrontierSettings
FAMILIES: dict[str, type[ModelSettings]] = {"frontier": FrontierSettings}
