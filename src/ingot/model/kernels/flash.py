"""FlashAttention 4 as a part of a compiled graph: causal attention of rows, windows and documents, with keys of fewer heads.

The package (`flash-attn-4`, the extra `flash`) compiles its kernels by itself and its autograd function is not one that torch's
compiler can look into, so its two passes are operations here. It takes heads as they lie in memory. CPUs have the plain form.

`starts` says where documents begin in all rows one after another: int32, in order, every row's first token among them, and the
number of all tokens at its end, once or more often.

With `cudnn` the forward pass of whole rows whose keys have as many heads is cuDNN's: it takes 0.30 ms of an H200 for
64 x 1024 tokens and heads of 64 where the package's takes 0.39; cuDNN's backward pass takes 1.03 where the package's takes 0.78.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ingot.model.kernels.products import product_format


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, starts: Tensor | None = None, cudnn: bool = False
) -> Tensor:
    """What queries (B, H, T, D) find in keys and values (B, K, T, D): up to their own place, or in the last `window` tokens.

    With `starts` in their own document alone. Heads of keys serve H / K neighbouring heads of queries. Returns (B, H, T, D), a
    view of (B, T, H, D).
    """
    heads = (x.to(product_format(x)).transpose(1, 2) for x in (q, k, v))
    return torch.ops.ingot.flash_attention(*heads, window, starts, cudnn)[0].transpose(1, 2)


def packed_flash_attention(qkv: Tensor, window: int | None = None, starts: Tensor | None = None, cudnn: bool = False) -> Tensor:
    """The same of queries, keys and values that are one product's, (B, T, 3, H, D); so is their gradient. Returns (B, T, H, D).

    Three gradients would be copied into one for the product: 1.7 of 110 ms of a step of the 124M shape.
    """
    return torch.ops.ingot.packed_flash_attention(qkv.to(product_format(qkv)), window, starts, cudnn)[0]


@functools.cache
def library() -> Any:
    """The functions of FlashAttention 4's package."""
    warnings.filterwarnings("ignore", "Argument aux_data")  # by its compiler, of the package's own code
    return import_module("flash_attn.cute.interface")


def _how(length: int, window: int | None, starts: Tensor | None) -> dict[str, Any]:
    """What both of the package's passes are told of rows of this length."""
    how: dict[str, Any] = {"causal": True, "window_size_left": None if window is None else window - 1}
    if starts is not None:
        how |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": length, "max_seqlen_k": length}
    return how


def _laid(x: Tensor, starts: Tensor | None) -> Tensor:
    """Heads (B, T, H, D) as the package takes them: documents lie in tokens without rows, (B * T, H, D)."""
    return x if starts is None else x.flatten(0, 1)


