"""The gpt2 family: GPT-2 as nanoGPT trains it, with learned positions, pre-norm blocks and a head tied to the embedding.

Parameters have the same names as in checkpoints of OpenAI and nanoGPT (`transformer.h.0.attn.c_attn.weight`), so that
those checkpoints can be read without a translation table. Weights have the layout of torch.nn.Linear.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.model.kernels.flash import packed_flash_attention
from ingot.model.kernels.fused_mlp import fused_mlp
from ingot.model.kernels.matmul import matmul_dtype
from ingot.model.layers import (
    Form,
    LanguageModel,
    LayerCache,
    LayerNorm,
    Mask,
    attention_mask,
    causal_attention,
    document_starts,
    positions,
    uses_flash,
)
from ingot.model.settings import GPT2Settings


class GPT2Attention(nn.Module):
    form: Form = "repeated"

    def __init__(self, width: int, heads: int, bias: bool, dropout: float):
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)
        self.heads = heads
        self.dropout = dropout

    def forward(self, x: Tensor, mask: Mask | None, cache: LayerCache | None) -> Tensor:
        B, T, C = x.shape
        qkv, dropout = self.c_attn(x).view(B, T, 3, self.heads, -1), self.dropout if self.training else 0.0
        if uses_flash(self.form, mask, dropout) and cache is None:
            y = packed_flash_attention(qkv, None, document_starts(mask), self.form != "flash4")  # (B, T, H, D)
        else:
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # (B, H, T, D)
            if cache is not None:
                k, v = cache.extend(k, v)  # (B, H, S, D)
            y = causal_attention(q, k, v, dropout, mask, self.form).transpose(1, 2)
        y = self.c_proj(y.reshape(B, T, C))
        return F.dropout(y, self.dropout, self.training)


class GPT2MLP(nn.Module):
    fused_mlp = False  # fuse the activation into the matmuls before and after it

    def __init__(self, width: int, bias: bool, dropout: float, gelu: Literal["tanh", "erf"]):
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.c_proj = nn.Linear(4 * width, width, bias=bias)
        self.dropout = dropout
        self.approximate = "tanh" if gelu == "tanh" else "none"

    def forward(self, x: Tensor) -> Tensor:
        if self.fused_mlp and torch.is_grad_enabled():
            activation = "gelu-tanh" if self.approximate == "tanh" else "gelu-erf"
            y = fused_mlp(x, self.c_fc.weight, self.c_fc.bias, self.c_proj.weight, activation)
            y = y if self.c_proj.bias is None else y + self.c_proj.bias.to(y.dtype)
        else:
            y = self.c_proj(F.gelu(self.c_fc(x), approximate=self.approximate))
        return F.dropout(y, self.dropout, self.training)


class GPT2Block(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool, dropout: float, gelu: Literal["tanh", "erf"]):
        super().__init__()
        self.ln_1 = LayerNorm(width, bias)
        self.attn = GPT2Attention(width, heads, bias, dropout)
        self.ln_2 = LayerNorm(width, bias)
        self.mlp = GPT2MLP(width, bias, dropout, gelu)

    def forward(self, x: Tensor, mask: Mask | None = None, cache: LayerCache | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), mask, cache)
        return x + self.mlp(self.ln_2(x))


@torch.no_grad()
def initialise(model: nn.Module, layers: int) -> None:
    """Initialise the parameters as in GPT-2; the gains of the norms remain one."""
    for name, parameter in model.named_parameters():
        if name.endswith(("c_proj.weight", "c_down.weight")):
            # Each layer adds two branches to the residual stream; this factor makes the stream's variance independent of depth.
            parameter.normal_(std=0.02 / math.sqrt(2 * layers))
        elif parameter.dim() >= 2:
            parameter.normal_(std=0.02)
        elif name.endswith("bias"):
            parameter.zero_()


class GPT2(LanguageModel):
    """GPT-2 with the parameter names of nanoGPT; biases, dropout and the kind of GELU are settings."""

    fused_stream = False  # during training, store the residual stream in the matmul dtype

    Settings = GPT2Settings

    def __init__(self, vocab_size: int, context: int, **settings: Any):
        super().__init__()
        s = GPT2Settings(**settings)
        self.context, self.head_size, self.kv_heads, self.lm_head = context, s.width // s.heads, s.heads, None
        self.dropout = s.dropout
        blocks = [GPT2Block(s.width, s.heads, s.bias, s.dropout, s.gelu) for _ in range(s.layers)]
        wte, wpe = nn.Embedding(vocab_size, s.width), nn.Embedding(context, s.width)
        parts = {"wte": wte, "wpe": wpe, "h": nn.ModuleList(blocks), "ln_f": LayerNorm(s.width, s.bias)}
        self.transformer: Any = nn.ModuleDict(parts)
        initialise(self, s.layers)

    @property
    def blocks(self) -> nn.ModuleList:
        """Return the transformer blocks; a backend may checkpoint, compile or shard each of them."""
        return self.transformer.h

    @property
    def embedding_weight(self) -> Tensor:
        return self.transformer.wte.weight

    def hidden(self, tokens: Tensor, cache: list[LayerCache] | None = None, documents: Tensor | None = None) -> Tensor:
        parts = self.transformer
        embedded = parts.wpe(positions(tokens, cache, parts.wpe.num_embeddings))  # (T, C)
        mask = attention_mask(documents, cache, self.head_size, self.dropout if self.training else 0.0)
        x = F.dropout(parts.wte(tokens) + embedded, self.dropout, self.training)  # (B, T, C)
        if self.fused_stream and torch.is_grad_enabled():
            x = x.to(matmul_dtype(x))
        for i, block in enumerate(parts.h):
            x = block(x, mask, cache[i] if cache else None)
        return parts.ln_f(x)
