"""The settings of the frontier family."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ingot.model.settings import FAMILY, PORTABLE_FAMILIES, Count, Depth, RotarySettings, Size

CONTROL = ("_gate", "mix_x")  # parts of the names of parameters that steer and do not multiply
GATE_CHANNELS, VALUE_GATE_CHANNELS = 12, 32  # of a layer's input that the gates of heads and of values look at


class FrontierSettings(RotarySettings):
    """What learns most in a few minutes: windows, a second way for values, half-rotated heads, gates. Its defaults fit 16 MB."""

    family: Literal["frontier"] = Field("frontier", description=FAMILY, json_schema_extra=PORTABLE_FAMILIES)
    layers: Depth = Field(10, description="Number of transformer blocks.")
    heads: Size = Field(4, description="Attention heads; they divide the width evenly.")
    width: Size = Field(512, description="Size of the residual stream.")
    kv_heads: Size | None = Field(
        2, description="Heads of keys and values; each serves heads / kv_heads heads of queries. null: as many as heads."
    )
    mlp_multiple: Annotated[float, Field(gt=0, le=1000)] = Field(
        3.0, description="Width inside the MLP, in widths of the residual stream."
    )
    tied: bool = Field(True, description="The head is the token embedding. false: a matrix of its own.")
    softcap: Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)] | None = Field(
        15.0,
        description="Logits are bent into plus or minus this: softcap * tanh(logits / softcap). null: they are not.",
    )
    rope_base: Annotated[float, Field(gt=1, le=1e30, allow_inf_nan=False)] = Field(
        200000.0, description="Rotary positions: the slowest pair turns once in about this many tokens, times 2 pi."
    )
    rope_part: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5, description="Part of each head's dimensions that rotary positions turn; the others know no place."
    )
    key_offset: bool = Field(
        True,
        description="In layers that see the whole row, the dimensions of a key that are not turned are those of the token "
        "before: a head finds what came after an earlier occurrence in one layer. Needs rope_part below 1.",
    )
    pattern: Annotated[str, Field(pattern="^[SL]+$", max_length=1000)] = Field(
        "SSSSL", description="S: a layer sees the last `window` tokens, L: the whole row. Repeated; the last layer is always L."
    )
    window: Size = Field(256, description="Tokens that an S layer sees, the token itself among them; a stage may change it.")
    values: Literal["none", "projections", "tables"] = Field(
        "projections",
        description="What every second layer and the last add to their values, through a gate per head: a projection of the "
        "embedding, or a row of a table of their own for each token (vocabulary x width weights, no FLOPs).",
    )
    value_layers: list[Count] | None = Field(
        None, description="Layers that add to their values, the first being 0. null: the last and every second before it."
    )
    head_gate: bool = Field(True, description="Each head's output is multiplied by a gate that looks at the layer's input.")

    @model_validator(mode="after")
    def _offset_fits(self) -> FrontierSettings:
        if self.rotated < 2:
            size = self.width // self.heads
            raise ValueError(f"model.rope_part={self.rope_part:g} turns no pair of a head's {size} dimensions; raise it")
        if self.key_offset and self.rotated == self.width // self.heads:
            raise ValueError("model.key_offset needs dimensions that are not turned; set model.rope_part below 1 or it to false")
        return self

    @model_validator(mode="after")
    def _value_layers_exist(self) -> FrontierSettings:
        if self.value_layers is not None and (missing := [i for i in self.value_layers if i >= self.layers]):
            last = self.layers - 1
            raise ValueError(f"model.value_layers names layer {missing[0]}; the last of {self.layers} layers is {last}")
        return self

    @property
    def rotated(self) -> int:
        """Dimensions of a head that are turned, in pairs."""
        return round(self.width // self.heads * self.rope_part / 2) * 2

    @property
    def inner_width(self) -> int:
        """Width inside the MLP."""
        return max(1, round(self.mlp_multiple * self.width))

    def has_values(self, layer: int) -> bool:
        """Whether a layer adds to its values."""
        named = (self.layers - 1 - layer) % 2 == 0 if self.value_layers is None else layer in self.value_layers
        return self.values != "none" and named

    def is_long(self, layer: int) -> bool:
        """Whether a layer sees the whole row."""
        return layer == self.layers - 1 or self.pattern[layer % len(self.pattern)] == "L"

    def weights_besides_embedding(self, rows: int, context: int) -> int:
        """Parameters, but for those of the embedding of so many tokens."""
        width, kv_heads = self.width, self.kv_heads or self.heads
        kv = kv_heads * (width // self.heads)
        block = 2 * width * width + 2 * width * kv + 2 * self.inner_width * width + 2
        gates = self.head_gate * self.heads * min(GATE_CHANNELS, width)
        with_values = sum(self.has_values(layer) for layer in range(self.layers))
        values = kv * (rows if self.values == "tables" else width) + kv_heads * min(VALUE_GATE_CHANNELS, width)
        return self.layers * (block + gates) + with_values * values + (0 if self.tied else rows * width)
