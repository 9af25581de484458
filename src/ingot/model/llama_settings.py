"""The settings of the llama family."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ingot.model.settings import FAMILY, DropoutSettings, RotarySettings, Size


class LlamaSettings(DropoutSettings, RotarySettings):
    """The Llama shape as gpt-simple trains it: rotary positions, RMSNorm, gated MLP, grouped keys and values."""

    family: Literal["llama"] = Field("llama", description=FAMILY)
    bias: bool = Field(False, description="Biases in the linear layers, where the three settings below do not say otherwise.")
    qkv_bias: bool | None = Field(None, description="Biases in the projections to queries, keys and values. null: as bias.")
    attention_out_bias: bool | None = Field(None, description="Bias in the projection after attention. null: as bias.")
    mlp_bias: bool | None = Field(None, description="Biases in the MLP. null: as bias.")
    mlp: Literal["gated", "plain"] = Field("gated", description="gated: down(up(x) * act(gate(x))). plain: down(act(up(x))).")
    activation: Literal["silu", "gelu", "relu"] = Field("silu", description="Activation of the MLP; gelu is its tanh form.")
    inner_width: Size | None = Field(
        None, description="Width inside the MLP. null: 8/3 of the width, rounded up to a multiple of 256, if gated; else 4 times."
    )
    norm: Literal["rmsnorm", "layernorm"] = Field("rmsnorm", description="Normalisation before each branch and at the end.")
    norm_epsilon: Annotated[float, Field(gt=0, lt=1)] = Field(1e-5, description="Added to the variance inside the norms.")
    tied: bool = Field(True, description="The head is the token embedding. false: a matrix of its own.")
    rope_scaling: Literal["linear", "ntk"] | None = Field(
        None, description="Stretch rotary positions by rope_factor: linear divides the angles, ntk multiplies the base."
    )
    rope_factor: Annotated[float, Field(ge=1, le=1e30, allow_inf_nan=False)] = Field(
        1.0, description="How far rope_scaling stretches."
    )
