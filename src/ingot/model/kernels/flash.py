"""FlashAttention 4 inside compiled graphs: causal attention with sliding windows, document masks and grouped-query heads.

The package `flash-attn-4` (extra `flash`) compiles its own kernels, and torch's compiler cannot trace its autograd function, so
forward and backward are custom operators here. Heads have the layout (B, T, H, D). CPUs run a reference implementation.

`starts` holds the int32 offsets of all documents in the flattened batch, in ascending order; each row starts a new document. The
last value, which may be repeated, is the total number of tokens.

With `cudnn`, the forward pass uses cuDNN unless `starts`, a window or grouped key/value heads prevent that. On an H200
with 64 x 1024 tokens and head size 64, cuDNN takes 0.30 ms forward and 1.03 ms backward; FlashAttention 4 takes 0.39 and 0.78 ms.
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

from ingot.model.kernels.matmul import matmul_dtype


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int | None = None, starts: Tensor | None = None, cudnn: bool = False
) -> Tensor:
    """Compute causal attention (B, H, T, D) of (B, H, T, D) queries over (B, K, T, D) keys and values.

    With `window`, a token attends only to itself and the `window` - 1 tokens before it; with `starts`, only within its document.
    Each key head serves H / K adjacent query heads.
    """
    heads = (x.to(matmul_dtype(x)).transpose(1, 2) for x in (q, k, v))
    return torch.ops.ingot.flash_attention(*heads, window, starts, cudnn)[0].transpose(1, 2)


def packed_flash_attention(qkv: Tensor, window: int | None = None, starts: Tensor | None = None, cudnn: bool = False) -> Tensor:
    """Compute attention (B, T, H, D) from packed queries, keys and values (B, T, 3, H, D); their gradient is packed, too.

    Concatenating three separate gradients for the matmul would take 1.7 of the 110 ms per step of a 124M model.
    """
    return torch.ops.ingot.packed_flash_attention(qkv.to(matmul_dtype(qkv)), window, starts, cudnn)[0]


@functools.cache
def library() -> Any:
    """Import and return the interface module of FlashAttention 4."""
    warnings.filterwarnings("ignore", "Argument aux_data")  # this warning is about FlashAttention's own code
    return import_module("flash_attn.cute.interface")


def _options(length: int, window: int | None, starts: Tensor | None) -> dict[str, Any]:
    """Return the arguments that FlashAttention 4 takes in both the forward and the backward pass, for rows of this length."""
    options: dict[str, Any] = {"causal": True, "window_size_left": None if window is None else window - 1}
    if starts is not None:
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": length, "max_seqlen_k": length}
    return options


def _packed(x: Tensor, starts: Tensor | None) -> Tensor:
    """Return heads (B, T, H, D) in the layout of FlashAttention 4: (B * T, H, D) with document boundaries, else unchanged."""
    return x if starts is None else x.flatten(0, 1)


def _probabilities(q: Tensor, k: Tensor, window: int | None, starts: Tensor | None) -> Tensor:
    """Return all attention probabilities (B, H, T, T) of queries and keys (B, T, H, D); the reference for CPUs."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, _repeat_heads(k, q)) / math.sqrt(q.size(-1))
    B, T = q.shape[:2]
    position = torch.arange(B * T, dtype=torch.int32, device=q.device)
    distance = position[:T, None] - position[:T]
    seen = (distance >= 0) & (distance < (T if window is None else window))
    if starts is not None:
        document = torch.searchsorted(starts, position, right=True).view(B, T)
        seen = seen & (document[:, None, :, None] == document[:, None, None, :])  # (B, 1, T, T)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.size(2) // x.size(2), dim=2)


@torch.library.custom_op("ingot::flash_attention", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def _attend(q: Tensor, k: Tensor, v: Tensor, window: int | None, starts: Tensor | None, cudnn: bool) -> tuple[Tensor, Tensor]:
    """Return the output (B, T, H, D) and the log-sum-exp of the scores, which the backward pass needs."""
    if not q.is_cuda:
        y = torch.einsum("bhqk,bkhd->bqhd", _probabilities(q, k, window, starts), _repeat_heads(v, q))
        return y.contiguous(), empty_lse(q, starts).zero_()
    if cudnn and window is None and starts is None and k.size(2) == q.size(2):
        heads = (x.transpose(1, 2) for x in (q, k, v))
        y, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*heads, None, True, 0.0, True, False)
        return y.transpose(1, 2).contiguous(), lse.squeeze(-1)
    lse, y = empty_lse(q, starts), q.new_empty(q.shape)
    inputs = (_packed(x, starts) for x in (q, k, v))
    library()._flash_attn_fwd(*inputs, **_options(q.size(1), window, starts), out=_packed(y, starts), lse=lse, return_lse=True)
    return y, lse


