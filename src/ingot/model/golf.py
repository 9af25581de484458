"""The golf family: the baseline of the parameter golf challenge, a small model that trains fast with Muon.

It differs from GPT-2 as follows: every block first mixes the embedding into its input, skip connections lead from the first half
of the blocks to the second, queries and keys are normalised, and the last matrix of every branch starts at zero, so that a new
model predicts from the embedding alone. Parameters have the same names as in the challenge's files. Control parameters (scales,
gains and mixes, named in `control`) stay in float32, and Muon does not treat them as matrices even if they have two dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.model.kernels.fused_mlp import fused_mlp
from ingot.model.kernels.qkv import projected_attention
from ingot.model.kernels.rotary import fused_rotation
from ingot.model.layers import (
    CastedLinear,
    Form,
    LanguageModel,
    LayerCache,
    Mask,
    RotaryTables,
    Rotation,
    attention_mask,
    causal_attention,
    document_starts,
    positions,
    rotate,
    uses_flash,
)
from ingot.model.settings import GolfSettings


def norm(x: Tensor) -> Tensor:
    """Normalise the last dimension to a root mean square of 1, without a gain."""
    return F.rms_norm(x, (x.size(-1),))


class GolfAttention(nn.Module):
    fused_qkv = False  # compute queries, keys and values in one matmul; needs FlashAttention 4
    form: Form = "repeated"
    fused_rotary = False  # compute normalisation, rotation and gain in one kernel

    def __init__(self, s: GolfSettings):
        super().__init__()
        self.head_size = s.width // s.heads
        kv_width = (s.kv_heads or s.heads) * self.head_size
        self.c_q = CastedLinear(s.width, s.width)
        self.c_k = CastedLinear(s.width, kv_width)
        self.c_v = CastedLinear(s.width, kv_width)
        self.proj = CastedLinear(s.width, s.width)
        self.q_gain = nn.Parameter(torch.full((s.heads,), s.qk_gain))

    def forward(
        self, x: Tensor, rotary: RotaryTables, mask: Mask | None, cache: LayerCache | None, scale: Tensor | None = None
    ) -> Tensor:
        B, T, C = x.shape
        layers = self.c_q, self.c_k, self.c_v
        if self.fused_qkv and torch.is_grad_enabled() and uses_flash(self.form, mask) and cache is None:
            y = projected_attention(x, layers, self.head_size, rotary, document_starts(mask), self.q_gain)
            return self.proj(y.flatten(2), scale)
        q, k, v = (layer(x).view(B, T, -1, self.head_size) for layer in layers)  # q: (B, T, H, D), k and v: (B, T, K, D)
        v = v.transpose(1, 2)  # (B, K, T, D); the next lines transpose q and k in the same way
        if self.fused_rotary and cache is None:
            q, k = fused_rotation(q, rotary, self.q_gain), fused_rotation(k, rotary)
        else:
            q, k = rotate(norm(q.transpose(1, 2)), rotary), rotate(norm(k.transpose(1, 2)), rotary)
            q = q * self.q_gain.to(q.dtype)[:, None, None]
        if cache is not None:
            k, v = cache.extend(k, v)  # (B, K, S, D)
        y = causal_attention(q, k, v, mask=mask, form=self.form)
        return self.proj(y.transpose(1, 2).reshape(B, T, C), scale)


class GolfMLP(nn.Module):
    fused_mlp = False  # fuse the activation into the matmuls before and after it

    def __init__(self, width: int, multiple: int):
        super().__init__()
        self.fc = CastedLinear(width, multiple * width)
        self.proj = CastedLinear(multiple * width, width)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        if self.fused_mlp and torch.is_grad_enabled():
            return fused_mlp(x, self.fc.weight, None, self.proj.scaled(scale), "relu2")
        return self.proj(F.relu(self.fc(x)).square(), scale)


class GolfBlock(nn.Module):
    fused_scales = False  # apply the scale of a branch to its last matrix instead of to its output

    def __init__(self, s: GolfSettings):
        super().__init__()
        width = s.width
        self.attn = GolfAttention(s)
        self.mlp = GolfMLP(width, s.mlp_multiple)
        self.attn_scale = nn.Parameter(torch.ones(width))
        self.mlp_scale = nn.Parameter(torch.ones(width))
        self.resid_mix = nn.Parameter(torch.stack([torch.ones(width), torch.zeros(width)]))

    def forward(
        self, x: Tensor, x0: Tensor, rotary: RotaryTables, mask: Mask | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        mix = self.resid_mix.to(x.dtype)
        x = mix[0] * x + mix[1] * x0
        if self.fused_scales and torch.is_grad_enabled():
            # With fused scales, branch outputs need not be stored, and no separate pass has to scale their gradients.
            x = x + self.attn(norm(x), rotary, mask, cache, self.attn_scale)
            return x + self.mlp(norm(x), self.mlp_scale)
        x = x + self.attn_scale.to(x.dtype) * self.attn(norm(x), rotary, mask, cache)
        return x + self.mlp_scale.to(x.dtype) * self.mlp(norm(x))


class Golf(LanguageModel):
    """The baseline model of the parameter golf challenge."""

    Settings = GolfSettings

    def __init__(self, vocab_size: int, context: int, **settings: Any):
        super().__init__()
        s = GolfSettings(**settings)
        self.context = context
        self.control = tuple(part for part in s.control.split(",") if part)
        self.head_size, self.kv_heads = s.width // s.heads, s.kv_heads or s.heads
        self.softcap = s.softcap
        self.skips = s.layers // 2
        self.tok_emb = nn.Embedding(vocab_size, s.width)
        self.blocks = nn.ModuleList(GolfBlock(s) for _ in range(s.layers))
        # A model with one layer has no skip connections, so these weights would never get a gradient.
        self.skip_weights = nn.Parameter(torch.ones(self.skips, s.width), requires_grad=self.skips > 0)
        self.lm_head = None if s.tied else CastedLinear(s.width, vocab_size)
        self.rotation = Rotation(context, self.head_size, s.rope_base)
        with torch.no_grad():  # torch's default initialisation, but zeros for an untied head and the last matrix of each branch
            for name, parameter in self.named_parameters():
                if name.endswith("proj.weight") or name == "lm_head.weight":
                    parameter.zero_()
            if self.lm_head is None:
                self.tok_emb.weight.normal_(std=s.embedding_std)
        if s.embedding_dtype == "bf16":
            self.tok_emb.to(torch.bfloat16)  # after initialisation: both dtypes start from the same random values

    @property
    def embedding_weight(self) -> Tensor:
        return self.tok_emb.weight

    def hidden(self, tokens: Tensor, cache: list[LayerCache] | None = None, documents: Tensor | None = None) -> Tensor:
        cos, sin = self.rotation(positions(tokens, cache, self.context))
        backwards = cos, -sin  # the challenge's model rotates in the opposite direction to other families
        mask = attention_mask(documents, cache, self.head_size)
        x = x0 = norm(self.tok_emb(tokens))  # (B, T, C)
        outputs: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            if i >= self.skips and outputs:  # last in, first out: of 9 blocks, block 3 feeds block 4, and block 0 feeds block 7
                x = x + self.skip_weights[i - self.skips].to(x.dtype) * outputs.pop()
            x = block(x, x0, backwards, mask, cache[i] if cache else None)
            if i < self.skips:
                outputs.append(x)
        return norm(x)
