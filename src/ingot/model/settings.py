"""The settings of all model families and their defaults, without torch: ingot.config imports only this module of ingot.model."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

FAMILY = "Model family: gpt2, llama, golf, frontier, or file for a custom model."
KV_HEADS = "Number of key/value heads; each serves heads / kv_heads query heads. null: the same as heads."
ROPE_BASE = "Base of the rotary embedding: the slowest-rotating dimensions take about 2 pi * rope_base tokens for a full turn."
# Schema metadata of a setting whose values can all be exported; for other settings, `portable` lists the values that can.
PORTABLE = Field(json_schema_extra={"portable": {"huggingface": "any", "gguf": "any"}})
MOST = 2**53  # largest value of an integer setting, because JSON readers round larger integers
Positive = Annotated[int, Field(ge=1, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Size = Annotated[int, Field(ge=1, lt=2**31)]  # size of a tensor's dimension
Depth = Annotated[int, Field(ge=1, le=1000)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Rate = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]  # at most 1e30, so that float32 can represent it
Fraction = Annotated[float, Field(ge=0, le=1)]
Softcap = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
RotaryBase = Annotated[float, Field(gt=1, le=1e30, allow_inf_nan=False)]


def portable(*values: object, gguf: tuple[object, ...] | None = None) -> dict[str, Any]:
    """Return schema metadata: the values that can be exported to Hugging Face; `gguf` lists those for GGUF if they differ."""
    return {"portable": {"huggingface": list(values), "gguf": list(values if gguf is None else gguf)}}


PORTABLE_FAMILIES = portable("gpt2", "llama")


def nearest_divisor(width: int, heads: int) -> int:
    """Return the divisor of `width` that is nearest to `heads`; if `width` is very large, only some divisors are tried."""
    low = [h for h in range(1, min(math.isqrt(width), 1 << 16) + 1) if width % h == 0]
    return min([*low, *(width // h for h in low)], key=lambda h: abs(h - heads))


class Section(BaseModel):
    """A section of settings. Unknown names are errors; numbers may be given as strings, because YAML reads `3e-4` as a string."""

    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True, protected_namespaces=())


class ModelSettings(Section):
    """Settings of every model family."""

    layers: Annotated[Depth, PORTABLE] = Field(12, description="Number of transformer blocks.")
    heads: Annotated[Size, PORTABLE] = Field(12, description="Number of attention heads; must divide the width.")
    width: Annotated[Size, PORTABLE] = Field(768, description="Model width: the size of the residual stream.")
    context: Annotated[Size | None, PORTABLE] = Field(
        None, description="Maximum sequence length of the model, in tokens. null: data.seq_len."
    )
    vocab_size: Annotated[Size | None, PORTABLE] = Field(
        None, description="Number of rows of the embedding, at least the tokenizer's vocabulary size. null: the vocabulary size."
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
        """Return the number of parameters without the token embedding (`rows` rows), for `context` positions; None if unknown."""
        return None


class DropoutSettings(ModelSettings):
    """Settings of families with dropout."""

    dropout: Annotated[float, Field(ge=0, lt=1), PORTABLE] = Field(0.0, description="Dropout probability during training.")


class RotarySettings(ModelSettings):
    """Settings of families with rotary position embeddings and grouped key/value heads."""

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
    """A custom model: a Python file with a `class Model(torch.nn.Module)`. See docs/your-own-model.md."""

    family: Literal["file"] = Field("file", description=FAMILY, json_schema_extra=PORTABLE_FAMILIES)
    file: str = Field(
        description="Python file with a class Model; its constructor is called with those `model` settings that it accepts."
    )
    settings: dict[str, Any] = Field({}, description="Additional keyword arguments for the constructor of Model.")


class GPT2Settings(DropoutSettings):
    """GPT-2 as nanoGPT trains it: learned positions, pre-LayerNorm, an output head tied to the embedding."""

    family: Literal["gpt2"] = Field("gpt2", description=FAMILY, json_schema_extra=PORTABLE_FAMILIES)
    bias: Annotated[bool, PORTABLE] = Field(True, description="Add biases to the linear layers and LayerNorms.")
    gelu: Literal["tanh", "erf"] = Field(
        "tanh",
        description="Variant of GELU: tanh (an approximation) as in OpenAI's GPT-2, or erf (exact) as in nanoGPT.",
        json_schema_extra=portable("tanh", "erf", gguf=("tanh",)),
    )

    def weights_besides_embedding(self, rows: int, context: int) -> int:
        width, bias = self.width, int(self.bias)
        block = 12 * width * width + bias * 9 * width + 2 * width * (1 + bias)
        return context * width + self.layers * block + width * (1 + bias)


class LlamaSettings(DropoutSettings, RotarySettings):
    """The Llama architecture as gpt-simple trains it: rotary positions, RMSNorm, gated MLP, grouped-query attention."""

    family: Literal["llama"] = Field("llama", description=FAMILY, json_schema_extra=PORTABLE_FAMILIES)
    bias: Annotated[bool, PORTABLE] = Field(
        False, description="Add biases to the linear layers, unless qkv_bias, attention_out_bias or mlp_bias says otherwise."
    )
    qkv_bias: Annotated[bool | None, PORTABLE] = Field(
        None, description="Add biases to the query, key and value projections. null: the value of bias."
    )
    attention_out_bias: Annotated[bool | None, PORTABLE] = Field(
        None, description="Add a bias to the output projection of attention. null: the value of bias."
    )
    mlp_bias: Annotated[bool | None, PORTABLE] = Field(None, description="Add biases to the MLP. null: the value of bias.")
    mlp: Literal["gated", "plain"] = Field(
        "gated", description="Gated: down(up(x) * act(gate(x))). Plain: down(act(up(x))).", json_schema_extra=portable("gated")
    )
    activation: Literal["silu", "gelu", "relu"] = Field(
        "silu",
        description="Activation function of the MLP; gelu is the tanh approximation.",
        json_schema_extra=portable("silu", "gelu", "relu", gguf=("silu",)),
    )
    inner_width: Annotated[Size | None, PORTABLE] = Field(
        None, description="Hidden width of the MLP. null: 4 * width or, if gated, 8/3 * width rounded up to a multiple of 256."
    )
    norm: Literal["rmsnorm", "layernorm"] = Field(
        "rmsnorm", description="Norm before attention and MLP and after the last block.", json_schema_extra=portable("rmsnorm")
    )
    norm_epsilon: Annotated[float, Field(gt=0, lt=1), PORTABLE] = Field(
        1e-5, description="Epsilon that the norms add to the variance or mean square."
    )
    tied: Annotated[bool, PORTABLE] = Field(True, description="Tie the output head to the embedding. false: a separate matrix.")
    rope_scaling: Annotated[Literal["linear", "ntk"] | None, PORTABLE] = Field(
        None, description="Stretch rotary positions: linear divides angles by rope_factor, ntk multiplies rope_base by it."
    )
    rope_factor: Annotated[float, Field(ge=1, le=1e30, allow_inf_nan=False), PORTABLE] = Field(
        1.0, description="Factor by which rope_scaling divides angles (linear) or multiplies rope_base (ntk)."
    )

    @property
    def biases(self) -> list[bool]:
        """Return whether there are biases in the query, key and value projections, in the attention output, and in the MLP."""
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
    """Return the hidden width of the MLP: `inner_width`, or the default if it is None."""
    return inner_width or (math.ceil(8 * width // 3 / 256) * 256 if gated else 4 * width)


# Parameters whose names contain one of these are control parameters (scales, gains, mixes): Muon does not treat them as matrices.
CONTROL = (
    "attn_scale", "attn_scales", "mlp_scale", "mlp_scales", "resid_mix", "resid_mixes", "q_gain", "skip_weight", "skip_weights",
)  # fmt: skip


class GolfSettings(RotarySettings):
    """The golf baseline: skip connections from the first to the second half, embedding mixed into every block, squared ReLU."""

    family: Literal["golf"] = Field("golf", description=FAMILY, json_schema_extra=PORTABLE_FAMILIES)
    layers: Depth = Field(9, description="Number of transformer blocks; skip connections lead from the first half to the second.")
    heads: Size = Field(8, description="Number of attention heads; must divide the width.")
    width: Size = Field(512, description="Model width: the size of the residual stream.")
    kv_heads: Size | None = Field(4, description=KV_HEADS)
    mlp_multiple: Depth = Field(2, description="Hidden width of the MLP, as a multiple of the model width.")
    tied: bool = Field(True, description="Tie the output head to the embedding. false: a separate matrix, initially zero.")
    softcap: Softcap = Field(30.0, description="Soft limit on the magnitude of logits: softcap * tanh(logits / softcap).")
    qk_gain: Rate = Field(1.5, description="Initial gain of each head, applied to its queries after normalisation.")
    embedding_std: Rate = Field(0.005, description="Standard deviation of the initial embedding if `tied` is true.")
    embedding_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="dtype of the residual stream and of the embedding, which is stored and updated in this dtype."
    )
    control: str = Field(
        ",".join(CONTROL),
        description="Comma-separated strings. Parameters whose names contain one of them are control parameters (scales, gains, "
        "mixes), which Muon does not treat as matrices.",
    )

    def weights_besides_embedding(self, rows: int, context: int) -> int:
        width, kv = self.width, (self.kv_heads or self.heads) * (self.width // self.heads)
        block = 2 * width * width + 2 * width * kv + self.heads + 2 * self.mlp_multiple * width * width + 4 * width
        return self.layers * block + self.layers // 2 * width + (0 if self.tied else rows * width)


FRONTIER_CONTROL = ("_gate", "mix_x")  # parameters whose names contain one of these are control parameters
GATE_CHANNELS, VALUE_GATE_CHANNELS = 12, 32  # number of input channels from which a head gate or value gate is computed


class FrontierSettings(RotarySettings):
    """The best model for a few minutes of training: sliding windows, value embeddings, partial rotary positions, gates."""

    family: Literal["frontier"] = Field("frontier", description=FAMILY, json_schema_extra=PORTABLE_FAMILIES)
    layers: Depth = Field(10, description="Number of transformer blocks.")
    heads: Size = Field(4, description="Number of attention heads; must divide the width.")
    width: Size = Field(512, description="Model width: the size of the residual stream.")
    kv_heads: Size | None = Field(2, description=KV_HEADS)
    mlp_multiple: Annotated[float, Field(gt=0, le=1000)] = Field(
        3.0, description="Hidden width of the MLP, as a multiple of the model width."
    )
    tied: bool = Field(True, description="Tie the output head to the embedding. false: a separate matrix.")
    embedding_std: Rate | None = Field(
        None,
        description="Standard deviation of the initial embedding. The embedding is normalised, so only the ratio of its learning "
        "rate to this value matters. null: 0.02 if `tied` is true, else 1.",
    )
    softcap: Softcap | None = Field(
        15.0, description="Soft limit on the magnitude of logits: softcap * tanh(logits / softcap). null: no limit."
    )
    rope_base: RotaryBase = Field(200000.0, description=ROPE_BASE)
    rope_part: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5, description="Fraction of each head's dimensions that are rotated; the other dimensions do not encode positions."
    )
    key_offset: bool = Field(
        True,
        description="In layers that see the whole row, keys take their unrotated dimensions from the previous token, so that "
        "one layer can look up what followed an earlier occurrence of a token. Needs rope_part below 1.",
    )
    pattern: Annotated[str, Field(pattern="^[SL]+$", max_length=1000)] = Field(
        "SSSSL",
        description="One letter per layer, repeated as needed: S sees `window` tokens, L the whole row; the last is always L.",
    )
    window: Size = Field(256, description="Window of S layers, in tokens including the current one; training.stages can set it.")
    values: Literal["none", "projections", "tables"] = Field(
        "projections",
        description="What to add to the attention values of the layers in value_layers, scaled by a gate per head. projections: "
        "a projection of the embedding. tables: a separate embedding per layer, which has many weights but needs no FLOPs.",
    )
    value_layers: list[Count] | None = Field(
        None, description="Indices of the layers to which `values` applies. null: every second layer, ending with the last."
    )
    head_gate: bool = Field(True, description="Multiply the output of each head by a gate computed from the layer's input.")

    @model_validator(mode="after")
    def _parts_fit(self) -> FrontierSettings:
        if self.rotated < 2:
            size = self.width // self.heads
            raise ValueError(f"model.rope_part={self.rope_part:g} rotates none of the {size} dimensions of a head; raise it")
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
        """Return the number of rotated dimensions per head, which is even."""
        return round(self.width // self.heads * self.rope_part / 2) * 2

    @property
    def inner_width(self) -> int:
        """Return the hidden width of the MLP."""
        return max(1, round(self.mlp_multiple * self.width))

    def has_values(self, layer: int) -> bool:
        """Return True if the setting `values` applies to a layer."""
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
