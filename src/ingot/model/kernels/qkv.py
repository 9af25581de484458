"""Query, key and value projections as one matmul, and attention by FlashAttention 4 as one operation.

One wide matmul is faster than three narrow ones, but only if queries, keys and values are never copied into or out of the packed
tensor. So queries and keys are normalised and rotated straight from the result of the matmul, values are read from it in place,
and all three gradients are written straight into a packed gradient. The weights remain three parameters, which are concatenated
while they are cast to the dtype of the matmul.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.model.kernels.flash import empty_lse, write_gradients
from ingot.model.kernels.matmul import matmul_dtype
from ingot.model.kernels.rotary import EPSILON


def projected_attention(
    x: Tensor,
    layers: Sequence[nn.Linear],
    head_size: int,
    tables: tuple[Tensor, Tensor],
    starts: Tensor | None = None,
    gain: Tensor | None = None,
    epsilon: float | None = EPSILON,
) -> Tensor:
    """Return the attention output (B, T, H, D) for x (B, T, C); `layers` are the query, key and value projections.

    See fused_rotation for `tables` (`rotary` there), `gain` (only for queries) and `epsilon`, and flash.py for `starts`.
    """
    dtype = matmul_dtype(x)
    weight = torch.cat([layer.weight.to(dtype) for layer in layers])
    bias = torch.cat([layer.bias.to(dtype) for layer in layers]) if layers[0].bias is not None else None
    heads = F.linear(x, weight, bias).view(*x.shape[:-1], -1, head_size)  # (B, T, H + 2 K, D)
    y: Tensor = torch.ops.ingot.qkv_attention(heads, *tables, gain, epsilon, layers[0].out_features // head_size, starts)[0]
    return y


def _parts(heads: Tensor, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split heads (B, T, H + 2 K, D) into H = `queries` query heads, K key heads and K value heads."""
    keys = (heads.size(2) - queries) // 2
    return heads[:, :, :queries], heads[:, :, queries:-keys], heads[:, :, -keys:]


@torch.library.custom_op("ingot::qkv_attention", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def _attend(
    heads: Tensor, cos: Tensor, sin: Tensor, gain: Tensor | None, epsilon: float | None, queries: int, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the output (B, T, H, D) and, for the backward pass, the log-sum-exp and the rotated queries and keys."""
    q, k, v = _parts(heads, queries)
    q, k = (torch.ops.ingot.rotation(x, cos, sin, g, epsilon) for x, g in ((q, gain), (k, None)))
    return *torch.ops.ingot.flash_attention(q, k, v, None, starts, False), q, k


@_attend.register_fake
def _attend_shapes(
    heads: Tensor, cos: Tensor, sin: Tensor, gain: Tensor | None, epsilon: float | None, queries: int, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, _ = _parts(heads, queries)
    return q.new_empty(q.shape), empty_lse(q, starts), q.new_empty(q.shape), k.new_empty(k.shape)


@torch.library.custom_op("ingot::qkv_attention_backward", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def _attend_backward(
    dy: Tensor, heads: Tensor, cos: Tensor, sin: Tensor, gain: Tensor | None, epsilon: float | None, starts: Tensor | None,
    y: Tensor, lse: Tensor, q: Tensor, k: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of `heads` (B, T, H + 2 K, D) and, in float32, each token's gradients of the query gains (B, T, H)."""
    plain_q, plain_k, v = _parts(heads, q.size(2))
    if heads.is_cuda:
        from ingot.model.kernels.triton_rotary import rotation_backward

        grads = heads.new_empty(heads.shape)
        to_q, to_k, to_v = _parts(grads, q.size(2))
        dq, dk = q.new_empty(q.shape), k.new_empty(k.shape)
        write_gradients(dy, (q, k, v), y, lse, None, starts, (dq, dk, to_v))
        _, d_gain = rotation_backward(dq, plain_q, cos, sin, gain, epsilon, out=to_q)
        rotation_backward(dk, plain_k, cos, sin, None, epsilon, out=to_k)
        return grads, d_gain
    dq, dk, dv = torch.ops.ingot.flash_attention_backward(dy, q, k, v, y, lse, None, starts)
    dq, d_gain = torch.ops.ingot.rotation_backward(dq, plain_q, cos, sin, gain, epsilon)
    dk, _ = torch.ops.ingot.rotation_backward(dk, plain_k, cos, sin, None, epsilon)
    return torch.cat([dq, dk, dv], dim=2), d_gain


_attend_backward.register_fake(
    lambda dy, heads, cos, sin, gain, epsilon, starts, y, lse, q, k: (
        heads.new_empty(heads.shape), heads.new_empty(q.shape[:-1], dtype=torch.float32)
    )
)  # fmt: skip


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    heads, cos, sin, gain, ctx.epsilon, _, starts = inputs
    ctx.set_materialize_grads(False)  # only the first output has a gradient
    ctx.save_for_backward(heads, cos, sin, gain, starts, *output)


def _backward(ctx: Any, dy: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    heads, cos, sin, gain, starts, *output = ctx.saved_tensors
    grads, d_gain = torch.ops.ingot.qkv_attention_backward(dy, heads, cos, sin, gain, ctx.epsilon, starts, *output)
    return grads, None, None, None if gain is None else d_gain.sum((0, 1)).to(gain.dtype), None, None, None


_attend.register_autograd(_backward, setup_context=_save)
