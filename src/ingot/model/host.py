"""Forward and backward passes in few operations, for eager float32 training on a CPU.

In a small model, element-wise operations take as long as matmuls, and autograd needs two to four times as many of them as these
hand-written gradients. Other devices, dtypes and compiled models use the plain forms in frontier.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ingot.model.layers import RotaryTables


def host_norm(x: Tensor, epsilon: float, rotary: RotaryTables | None = None) -> Tensor:
    """Return x with a root mean square of 1 in the last dimension, rotated by `rotary` if given."""
    return _Norm.apply(x, epsilon, *(rotary or (None, None)))  # type: ignore[no-untyped-call,no-any-return]


def host_relu2(x: Tensor) -> Tensor:
    """Return the square of relu(x)."""
    return _Relu2.apply(x)  # type: ignore[no-untyped-call,no-any-return]


def _rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + R / 2) of the first R dimensions of x in place."""
    first, second = x[..., : cos.size(-1)], x[..., cos.size(-1) : 2 * cos.size(-1)]
    new = (first * cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(new)
    return x


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, epsilon: float, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        scale = squares.div_(x.size(-1)).add_(epsilon).rsqrt_()
        y = x * scale
        if cos is not None and sin is not None:
            _rotate_(y, cos, sin)
        ctx.save_for_backward(y, scale, cos, sin)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        y, scale, cos, sin = ctx.saved_tensors
        # A rotation changes neither norms nor dot products, so its gradient may come last.
        along = (grad * y).mean(-1, keepdim=True)
        d_x = torch.addcmul(grad, y, along, value=-1).mul_(scale)
        return d_x if cos is None else _rotate_(d_x, cos, -sin), None, None, None


class _Relu2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = x.clamp(min=0)
        ctx.save_for_backward(positive)
        return positive.square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        return (positive * grad).mul_(2)
