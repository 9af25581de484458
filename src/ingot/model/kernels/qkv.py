"""Queries, keys and values as one product, and their attention by FlashAttention 4 as one operation.

The library's product is faster for one wide matrix than for three narrow ones. In a step this can pay where nothing is copied
to bring them together: queries and keys are normalised and rotated out of the product, values are read from it as they lie, and
all three gradients are written where they belong in the product's. The weights stay three parameters, put side by side as they
are brought into the number format of the product, which happens anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.model.kernels.flash import room_for_sums, write_gradients
from ingot.model.kernels.products import product_format
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
    """What the heads of queries, keys and values that three layers make of (B, T, C) find: (B, T, H, D).

    `tables`, `gain` (of queries) and `epsilon` are those of fused_rotation, `starts` those of flash_attention.
    """
    dtype = product_format(x)
    weight = torch.cat([layer.weight.to(dtype) for layer in layers])
    bias = torch.cat([layer.bias.to(dtype) for layer in layers]) if layers[0].bias is not None else None
    heads = F.linear(x, weight, bias).view(*x.shape[:-1], -1, head_size)  # (B, T, H + 2 K, D)
    y: Tensor = torch.ops.ingot.qkv_attention(heads, *tables, gain, epsilon, layers[0].out_features // head_size, starts)[0]
    return y


def _parts(heads: Tensor, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """The queries, keys and values of (B, T, H + 2 K, D)."""
    keys = (heads.size(2) - queries) // 2
    return heads[:, :, :queries], heads[:, :, queries:-keys], heads[:, :, -keys:]


@torch.library.custom_op("ingot::qkv_attention", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def _attend(
    heads: Tensor, cos: Tensor, sin: Tensor, gain: Tensor | None, epsilon: float | None, queries: int, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What queries find, (B, T, H, D), and what the backward pass needs: sums, and queries and keys as they were used."""
    q, k, v = _parts(heads, queries)
    q, k = (torch.ops.ingot.rotation(x, cos, sin, by, epsilon) for x, by in ((q, gain), (k, None)))
    return *torch.ops.ingot.flash_attention(q, k, v, None, starts, False), q, k


@_attend.register_fake
def _attend_shapes(
    heads: Tensor, cos: Tensor, sin: Tensor, gain: Tensor | None, epsilon: float | None, queries: int, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, _ = _parts(heads, queries)
    return q.new_empty(q.shape), room_for_sums(q, starts), q.new_empty(q.shape), k.new_empty(k.shape)


@torch.library.custom_op("ingot::qkv_attention_backward", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def _attend_backward(
    dy: Tensor,
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    gain: Tensor | None,
    epsilon: float | None,
    starts: Tensor | None,
    y: Tensor,
    sums: Tensor,
    q: Tensor,
    k: Tensor,
) -> tuple[Tensor, Tensor]:
    """The gradient for all heads (B, T, H + 2 K, D), and that of each gain from each token (B, T, H), float32."""
    plain_q, plain_k, v = _parts(heads, q.size(2))
    dq, dk, dv = torch.ops.ingot.flash_attention_backward(dy, q, k, v, y, sums, None, starts)
    dq, along = torch.ops.ingot.rotation_backward(dq, plain_q, cos, sin, gain, epsilon)
    dk, _ = torch.ops.ingot.rotation_backward(dk, plain_k, cos, sin, None, epsilon)
    return torch.cat([dq, dk, dv], dim=2), along


@_attend_backward.register_kernel("cuda")
def _attend_backward_cuda(
    dy: Tensor,
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    gain: Tensor | None,
    epsilon: float | None,
    starts: Tensor | None,
    y: Tensor,
    sums: Tensor,
    q: Tensor,
    k: Tensor,
) -> tuple[Tensor, Tensor]:
    from ingot.model.kernels.triton_rotary import rotation_backward

    plain_q, plain_k, v = _parts(heads, q.size(2))
    grads = heads.new_empty(heads.shape)
    to_q, to_k, to_v = _parts(grads, q.size(2))
    dq, dk = q.new_empty(q.shape), k.new_empty(k.shape)
    write_gradients(dy, (q, k, v), y, sums, None, starts, (dq, dk, to_v))
    _, along = rotation_backward(dq, plain_q, cos, sin, gain, epsilon, out=to_q)
    rotation_backward(dk, plain_k, cos, sin, None, epsilon, out=to_k)
    return grads, along


@_attend_backward.register_fake
def _attend_backward_shapes(
    dy: Tensor,
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    gain: Tensor | None,
    epsilon: float | None,
    starts: Tensor | None,
    y: Tensor,
    sums: Tensor,
    q: Tensor,
    k: Tensor,
) -> tuple[Tensor, Tensor]:
    return heads.new_empty(heads.shape), heads.new_empty(q.shape[:-1], dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    heads, cos, sin, gain, ctx.epsilon, _, starts = inputs
    ctx.set_materialize_grads(False)  # only the first output has a gradient
    ctx.save_for_backward(heads, cos, sin, gain, starts, *output)


def _gradients(ctx: Any, dy: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    heads, cos, sin, gain, starts, *output = ctx.saved_tensors
    grads, along = torch.ops.ingot.qkv_attention_backward(dy, heads, cos, sin, gain, ctx.epsilon, starts, *output)
    return grads, None, None, None if gain is None else along.sum((0, 1)).to(gain.dtype), None, None, None


_attend.register_autograd(_gradients, setup_context=_keep)
