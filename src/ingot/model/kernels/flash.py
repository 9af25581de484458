"""FlashAttention 4 as a part of a compiled graph: causal attention, of whole rows or of windows, with keys of fewer heads.

The package (`flash-attn-4`, the extra `flash`) compiles its kernels by itself and its autograd function is not one that torch's
compiler can look into, so its two passes are operations here. It takes heads as they lie in memory. CPUs have the plain form.
"""

from __future__ import annotations

import functools
import math
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


def flash_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """What queries (B, H, T, D) find in keys and values (B, K, T, D): up to their own place, or in the last `window` tokens.

    Heads of keys serve H / K neighbouring heads of queries. Returns (B, H, T, D), a view of (B, T, H, D).
    """
    device = q.device.type
    if torch.is_autocast_enabled(device):
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    return torch.ops.ingot.flash_attention(*(x.transpose(1, 2) for x in (q, k, v)), window)[0].transpose(1, 2)


@functools.cache
def library() -> Any:
    """The package's functions."""
    return import_module("flash_attn.cute.interface")


def _reach(window: int | None) -> int | None:
    """How many tokens before its own a query sees."""
    return None if window is None else window - 1


def _probabilities(q: Tensor, k: Tensor, window: int | None) -> Tensor:
    """What heads (B, T, H, D) give to each token, (B, H, T, T), by all pairs."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, _for_each(k, q)) / math.sqrt(q.size(-1))
    place = torch.arange(q.size(1), device=q.device)
    before = place[:, None] - place
    seen = (before >= 0) & (before < (len(place) if window is None else window))
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


def _for_each(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values (B, T, K, D) for every head that they serve."""
    return x.repeat_interleave(q.size(2) // x.size(2), dim=2)


@torch.library.custom_op("ingot::flash_attention", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def _attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """What heads (B, T, H, D) find, and the logarithm (B, H, T) of the sum of their scores, which the way back needs."""
    y = torch.einsum("bhqk,bkhd->bqhd", _probabilities(q, k, window), _for_each(v, q))
    return y.contiguous(), q.new_zeros(_sums(q), dtype=torch.float32)


@_attend.register_kernel("cuda")
def _attend_cuda(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    sums = q.new_empty(_sums(q), dtype=torch.float32)
    found = library()._flash_attn_fwd(q, k, v, causal=True, window_size_left=_reach(window), lse=sums, return_lse=True)
    return found[0], sums


@_attend.register_fake
def _attend_shape(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(_sums(q), dtype=torch.float32)


def _sums(q: Tensor) -> tuple[int, int, int]:
    B, T, H, _ = q.shape
    return B, H, T


@torch.library.custom_op("ingot::flash_attention_backward", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def _attend_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    given, scale = _probabilities(q, k, window), 1 / math.sqrt(q.size(-1))
    by_value = torch.einsum("bqhd,bkhd->bhqk", dy, _for_each(v, q))
    by_score = given * (by_value - (given * by_value).sum(-1, keepdim=True)) * scale
    dq = torch.einsum("bhqk,bkhd->bqhd", by_score, _for_each(k, q))
    dk, dv = (torch.einsum("bhqk,bqhd->bkhd", by, x) for by, x in ((by_score, q), (given, dy)))  # (B, T, H, D)
    dk, dv = (x.view(*k.shape[:3], -1, k.size(3)).sum(3) for x in (dk, dv))
    return dq.contiguous(), dk, dv


@_attend_backward.register_kernel("cuda")
def _attend_backward_cuda(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    grads = [x.new_empty(x.shape) for x in (q, k, v)]
    dq, dk, dv = grads
    library()._flash_attn_bwd(q, k, v, y, dy, sums, causal=True, window_size_left=_reach(window), dq=dq, dk=dk, dv=dv)
    return dq, dk, dv


@_attend_backward.register_fake
def _attend_backward_shape(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output)


def _gradients(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return *torch.ops.ingot.flash_attention_backward(dy, *ctx.saved_tensors, ctx.window), None


_attend.register_autograd(_gradients, setup_context=_keep)
