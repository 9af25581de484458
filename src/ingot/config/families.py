"""The model section of a config: one class of settings per model family."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A group of settings; unknown names are errors, numbers may be written as text (`3e-4` is text to YAML)."""

    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True, protected_namespaces=())


class ModelSection(Section):
    """What every model family has."""

    layers: Positive = Field(12, description="Number of transformer blocks.")
    heads: Positive = Field(12, description="Attention heads; they divide the width evenly.")
    width: Positive = Field(768, description="Size of the residual stream.")
    context: Positive | None = Field(None, description="Longest sequence the model can see, in tokens. null: data.seq_len.")
    vocab_size: Positive | None = Field(
        None, description="Rows of the embedding. null: the tokenizer's vocabulary; more rows than that is allowed, fewer is not."
    )

    @model_validator(mode="after")
    def _heads_fit(self) -> ModelSection:
        if self.width % self.heads:
            near = [h for h in range(1, self.width + 1) if self.width % h == 0]
            nearest = min(near, key=lambda h: abs(h - self.heads))
            raise ValueError(
                f"model.heads={self.heads} does not divide model.width={self.width}; the nearest count that does is {nearest}"
            )
        return self


class DropoutSection(ModelSection):
    """What the families with dropout share."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="Probability of dropping an activation in training.")


class RotarySection(ModelSection):
    """What the families with rotary positions share: each query and key is turned by an angle that grows with its place."""

    kv_heads: Positive | None = Field(
        None, description="Heads of keys and values; each serves heads / kv_heads heads of queries. null: as many as heads."
    )
    rope_base: Annotated[float, Field(gt=1, allow_inf_nan=False)] = Field(
        10000.0, description="Rotary positions: the slowest pair turns once in about this many tokens, times 2 pi."
    )

    @model_validator(mode="after")
    def _rotary_fits(self) -> RotarySection:
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}")
        if self.width // self.heads % 2:
            raise ValueError(
                f"model.width={self.width} over model.heads={self.heads} gives heads of size {self.width // self.heads}; "
                "rotary positions need an even size"
            )
        return self


FAMILY = "Model family: gpt2, llama, golf, or file for a model of your own."


class GPT2Section(DropoutSection):
    """GPT-2 as nanoGPT trains it: learned positions, LayerNorm before each branch, a head tied to the embedding."""

    family: Literal["gpt2"] = Field("gpt2", description=FAMILY)
    bias: bool = Field(True, description="Biases in the linear layers and LayerNorms.")
    gelu: Literal["tanh", "erf"] = Field("tanh", description="Form of the GELU: tanh as in OpenAI's GPT-2, erf as in nanoGPT.")


class LlamaSection(DropoutSection, RotarySection):
    """The Llama shape as gpt-simple trains it: rotary positions, RMSNorm, gated MLP, grouped keys and values."""

    family: Literal["llama"] = Field("llama", description=FAMILY)
    bias: bool = Field(False, description="Biases in the linear layers, where the three settings below do not say otherwise.")
    qkv_bias: bool | None = Field(None, description="Biases in the projections to queries, keys and values. null: as bias.")
    attention_out_bias: bool | None = Field(None, description="Bias in the projection behind attention. null: as bias.")
    mlp_bias: bool | None = Field(None, description="Biases in the MLP. null: as bias.")
    mlp: Literal["gated", "plain"] = Field("gated", description="gated: down(up(x) * act(gate(x))). plain: down(act(up(x))).")
    activation: Literal["silu", "gelu", "relu"] = Field("silu", description="Activation of the MLP; gelu is its tanh form.")
    inner_width: Positive | None = Field(
        None, description="Width inside the MLP. null: 8/3 of the width, rounded up to a multiple of 256, if gated; else 4 times."
    )
    norm: Literal["rmsnorm", "layernorm"] = Field("rmsnorm", description="Normalisation before each branch and at the end.")
    norm_epsilon: Annotated[float, Field(gt=0, lt=1)] = Field(1e-5, description="Added to the variance inside the norms.")
    tied: bool = Field(True, description="The head is the token embedding. false: a matrix of its own.")
    rope_scaling: Literal["linear", "ntk"] | None = Field(
        None, description="Stretch rotary positions by rope_factor: linear divides the angles, ntk multiplies the base."
    )
    rope_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(1.0, description="How far rope_scaling stretches.")


CONTROL = (
    "attn_scale", "attn_scales", "mlp_scale", "mlp_scales", "resid_mix", "resid_mixes", "q_gain", "skip_weight", "skip_weights",
)  # fmt: skip


class GolfSection(RotarySection):
    """The golf baseline: skips from the first half to the second, a mix of the embedding into every block, squared ReLU."""

    family: Literal["golf"] = Field("golf", description=FAMILY)
    layers: Positive = Field(9, description="Number of transformer blocks; the first half feeds the second through skips.")
    heads: Positive = Field(8, description="Attention heads; they divide the width evenly.")
    width: Positive = Field(512, description="Size of the residual stream.")
    kv_heads: Positive | None = Field(
        4, description="Heads of keys and values; each serves heads / kv_heads heads of queries. null: as many as heads."
    )
    mlp_multiple: Positive = Field(2, description="Width inside the MLP, in widths of the residual stream.")
    tied: bool = Field(True, description="The head is the token embedding. false: a matrix of its own, zero at first.")
    softcap: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        30.0, description="Logits are bent into plus or minus this: softcap * tanh(logits / softcap)."
    )
    qk_gain: Rate = Field(1.5, description="Initial gain of every head's queries, behind their normalisation.")
    embedding_std: Rate = Field(0.005, description="Spread of the initial embedding where it is tied.")
    embedding_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="Number format the embedding is kept and updated in, and with it the residual stream."
    )
    control: str = Field(
        ",".join(CONTROL),
        description="Parts of names, with commas between, of parameters that steer and do not multiply: no matrices to Muon.",
    )


class FileSection(DropoutSection):
    """A model of your own: a Python file with `class Model(torch.nn.Module)`, see docs/your-own-model.md."""

    family: Literal["file"] = Field("file", description=FAMILY)
    file: str = Field(description="Python file with a class Model; it is given the settings its constructor names.")
    settings: dict[str, Any] = Field({}, description="More keyword arguments for the constructor of Model.")


def _family(section: Any) -> str:
    if isinstance(section, dict):
        return "file" if section.get("file") is not None else str(section.get("family", "gpt2"))
    return str(section.family)


AnyModel = Annotated[
    Annotated[GPT2Section, Tag("gpt2")]
    | Annotated[LlamaSection, Tag("llama")]
    | Annotated[GolfSection, Tag("golf")]
    | Annotated[FileSection, Tag("file")],
    Discriminator(_family),
]
FAMILIES: dict[str, type[ModelSection]] = {"gpt2": GPT2Section, "llama": LlamaSection, "golf": GolfSection, "file": FileSection}
