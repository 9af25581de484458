"""The llama family: the architecture of most open models, as gpt-simple trains it.

It has rotary positions, RMSNorm, a gated MLP and, optionally, fewer key/value heads than query heads; settings can replace
the norm, the MLP or its activation with older variants. Parameters have the same names as in gpt-simple
(`h.0.attn.q_proj.weight`), so checkpoints of gpt-simple can be loaded without renaming.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.model.gpt2 import initialise
from ingot.model.kernels.fused_mlp import fused_gated_mlp
from ingot.model.kernels.matmul import matmul_dtype
from ingot.model.kernels.qkv import projected_attention
from ingot.model.kernels.rotary import fused_rotation
from ingot.model.layers import (
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
from ingot.model.settings import LlamaSettings, mlp_width

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": partial(F.gelu, approximate="tanh"), "relu": F.relu}


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm, computed in the dtype of its weight instead of that of the residual stream."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def norm_of(s: LlamaSettings) -> nn.Module:
    return (RMSNorm if s.norm == "rmsnorm" else nn.LayerNorm)(s.width, s.norm_epsilon)


class LlamaAttention(nn.Module):
    fused_qkv = False  # compute queries, keys and values in one matmul; needs FlashAttention 4
    form: Form = "repeated"
    fused_rotary = False  # rotate queries and keys in a fused kernel

    def __init__(self, s: LlamaSettings):
        super().__init__()
        self.head_size, self.dropout = s.width // s.heads, s.dropout
        kv_width, (qkv_bias, out_bias, _) = (s.kv_heads or s.heads) * self.head_size, s.biases
        self.q_proj = nn.Linear(s.width, s.width, bias=qkv_bias)
        self.k_proj = nn.Linear(s.width, kv_width, bias=qkv_bias)
        self.v_proj = nn.Linear(s.width, kv_width, bias=qkv_bias)
        self.c_proj = nn.Linear(s.width, s.width, bias=out_bias)

    def forward(self, x: Tensor, rotary: RotaryTables, mask: Mask | None, cache: LayerCache | None) -> Tensor:
        B, T, C = x.shape
        layers = self.q_proj, self.k_proj, self.v_proj
        dropout = self.dropout if self.training else 0.0
        if self.fused_qkv and torch.is_grad_enabled() and uses_flash(self.form, mask, dropout) and cache is None:
            y = projected_attention(x, layers, self.head_size, rotary, document_starts(mask), epsilon=None)
            return self.c_proj(y.flatten(2))
        q, k, v = (layer(x).view(B, T, -1, self.head_size) for layer in layers)  # q: (B, T, H, D), k and v: (B, T, K, D)
        v = v.transpose(1, 2)  # (B, K, T, D); the next lines transpose q and k in the same way
        if self.fused_rotary and cache is None:
            q, k = (fused_rotation(y, rotary, epsilon=None) for y in (q, k))
        else:
            q, k = (rotate(y.transpose(1, 2), rotary) for y in (q, k))
        if cache is not None:
            k, v = cache.extend(k, v)  # (B, K, S, D)
        y = causal_attention(q, k, v, dropout, mask, self.form)
        y = self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return F.dropout(y, self.dropout, self.training)


class GatedMLP(nn.Module):
    def __init__(self, s: LlamaSettings):
        super().__init__()
        inner, bias = mlp_width(s.width, s.inner_width), s.biases[2]
        self.c_up = nn.Linear(s.width, inner, bias=bias)
        self.c_gate = nn.Linear(s.width, inner, bias=bias)
        self.c_down = nn.Linear(inner, s.width, bias=bias)
        self.activation, self.dropout = ACTIVATIONS[s.activation], s.dropout
        if s.activation == "silu" and not bias:
            self.fused_gate = False  # fuse the gating into the matmuls before and after it

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "fused_gate", False) and torch.is_grad_enabled():
            y = fused_gated_mlp(x, self.c_up.weight, self.c_gate.weight, self.c_down.weight)
        else:
            y = self.c_down(self.c_up(x) * self.activation(self.c_gate(x)))
        return F.dropout(y, self.dropout, self.training)


class PlainMLP(nn.Module):
    def __init__(self, s: LlamaSettings):
        super().__init__()
        inner, bias = mlp_width(s.width, s.inner_width, gated=False), s.biases[2]
        self.c_fc = nn.Linear(s.width, inner, bias=bias)
        self.c_proj = nn.Linear(inner, s.width, bias=bias)
        self.activation, self.dropout = ACTIVATIONS[s.activation], s.dropout

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.c_proj(self.activation(self.c_fc(x))), self.dropout, self.training)


class LlamaBlock(nn.Module):
    def __init__(self, s: LlamaSettings):
        super().__init__()
        self.ln_1 = norm_of(s)
        self.attn = LlamaAttention(s)
        self.ln_2 = norm_of(s)
        self.mlp = GatedMLP(s) if s.mlp == "gated" else PlainMLP(s)

    def forward(self, x: Tensor, rotary: RotaryTables, mask: Mask | None = None, cache: LayerCache | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), rotary, mask, cache)
        return x + self.mlp(self.ln_2(x))


class Llama(LanguageModel):
    """Llama as in gpt-simple: pre-norm blocks with rotary positions, grouped-query attention and, by default, a gated MLP."""

    fused_stream = False  # during training, store the residual stream in the matmul dtype

    Settings = LlamaSettings

    def __init__(self, vocab_size: int, context: int, **settings: Any):
        super().__init__()
        s = LlamaSettings(**settings)
        self.context, self.dropout = context, s.dropout
        self.head_size, self.kv_heads = s.width // s.heads, s.kv_heads or s.heads
        base = s.rope_base * (s.rope_factor if s.rope_scaling == "ntk" else 1.0)
        self.rotation = Rotation(context, self.head_size, base, stretch=s.rope_factor if s.rope_scaling == "linear" else 1.0)
        self.wte = nn.Embedding(vocab_size, s.width)
        self.h = nn.ModuleList(LlamaBlock(s) for _ in range(s.layers))
        self.ln_f = norm_of(s)
        self.lm_head = None if s.tied else nn.Linear(s.width, vocab_size, bias=False)
        initialise(self, s.layers)

    @property
    def blocks(self) -> nn.ModuleList:
        """Return the transformer blocks, for Muon, gradient checkpointing and per-block compilation."""
        return self.h

    @property
    def embedding_weight(self) -> Tensor:
        return self.wte.weight

    def hidden(self, tokens: Tensor, cache: list[LayerCache] | None = None, documents: Tensor | None = None) -> Tensor:
        angles = self.rotation(positions(tokens, cache, self.context))
        mask = attention_mask(documents, cache, self.head_size, self.dropout if self.training else 0.0)
        x = F.dropout(self.wte(tokens), self.dropout, self.training)  # (B, T, C)
        if self.fused_stream and torch.is_grad_enabled():
            x = x.to(matmul_dtype(x))
        for i, block in enumerate(self.h):
            x = block(x, angles, mask, cache[i] if cache else None)
        return self.ln_f(x)
