"""In place of ingot.config.families: one family, and models of one's own."""

from __future__ import annotations

from ingot.model.golf_settings import GolfSettings
from ingot.model.settings import FileSettings, ModelSettings

AnyModel = FileSettings | GolfSettings
FAMILIES: dict[str, type[ModelSettings]] = {"golf": GolfSettings, "file": FileSettings}
