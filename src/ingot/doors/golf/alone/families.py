"""In place of ingot.config.families: the golf family, models of one's own, and the family that a config has by default."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Tag

from ingot.model.golf_settings import GolfSettings
from ingot.model.gpt2_settings import GPT2Settings
from ingot.model.settings import FileSettings, ModelSettings

FAMILIES: dict[str, type[ModelSettings]] = {"gpt2": GPT2Settings, "golf": GolfSettings, "file": FileSettings}


def _family(section: Any) -> str:
    if isinstance(section, dict):
        return "file" if section.get("file") is not None else str(section.get("family", "gpt2"))
    return str(section.family)


AnyModel = Annotated[
    Annotated[GPT2Settings, Tag("gpt2")] | Annotated[GolfSettings, Tag("golf")] | Annotated[FileSettings, Tag("file")],
    Discriminator(_family),
]
