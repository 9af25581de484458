"""The settings of every model family, without torch. The config imports no other module of this package.

A family's constructor has no other defaults than these.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

FAMILY = "Model family: gpt2, llama, golf, frontier, or file for a custom model."
KV_HEADS = "Heads of keys and values; each serves heads / kv_heads heads of queries. null: as many as heads."
ROPE_BASE = "Rotary positions: the slowest pair rotates once in about this many tokens, times 2 pi."
# Metadata of a setting of which other programs' formats support every value; `portable` lists the values otherwise.
PORTABLE = Field(json_schema_extra={"portable": {"huggingface": "any", "gguf": "any"}})
MOST = 2**53  # largest integer setting: JSON readers lose digits beyond it
Positive = Annotated[int, Field(ge=1, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Size = Annotated[int, Field(ge=1, lt=2**31)]  # one dimension of a tensor
Depth = Annotated[int, Field(ge=1, le=1000)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Rate = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]  # squares of it, and their sums, fit in float32
Fraction = Annotated[float, Field(ge=0, le=1)]
RotaryBase = Annotated[float, Field(gt=1, le=1e30, allow_inf_nan=False)]


def portable(*values: object, gguf: tuple[object, ...] | None = None) -> dict[str, Any]:
    """Return the metadata of a setting with the values that Hugging Face folders support, and GGUF files if they differ."""
    return {"portable": {"huggingface": list(values), "gguf": list(values if gguf is None else gguf)}}


PORTABLE_FAMILIES = portable("gpt2", "llama")


def nearest_divisor(width: int, heads: int) -> int:
    """Return the divisor of a width nearest to a number of heads; for very large widths only some divisors are tried."""
    low = [h for h in range(1, min(math.isqrt(width), 1 << 16) + 1) if width % h == 0]
    return min([*low, *(width // h for h in low)], key=lambda h: abs(h - heads))


class Section(BaseModel):
    """A group of settings; unknown names are errors, numbers may be written as text (`3e-4` is text to YAML)."""

    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True, protected_namespaces=())


class ModelSettings(Section):
    """Settings of every model family."""

    layers: Annotated[Depth, PORTABLE] = Field(12, description="Number of transformer blocks.")
    heads: Annotated[Size, PORTABLE] = Field(12, description="Attention heads; they divide the width evenly.")
    width: Annotated[Size, PORTABLE] = Field(768, description="Size of the residual stream.")
    context: Annotated[Size | None, PORTABLE] = Field(
        None, description="Longest sequence the model can see, in tokens. null: data.seq_len."
    )
    vocab_size: Annotated[Size | None, PORTABLE] = Field(
        None, description="Rows of the embedding, at least the tokenizer's vocabulary size. null: exactly that size."
    )

    @model_validator(mode="after")
    def _heads_fit(self) -> ModelSettings:
        if self.width % self.heads:
            nearest = nearest_divisor(self.width, self.heads)
            raise ValueError(
                f"model.heads={self.heads} does not divide model.width={self.width}; the nearest count that does is {nearest}"
            )
        return self

    def weights_besides_embedding(self, rows: int, context: int) -> int | None:
        """Return the number of parameters besides an embedding of `rows` tokens; None if the settings do not determine it."""
        return None


class DropoutSettings(ModelSettings):
    """Dropout, for the families that have it."""

    dropout: Annotated[Annotated[float, Field(ge=0, lt=1)], PORTABLE] = Field(
        0.0, description="Probability of dropping an activation in training."
    )


class RotarySettings(ModelSettings):
    """Rotary position embeddings and grouped key/value heads, for the families that have them."""

    kv_heads: Annotated[Size | None, PORTABLE] = Field(None, description=KV_HEADS)
    rope_base: Annotated[RotaryBase, PORTABLE] = Field(10000.0, description=ROPE_BASE)

    @model_validator(mode="after")
    def _rotary_fits(self) -> RotarySettings:
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}")
        if self.width // self.heads % 2:
            raise ValueError(
                f"model.width={self.width} over model.heads={self.heads} gives heads of size {self.width // self.heads}; "
                "rotary positions need an even size"
            )
        return self


class FileSettings(DropoutSettings):
    """A custom model: a Python file with `class Model(torch.nn.Module)`, see docs/your-own-model.md."""

    family: Literal["file"] = Field("file", description=FAMILY, json_schema_extra=PORTABLE_FAMILIES)
    file: str = Field(
        description="Python file with a class Model, whose constructor is called with the settings it names as parameters."
    )
    settings: dict[str, Any] = Field({}, description="Additional keyword arguments for the constructor of Model.")


class GPT2Settings(DropoutSettings):
    """GPT-2 as nanoGPT trains it: learned positions, LayerNorm before each branch, a head tied to the embedding."""

    family: Literal["gpt2"] = Field("gpt2", description=FAMILY, json_schema_extra=PORTABLE_FAMILIES)
    bias: Annotated[bool, PORTABLE] = Field(True, description="Biases in the linear layers and LayerNorms.")
    gelu: Literal["tanh", "erf"] = Field(
        "tanh",
        description="Form of the GELU: tanh as in OpenAI's GPT-2, erf as in nanoGPT.",
        json_schema_extra=portable("tanh", "erf", gguf=("tanh",)),
    )

    def weights_besides_embedding(self, rows: int, context: int) -> int:
        width, bias = self.width, int(self.bias)
        block = 12 * width * width + bias * 9 * width + 2 * width * (1 + bias)
        return context * width + self.layers * block + width * (1 + bias)


class LlamaSettings(DropoutSettings, RotarySettings):
    """The Llama shape as gpt-simple trains it: rotary positions, RMSNorm, gated MLP, grouped keys and values."""

    family: Literal["llama"] = Field("llama", description=FAMILY, json_schema_extra=PORTABLE_FAMILIES)
    bias: Annotated[bool, PORTABLE] = Field(
        False, description="Biases in the linear layers, unless one of the three settings below says otherwise."
    )
    qkv_bias: Annotated[bool | None, PORTABLE] = Field(
        None, description="Biases in the projections to queries, keys and values. null: as bias."
    )
    attention_out_bias: Annotated[bool | None, PORTABLE] = Field(
        None, description="Bias in the projection after attention. null: as bias."
    )
    mlp_bias: Annotated[bool | None, PORTABLE] = Field(None, description="Biases in the MLP. null: as bias.")
    mlp: Literal["gated", "plain"] = Field(
        "gated", description="gated: down(up(x) * act(gate(x))). plain: down(act(up(x))).", json_schema_extra=portable("gated")
    )
    activation: Literal["silu", "gelu", "relu"] = Field(
        "silu",
        description="Activation of the MLP; gelu is its tanh form.",
        json_schema_extra=portable("silu", "gelu", "relu", gguf=("silu",)),
    )
    inner_width: Annotated[Size | None, PORTABLE] = Field(
        None, description="Width inside the MLP. null: 8/3 of the width, rounded up to a multiple of 256, if gated; else 4 times."
    )
    norm: Literal["rmsnorm", "layernorm"] = Field(
        "rmsnorm", description="Normalisation before each branch and at the end.", json_schema_extra=portable("rmsnorm")
    )
    norm_epsilon: Annotated[Annotated[float, Field(gt=0, lt=1)], PORTABLE] = Field(
        1e-5, description="Added to the variance inside the norms."
    )
    tied: Annotated[bool, PORTABLE] = Field(True, description="The head is the token embedding. false: a separate matrix.")
    rope_scaling: Annotated[Literal["linear", "ntk"] | None, PORTABLE] = Field(
        None, description="Stretch rotary positions by rope_factor: linear divides the angles, ntk multiplies the base."
    )
    rope_factor: Annotated[Annotated[float, Field(ge=1, le=1e30, allow_inf_nan=False)], PORTABLE] = Field(
        1.0, description="Stretching factor of rope_scaling."
    )

    @property
    def biases(self) -> list[bool]:
        """Return True for biases in the projections to queries, keys and values, in the one after attention, and in the MLP."""
        return [self.bias if given is None else given for given in (self.qkv_bias, self.attention_out_bias, self.mlp_bias)]

    def weights_besides_embedding(self, rows: int, context: int) -> int:
        width, kv = self.width, (self.kv_heads or self.heads) * (self.width // self.heads)
        (qkv_bias, out_bias, mlp_bias), gated = self.biases, self.mlp == "gated"
        inner = mlp_width(width, self.inner_width, gated)
        attention = 2 * width * width + 2 * width * kv + qkv_bias * (width + 2 * kv) + out_bias * width
        mlp = (3 if gated else 2) * width * inner + mlp_bias * ((2 if gated else 1) * inner + width)
        norm = width if self.norm == "rmsnorm" else 2 * width
        return self.layers * (attention + mlp + 2 * norm) + norm + (0 if self.tied else rows * width)


def mlp_width(width: int, inner_width: int | None, gated: bool = True) -> int:
    """Return the width inside the MLP, as set or by its default rule."""
    return inner_width or (math.ceil(8 * width // 3 / 256) * 256 if gated else 4 * width)


# Parts of the names of control parameters (scales, gains, mixes), which are not matrices to Muon.
CONTROL = (
    "attn_scale", "attn_scales", "mlp_scale", "mlp_scales", "resid_mix", "resid_mixes", "q_gain", "skip_weight", "skip_weights",
)  # fmt: skip


class GolfSettings(RotarySettings):
    """The golf baseline: skips from the first half to the second, the embedding mixed into every block, squared ReLU."""

    family: Literal["golf"] = Field("golf", description=FAMILY, json_schema_extra=PORTABLE_FAMILIES)
    layers: Depth = Field(9, description="Number of transformer blocks; the first half feeds the second through skips.")
    heads: Size = Field(8, description="Attention heads; they divide the width evenly.")
    width: Size = Field(512, description="Size of the residual stream.")
    kv_heads: Size | None = Field(4, description=KV_HEADS)
    mlp_multiple: Depth = Field(2, description="Width inside the MLP, in widths of the residual stream.")
    tied: bool = Field(True, description="The head is the token embedding. false: a separate matrix, initially zero.")
    softcap: Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)] = Field(
        30.0, description="Logits are bent into plus or minus this: softcap * tanh(logits / softcap)."
    )
    qk_gain: Rate = Field(1.5, description="Initial gain of every head's queries, after their normalisation.")
    embedding_std: Rate = Field(0.005, description="Standard deviation of the initial embedding where it is tied.")
    embedding_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="Dtype in which the embedding is stored and updated, and dtype of the residual stream."
    )
    control: str = Field(
        ",".join(CONTROL),
        description="Comma-separated name parts of control parameters (scales, gains, mixes), which Muon does not treat as "
        "matrices.",
    )

    def weights_besides_embedding(self, rows: int, context: int) -> int:
        width, kv = self.width, (self.kv_heads or self.heads) * (self.width // self.heads)
        block = 2 * width * width + 2 * width * kv + self.heads + 2 * self.mlp_multiple * width * width + 4 * width
        return self.layers * block + self.layers // 2 * width + (0 if self.tied else rows * width)


FRONTIER_CONTROL = ("_gate", "mix_x")  # parts of the names of control parameters
GATE_CHANNELS, VALUE_GATE_CHANNELS = 12, 32  # channels of a layer's input that the gates of heads and of values use


class FrontierSettings(RotarySettings):
    """The best model for a few minutes: windows, a second source of values, half-rotated heads, gates. Defaults fit 16 MB."""

    family: Literal["frontier"] = Field("frontier", description=FAMILY, json_schema_extra=PORTABLE_FAMILIES)
    layers: Depth = Field(10, description="Number of transformer blocks.")
    heads: Size = Field(4, description="Attention heads; they divide the width evenly.")
    width: Size = Field(512, description="Size of the residual stream.")
    kv_heads: Size | None = Field(2, description=KV_HEADS)
    mlp_multiple: Annotated[float, Field(gt=0, le=1000)] = Field(
        3.0, description="Width inside the MLP, in widths of the residual stream."
    )
    tied: bool = Field(True, description="The head is the token embedding. false: a separate matrix.")
    softcap: Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)] | None = Field(
        15.0, description="Logits are bent into plus or minus this: softcap * tanh(logits / softcap). null: they are not."
    )
    rope_base: RotaryBase = Field(200000.0, description=ROPE_BASE)
    rope_part: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5, description="Part of each head's dimensions that rotary positions rotate; the others carry no position."
    )
    key_offset: bool = Field(
        True,
        description="In layers that see the whole row, the unrotated dimensions of a key are those of the previous token: "
        "one layer can find what followed an earlier occurrence. Needs rope_part below 1.",
    )
    pattern: Annotated[str, Field(pattern="^[SL]+$", max_length=1000)] = Field(
        "SSSSL", description="S: a layer sees the last `window` tokens, L: the whole row. Repeated; the last layer is always L."
    )
    window: Size = Field(256, description="Tokens that an S layer sees, including the token itself; a stage may change it.")
    values: Literal["none", "projections", "tables"] = Field(
        "projections",
        description="What every second layer and the last add to their values, through a gate per head: a projection of the "
        "embedding, or a row per token of a separate table (vocabulary x width weights, no FLOPs).",
    )
    value_layers: list[Count] | None = Field(
        None, description="Layers that add to their values, counted from 0. null: the last and every second one before it."
    )
    head_gate: bool = Field(True, description="Each head's output is multiplied by a gate computed from the layer's input.")

    @model_validator(mode="after")
    def _parts_fit(self) -> FrontierSettings:
        if self.rotated < 2:
            size = self.width // self.heads
            raise ValueError(f"model.rope_part={self.rope_part:g} rotates no pair of a head's {size} dimensions; raise it")
        if self.key_offset and self.rotated == self.width // self.heads:
            raise ValueError(
                "model.key_offset needs unrotated dimensions; set model.rope_part below 1 or model.key_offset to false"
            )
        if self.value_layers is not None and (missing := [i for i in self.value_layers if i >= self.layers]):
            last = self.layers - 1
            raise ValueError(f"model.value_layers names layer {missing[0]}, but the last of {self.layers} layers is {last}")
        return self

    @property
    def rotated(self) -> int:
        """The number of dimensions of a head that are rotated, in pairs."""
        return round(self.width // self.heads * self.rope_part / 2) * 2

    @property
    def inner_width(self) -> int:
        """The hidden width of the MLP."""
        return max(1, round(self.mlp_multiple * self.width))

    def has_values(self, layer: int) -> bool:
        """Return True if a layer adds a second source to its values."""
        named = (self.layers - 1 - layer) % 2 == 0 if self.value_layers is None else layer in self.value_layers
        return self.values != "none" and named

    def is_long(self, layer: int) -> bool:
        """Return True if a layer attends to the whole row instead of a window."""
        return layer == self.layers - 1 or self.pattern[layer % len(self.pattern)] == "L"

    def weights_besides_embedding(self, rows: int, context: int) -> int:
        width, kv_heads = self.width, self.kv_heads or self.heads
        kv = kv_heads * (width // self.heads)
        block = 2 * width * width + 2 * width * kv + 2 * self.inner_width * width + 2
        gates = self.head_gate * self.heads * min(GATE_CHANNELS, width)
        with_values = sum(self.has_values(layer) for layer in range(self.layers))
        values = kv * (rows if self.values == "tables" else width) + kv_heads * min(VALUE_GATE_CHANNELS, width)
        return self.layers * (block + gates) + with_values * values + (0 if self.tied else rows * width)


AnyModel = Annotated[GPT2Settings | LlamaSettings | GolfSettings | FrontierSettings | FileSettings, Field(discriminator="family")]
FAMILIES: dict[str, type[ModelSettings]] = {
    "gpt2": GPT2Settings,
    "llama": LlamaSettings,
    "golf": GolfSettings,
    "frontier": FrontierSettings,
    "file": FileSettings,
}