def _probabilities(q: Tensor, k: Tensor, window: int | None, starts: Tensor | None) -> Tensor:
    """What heads (B, T, H, D) give to each token, (B, H, T, T), by all pairs."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, _for_each(k, q)) / math.sqrt(q.size(-1))
    B, T = q.shape[:2]
    place = torch.arange(B * T, dtype=torch.int32, device=q.device)
    before = place[:T, None] - place[:T]
    seen = (before >= 0) & (before < (T if window is None else window))
    if starts is not None:
        document = torch.searchsorted(starts, place, right=True).view(B, T)
        seen = seen & (document[:, None, :, None] == document[:, None, None, :])  # (B, 1, T, T)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


def _for_each(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values (B, T, K, D) for every head that they serve."""
    return x.repeat_interleave(q.size(2) // x.size(2), dim=2)


@torch.library.custom_op("ingot::flash_attention", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def _attend(q: Tensor, k: Tensor, v: Tensor, window: int | None, starts: Tensor | None, cudnn: bool) -> tuple[Tensor, Tensor]:
    """What heads (B, T, H, D) find, and the logarithm of the sum of their scores, which the way back needs."""
    y = torch.einsum("bhqk,bkhd->bqhd", _probabilities(q, k, window, starts), _for_each(v, q))
    return y.contiguous(), room_for_sums(q, starts).zero_()


@_attend.register_kernel("cuda")
def _attend_cuda(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, starts: Tensor | None, cudnn: bool
) -> tuple[Tensor, Tensor]:
    if cudnn and window is None and starts is None and k.size(2) == q.size(2):
        return _attend_cudnn(q, k, v)
    sums, y = room_for_sums(q, starts), q.new_empty(q.shape)
    laid = (_laid(x, starts) for x in (q, k, v))
    library()._flash_attn_fwd(*laid, **_how(q.size(1), window, starts), out=_laid(y, starts), lse=sums, return_lse=True)
    return y, sums


def _attend_cudnn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention by cuDNN, which lays what it finds as queries lie, and gives the natural logarithm of sums as (B, H, T, 1)."""
    heads = (x.transpose(1, 2) for x in (q, k, v))
    y, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*heads, None, True, 0.0, True, False)
    return y.transpose(1, 2).contiguous(), sums.squeeze(-1)


@_attend.register_fake
def _attend_shape(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, starts: Tensor | None, cudnn: bool
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), room_for_sums(q, starts)


def room_for_sums(q: Tensor, starts: Tensor | None) -> Tensor:
    """Room for a number per head and token: (B, H, T), or (H, B * T) of documents."""
    B, T, H, _ = q.shape
    return q.new_empty((B, H, T) if starts is None else (H, B * T), dtype=torch.float32)


@torch.library.custom_op("ingot::flash_attention_backward", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def _attend_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor, window: int | None, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    given, scale = _probabilities(q, k, window, starts), 1 / math.sqrt(q.size(-1))
    by_value = torch.einsum("bqhd,bkhd->bhqk", dy, _for_each(v, q))
    by_score = given * (by_value - (given * by_value).sum(-1, keepdim=True)) * scale
    dq = torch.einsum("bhqk,bkhd->bqhd", by_score, _for_each(k, q))
    dk, dv = (torch.einsum("bhqk,bqhd->bkhd", by, x) for by, x in ((by_score, q), (given, dy)))  # (B, T, H, D)
    dk, dv = (x.view(*k.shape[:3], -1, k.size(3)).sum(3) for x in (dk, dv))
    return dq.contiguous(), dk, dv


@_attend_backward.register_kernel("cuda")
def _attend_backward_cuda(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor, window: int | None, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    write_gradients(dy, (q, k, v), y, sums, window, starts, (dq, dk, dv))
    return dq, dk, dv


def write_gradients(
    dy: Tensor,
    heads: Sequence[Tensor],
    y: Tensor,
    sums: Tensor,
    window: int | None,
    starts: Tensor | None,
    grads: Sequence[Tensor],
) -> None:
    """Let the package write the gradients of queries, keys and values (B, T, H, D) where they are to lie."""
    laid = [_laid(x, starts) for x in (*heads, y, dy)]
    dq, dk, dv = (_laid(x, starts) for x in grads)
    how = _how(y.size(1), window, starts) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
    library()._flash_attn_bwd(*laid, sums, **how, dq=dq, dk=dk, dv=dv)


@_attend_backward.register_fake
def _attend_backward_shape(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, sums: Tensor, window: int | None, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *heads, ctx.window, starts, _ = inputs
    ctx.save_for_backward(*heads, *output, starts)


def _gradients(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    *saved, starts = ctx.saved_tensors
    return *torch.ops.ingot.flash_attention_backward(dy, *saved, ctx.window, starts), None, None, None


_attend.register_autograd(_gradients, setup_context=_keep)


@torch.library.custom_op("ingot::packed_flash_attention", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def _attend_packed(qkv: Tensor, window: int | None, starts: Tensor | None, cudnn: bool) -> tuple[Tensor, Tensor]:
    return torch.ops.ingot.flash_attention(*qkv.unbind(2), window, starts, cudnn)


@_attend_packed.register_fake
def _attend_packed_shape(qkv: Tensor, window: int | None, starts: Tensor | None, cudnn: bool) -> tuple[Tensor, Tensor]:
    return _attend_shape(*qkv.unbind(2), window, starts, cudnn)


@torch.library.custom_op("ingot::packed_flash_attention_backward", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def _attend_packed_backward(
    dy: Tensor, qkv: Tensor, y: Tensor, sums: Tensor, window: int | None, starts: Tensor | None
) -> Tensor:
    return torch.stack(torch.ops.ingot.flash_attention_backward(dy, *qkv.unbind(2), y, sums, window, starts), dim=2)


@_attend_packed_backward.register_kernel("cuda")
def _attend_packed_backward_cuda(
    dy: Tensor, qkv: Tensor, y: Tensor, sums: Tensor, window: int | None, starts: Tensor | None
) -> Tensor:
    grads = qkv.new_empty(qkv.shape)
    write_gradients(dy, qkv.unbind(2), y, sums, window, starts, grads.unbind(2))
    return grads


@_attend_packed_backward.register_fake
def _attend_packed_backward_shape(
    dy: Tensor, qkv: Tensor, y: Tensor, sums: Tensor, window: int | None, starts: Tensor | None
) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _packed_gradient(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    *saved, starts = ctx.saved_tensors
    return torch.ops.ingot.packed_flash_attention_backward(dy, *saved, ctx.window, starts), None, None, None


_attend_packed.register_autograd(_packed_gradient, setup_context=_keep)
