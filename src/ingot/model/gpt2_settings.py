"""The settings of the gpt2 family."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ingot.model.settings import ANYWHERE, FAMILY, PORTABLE_FAMILIES, DropoutSettings, portable


class GPT2Settings(DropoutSettings):
    """GPT-2 as nanoGPT trains it: learned positions, LayerNorm before each branch, a head tied to the embedding."""

    family: Literal["gpt2"] = Field("gpt2", description=FAMILY, json_schema_extra=PORTABLE_FAMILIES)
    bias: bool = Field(True, description="Biases in the linear layers and LayerNorms.", json_schema_extra=ANYWHERE)
    gelu: Literal["tanh", "erf"] = Field(
        "tanh",
        description="Form of the GELU: tanh as in OpenAI's GPT-2, erf as in nanoGPT.",
        json_schema_extra=portable("tanh", "erf", gguf=("tanh",)),
    )

    def weights_besides_embedding(self, rows: int, context: int) -> int:
        """Parameters, but for those of the embedding of so many tokens."""
        width, bias = self.width, int(self.bias)
        block = 12 * width * width + bias * 9 * width + 2 * width * (1 + bias)
        return context * width + self.layers * block + width * (1 + bias)
