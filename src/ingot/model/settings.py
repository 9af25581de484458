"""What every model family's settings are made of, without torch: the config imports nothing else of this room.

A family's own settings stand beside it (gpt2_settings.py beside gpt2.py), and its constructor has no other defaults than theirs.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

FAMILY = "Model family: gpt2, llama, golf, frontier, or file for a model of your own."
# What a setting says of other programs' files: which of its values a model may have there.
ANYWHERE: dict[str, Any] = {"portable": {"huggingface": "any", "gguf": "any"}}
MOST = 2**53  # of any whole number: JSON's readers lose digits of larger ones
Positive = Annotated[int, Field(ge=1, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Size = Annotated[int, Field(ge=1, lt=2**31)]  # of one side of a tensor
Depth = Annotated[int, Field(ge=1, le=1000)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Rate = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]  # what float32 holds, squared or summed up
Fraction = Annotated[float, Field(ge=0, le=1)]


def portable(*values: object, gguf: tuple[object, ...] | None = None) -> dict[str, Any]:
    """The mark of a setting of which only these values can be in a Hugging Face folder, and these or others in a GGUF file."""
    return {"portable": {"huggingface": list(values), "gguf": list(values if gguf is None else gguf)}}


PORTABLE_FAMILIES = portable("gpt2", "llama")


def nearest_divisor(width: int, heads: int) -> int:
    """The number that divides a width and is nearest to a count of heads; of widths that cannot be, any that divides them."""
    low = [h for h in range(1, min(math.isqrt(width), 1 << 16) + 1) if width % h == 0]
    return min([*low, *(width // h for h in low)], key=lambda h: abs(h - heads))


class Section(BaseModel):
    """A group of settings; unknown names are errors, numbers may be written as text (`3e-4` is text to YAML)."""

    model_config = ConfigDict(extra="forbid", validate_default=True, frozen=True, protected_namespaces=())


class ModelSettings(Section):
    """What every model family has."""

    layers: Depth = Field(12, description="Number of transformer blocks.", json_schema_extra=ANYWHERE)
    heads: Size = Field(12, description="Attention heads; they divide the width evenly.", json_schema_extra=ANYWHERE)
    width: Size = Field(768, description="Size of the residual stream.", json_schema_extra=ANYWHERE)
    context: Size | None = Field(
        None, description="Longest sequence the model can see, in tokens. null: data.seq_len.", json_schema_extra=ANYWHERE
    )
    vocab_size: Size | None = Field(
        None,
        description="Rows of the embedding. null: the tokenizer's vocabulary; more rows than that is allowed, fewer is not.",
        json_schema_extra=ANYWHERE,
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
        """Parameters, but for those of the embedding of so many tokens; None where the settings alone do not say it."""
        return None


class DropoutSettings(ModelSettings):
    """What the families with dropout share."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="Probability of dropping an activation in training.", json_schema_extra=ANYWHERE
    )


class RotarySettings(ModelSettings):
    """What the families with rotary positions share: each query and key is turned by an angle that grows with its place."""

    kv_heads: Size | None = Field(
        None,
        description="Heads of keys and values; each serves heads / kv_heads heads of queries. null: as many as heads.",
        json_schema_extra=ANYWHERE,
    )
    rope_base: Annotated[float, Field(gt=1, le=1e30, allow_inf_nan=False)] = Field(
        10000.0,
        description="Rotary positions: the slowest pair turns once in about this many tokens, times 2 pi.",
        json_schema_extra=ANYWHERE,
    )

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
    """A model of your own: a Python file with `class Model(torch.nn.Module)`, see docs/your-own-model.md."""

    family: Literal["file"] = Field("file", description=FAMILY, json_schema_extra=PORTABLE_FAMILIES)
    file: str = Field(description="Python file with a class Model; it is given the settings its constructor names.")
    settings: dict[str, Any] = Field({}, description="More keyword arguments for the constructor of Model.")
