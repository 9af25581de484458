"""The settings of the llama family."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from ingot.model.settings import ANYWHERE, FAMILY, PORTABLE_FAMILIES, DropoutSettings, RotarySettings, Size, portable


class LlamaSettings(DropoutSettings, RotarySettings):
    """The Llama shape as gpt-simple trains it: rotary positions, RMSNorm, gated MLP, grouped keys and values."""

    family: Literal["llama"] = Field("llama", description=FAMILY, json_schema_extra=PORTABLE_FAMILIES)
    bias: bool = Field(
        False,
        description="Biases in the linear layers, where the three settings below do not say otherwise.",
        json_schema_extra=ANYWHERE,
    )
    qkv_bias: bool | None = Field(
        None, description="Biases in the projections to queries, keys and values. null: as bias.", json_schema_extra=ANYWHERE
    )
    attention_out_bias: bool | None = Field(
        None, description="Bias in the projection after attention. null: as bias.", json_schema_extra=ANYWHERE
    )
    mlp_bias: bool | None = Field(None, description="Biases in the MLP. null: as bias.", json_schema_extra=ANYWHERE)
    mlp: Literal["gated", "plain"] = Field(
        "gated", description="gated: down(up(x) * act(gate(x))). plain: down(act(up(x))).", json_schema_extra=portable("gated")
    )
    activation: Literal["silu", "gelu", "relu"] = Field(
        "silu",
        description="Activation of the MLP; gelu is its tanh form.",
        json_schema_extra=portable("silu", "gelu", "relu", gguf=("silu",)),
    )
    inner_width: Size | None = Field(
        None,
        description="Width inside the MLP. null: 8/3 of the width, rounded up to a multiple of 256, if gated; else 4 times.",
        json_schema_extra=ANYWHERE,
    )
    norm: Literal["rmsnorm", "layernorm"] = Field(
        "rmsnorm", description="Normalisation before each branch and at the end.", json_schema_extra=portable("rmsnorm")
    )
    norm_epsilon: Annotated[float, Field(gt=0, lt=1)] = Field(
        1e-5, description="Added to the variance inside the norms.", json_schema_extra=ANYWHERE
    )
    tied: bool = Field(
        True, description="The head is the token embedding. false: a matrix of its own.", json_schema_extra=ANYWHERE
    )
    rope_scaling: Literal["linear", "ntk"] | None = Field(
        None,
        description="Stretch rotary positions by rope_factor: linear divides the angles, ntk multiplies the base.",
        json_schema_extra=ANYWHERE,
    )
    rope_factor: Annotated[float, Field(ge=1, le=1e30, allow_inf_nan=False)] = Field(
        1.0, description="How far rope_scaling stretches.", json_schema_extra=ANYWHERE
    )

    def weights_besides_embedding(self, rows: int, context: int) -> int:
        """Parameters, but for those of the embedding of so many tokens."""
        width, kv = self.width, (self.kv_heads or self.heads) * (self.width // self.heads)
        asked = self.qkv_bias, self.attention_out_bias, self.mlp_bias
        qkv_bias, out_bias, mlp_bias = (self.bias if bias is None else bias for bias in asked)
        gated = self.mlp == "gated"
        inner = mlp_width(width, self.inner_width, gated)
        attention = 2 * width * width + 2 * width * kv + qkv_bias * (width + 2 * kv) + out_bias * width
        mlp = (3 if gated else 2) * width * inner + mlp_bias * ((2 if gated else 1) * inner + width)
        norm = width if self.norm == "rmsnorm" else 2 * width
        return self.layers * (attention + mlp + 2 * norm) + norm + (0 if self.tied else rows * width)


def mlp_width(width: int, inner_width: int | None, gated: bool = True) -> int:
    """The width inside the MLP, said or by its rule."""
    return inner_width or (math.ceil(8 * width // 3 / 256) * 256 if gated else 4 * width)
