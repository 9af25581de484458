"""The settings of the golf family, and the names of the parameters in it that steer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ingot.model.settings import FAMILY, PORTABLE_FAMILIES, Depth, Rate, RotarySettings, Size

CONTROL = (
    "attn_scale", "attn_scales", "mlp_scale", "mlp_scales", "resid_mix", "resid_mixes", "q_gain", "skip_weight", "skip_weights",
)  # fmt: skip


class GolfSettings(RotarySettings):
    """The golf baseline: skips from the first half to the second, a mix of the embedding into every block, squared ReLU."""

    family: Literal["golf"] = Field("golf", description=FAMILY, json_schema_extra=PORTABLE_FAMILIES)
    layers: Depth = Field(9, description="Number of transformer blocks; the first half feeds the second through skips.")
    heads: Size = Field(8, description="Attention heads; they divide the width evenly.")
    width: Size = Field(512, description="Size of the residual stream.")
    kv_heads: Size | None = Field(
        4, description="Heads of keys and values; each serves heads / kv_heads heads of queries. null: as many as heads."
    )
    mlp_multiple: Depth = Field(2, description="Width inside the MLP, in widths of the residual stream.")
    tied: bool = Field(True, description="The head is the token embedding. false: a matrix of its own, zero at first.")
    softcap: Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)] = Field(
        30.0, description="Logits are bent into plus or minus this: softcap * tanh(logits / softcap)."
    )
    qk_gain: Rate = Field(1.5, description="Initial gain of every head's queries, after their normalisation.")
    embedding_std: Rate = Field(0.005, description="Spread of the initial embedding where it is tied.")
    embedding_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="Number format the embedding is kept and updated in, and with it the residual stream."
    )
    control: str = Field(
        ",".join(CONTROL),
        description="Parts of names, with commas between, of parameters that steer and do not multiply: no matrices to Muon.",
    )

    def weights_besides_embedding(self, rows: int, context: int) -> int:
        """Parameters, but for those of the embedding of so many tokens."""
        width, kv = self.width, (self.kv_heads or self.heads) * (self.width // self.heads)
        block = 2 * width * width + 2 * width * kv + self.heads + 2 * self.mlp_multiple * width * width + 4 * width
        return self.layers * block + self.layers // 2 * width + (0 if self.tied else rows * width)
