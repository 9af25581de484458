"""Parts that more than one model family is built from."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -1  # a target with this value is not predicted: it adds neither loss nor gradient


class LayerNorm(nn.Module):
    """Layer normalisation whose bias is optional."""

    def __init__(self, width: int, bias: bool, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class LayerCache:
    """The keys and values one attention layer has seen: two buffers, filled from the left."""

    def __init__(self, batch: int, heads: int, capacity: int, head_size: int, device: torch.device, dtype: torch.dtype):
        self.keys = torch.empty(batch, heads, capacity, head_size, device=device, dtype=dtype)
        self.values = torch.empty_like(self.keys)
        self.length = 0

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append (B, H, T, D) keys and values and return all that are held so far."""
        end = self.length + k.size(2)
        self.keys[:, :, self.length : end] = k
        self.values[:, :, self.length : end] = v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]


def causal_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Attention of T queries that stand at the end of S keys; query i sees the keys up to its own place."""
    T, S = q.size(-2), k.size(-2)
    if T == S:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
    if T == 1:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood, in float32, over the targets that are not IGNORED."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