_attend.register_fake(lambda q, k, v, window, starts, cudnn: (q.new_empty(q.shape), empty_lse(q, starts)))


def empty_lse(q: Tensor, starts: Tensor | None) -> Tensor:
    """Return an uninitialised log-sum-exp tensor: (B, H, T), or (H, B * T) with document boundaries."""
    B, T, H, _ = q.shape
    return q.new_empty((B, H, T) if starts is None else (H, B * T), dtype=torch.float32)


@torch.library.custom_op("ingot::flash_attention_backward", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def _attend_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, window: int | None, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    if q.is_cuda:
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        write_gradients(dy, (q, k, v), y, lse, window, starts, (dq, dk, dv))
        return dq, dk, dv
    given, scale = _probabilities(q, k, window, starts), 1 / math.sqrt(q.size(-1))
    by_value = torch.einsum("bqhd,bkhd->bhqk", dy, _repeat_heads(v, q))
    by_score = given * (by_value - (given * by_value).sum(-1, keepdim=True)) * scale
    dq = torch.einsum("bhqk,bkhd->bqhd", by_score, _repeat_heads(k, q))
    dk, dv = (torch.einsum("bhqk,bqhd->bkhd", by, x) for by, x in ((by_score, q), (given, dy)))  # (B, T, H, D)
    dk, dv = (x.view(*k.shape[:3], -1, k.size(3)).sum(3) for x in (dk, dv))
    return dq.contiguous(), dk, dv


def write_gradients(
    dy: Tensor, heads: Sequence[Tensor], y: Tensor, lse: Tensor, window: int | None, starts: Tensor | None, out: Sequence[Tensor]
) -> None:
    """Compute the gradients of queries, keys and values (B, T, H, D) with FlashAttention 4, and write them to `out`."""
    inputs = [_packed(x, starts) for x in (*heads, y, dy)]
    dq, dk, dv = (_packed(x, starts) for x in out)
    options = _options(y.size(1), window, starts) | {"deterministic": torch.are_deterministic_algorithms_enabled()}
    library()._flash_attn_bwd(*inputs, lse, **options, dq=dq, dk=dk, dv=dv)


_attend_backward.register_fake(lambda dy, q, k, v, *_: tuple(x.new_empty(x.shape) for x in (q, k, v)))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *heads, ctx.window, starts, _ = inputs
    ctx.save_for_backward(*heads, *output, starts)


def _backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    *saved, starts = ctx.saved_tensors
    return *torch.ops.ingot.flash_attention_backward(dy, *saved, ctx.window, starts), None, None, None


_attend.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("ingot::packed_flash_attention", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def _attend_packed(qkv: Tensor, window: int | None, starts: Tensor | None, cudnn: bool) -> tuple[Tensor, Tensor]:
    return torch.ops.ingot.flash_attention(*qkv.unbind(2), window, starts, cudnn)


_attend_packed.register_fake(
    lambda qkv, window, starts, cudnn: (qkv.new_empty(qkv[:, :, 0].shape), empty_lse(qkv[:, :, 0], starts))
)


@torch.library.custom_op("ingot::packed_flash_attention_backward", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def _attend_packed_backward(dy: Tensor, qkv: Tensor, y: Tensor, lse: Tensor, window: int | None, starts: Tensor | None) -> Tensor:
    if not qkv.is_cuda:
        return torch.stack(torch.ops.ingot.flash_attention_backward(dy, *qkv.unbind(2), y, lse, window, starts), dim=2)
    grads = qkv.new_empty(qkv.shape)
    write_gradients(dy, qkv.unbind(2), y, lse, window, starts, grads.unbind(2))
    return grads


_attend_packed_backward.register_fake(lambda dy, qkv, y, lse, window, starts: qkv.new_empty(qkv.shape))


def _packed_backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    *saved, starts = ctx.saved_tensors
    return torch.ops.ingot.packed_flash_attention_backward(dy, *saved, ctx.window, starts), None, None, None


_attend_packed.register_autograd(_packed_backward, setup_context=_save)
