"""Norm, rotary embedding and gain of queries and keys, fused into one kernel forward and one backward.

torch.compile generates several kernels, because a rotated value depends on two values but the norm depends on the whole head.
Here each Triton program keeps whole heads in registers and reads and writes them once, in attention's layout (B, T, H, D).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

EPSILON = torch.finfo(torch.float32).eps  # torch's default for rms_norm


def fused_rotation(
    x: Tensor, rotary: tuple[Tensor, Tensor], gain: Tensor | None = None, epsilon: float | None = EPSILON
) -> Tensor:
    """Normalise heads (B, T, H, D), rotate pairs (i, i + R / 2) of their first R dimensions, and multiply each head by its gain.

    `rotary` holds cosines and sines (T, R / 2), `gain` a factor per head (H). If `epsilon` is None, heads are not normalised. The
    result is a (B, H, T, D) view of a contiguous (B, T, H, D) tensor.
    """
    cos, sin = rotary
    return torch.ops.ingot.rotation(x, cos, sin, gain, epsilon).transpose(1, 2)


def _inverse_norm(x: Tensor, epsilon: float | None) -> Tensor:
    return torch.ones_like(x[..., :1]) if epsilon is None else torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R dimensions of heads (B, T, H, D); cos and sin are (T, R / 2)."""
    half = cos.size(-1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, first * sin + second * cos, rest], dim=-1)


@torch.library.custom_op("ingot::rotation", mutates_args=())
def _rotation(x: Tensor, cos: Tensor, sin: Tensor, gain: Tensor | None, epsilon: float | None) -> Tensor:
    if x.is_cuda:
        from ingot.model.kernels.triton_rotary import rotation

        return rotation(x, cos, sin, gain, epsilon)
    wide = x.float()
    y = _rotated(wide * _inverse_norm(wide, epsilon), cos, sin)
    return (y if gain is None else y * gain[:, None]).to(x.dtype).contiguous()


_rotation.register_fake(lambda x, cos, sin, gain, epsilon: x.new_empty(x.shape))


# flexible_layout: the gradient that attention returns may have any layout; it is read without a copy.
@torch.library.custom_op("ingot::rotation_backward", mutates_args=(), tags=(torch.Tag.flexible_layout,))
def _rotation_backward(
    dy: Tensor, x: Tensor, cos: Tensor, sin: Tensor, gain: Tensor | None, epsilon: float | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the heads (B, T, H, D) and, in float32, each token's gradients of the gains (B, T, H)."""
    if x.is_cuda:
        from ingot.model.kernels.triton_rotary import rotation_backward

        return rotation_backward(dy, x, cos, sin, gain, epsilon)
    wide = x.float()
    inverse = _inverse_norm(wide, epsilon)
    back, unit = _rotated(dy.float(), cos, -sin), wide * inverse
    d_gain = (back * unit).sum(-1)
    dx = back if epsilon is None else back - unit * d_gain[..., None] / x.size(-1)
    dx = dx * inverse if gain is None else dx * inverse * gain[:, None]
    return dx.to(x.dtype).contiguous(), d_gain


_rotation_backward.register_fake(lambda dy, x, *_: (x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cos, sin, gain, ctx.epsilon = inputs
    ctx.save_for_backward(x, cos, sin, gain)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, cos, sin, gain = ctx.saved_tensors
    dx, d_gain = torch.ops.ingot.rotation_backward(dy, x, cos, sin, gain, ctx.epsilon)
    return dx, None, None, None if gain is None else d_gain.sum((0, 1)).to(gain.dtype), None


_rotation.register_autograd(_backward, setup_context=_save)
