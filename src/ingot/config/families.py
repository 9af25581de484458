"""The model section of a config: the settings of one of the model families, and the kernels that parts of them can use."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from ingot.model.frontier_settings import FrontierSettings
from ingot.model.golf_settings import GolfSettings
from ingot.model.gpt2_settings import GPT2Settings
from ingot.model.llama_settings import LlamaSettings
from ingot.model.settings import FileSettings, ModelSettings


def _family(section: Any) -> str:
    if isinstance(section, dict):
        return "file" if section.get("file") is not None else str(section.get("family", "gpt2"))
    return str(getattr(section, "family", section))


AnyModel = Annotated[
    Annotated[GPT2Settings, Tag("gpt2")]
    | Annotated[LlamaSettings, Tag("llama")]
    | Annotated[GolfSettings, Tag("golf")]
    | Annotated[FrontierSettings, Tag("frontier")]
    | Annotated[FileSettings, Tag("file")],
    Discriminator(_family),
]
FAMILIES: dict[str, type[ModelSettings]] = {
    "gpt2": GPT2Settings,
    "llama": LlamaSettings,
    "golf": GolfSettings,
    "frontier": FrontierSettings,
    "file": FileSettings,
}
Kernel = Literal["loss", "rotary", "qkv", "mlp", "gate", "scales", "stream"]
