"""A branch added to the residual stream and the sum normalised, in one pass, and one pass back.

The compiler writes the gradient of a float32 stream and casts it afterwards, once more over all of it, for the branch's product
backward; its sums for weight and bias keep that cast out of the kernel before it. Here one pass back writes the gradient in both
number formats and adds those sums up on its way. The norm comes in the format of the product that reads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def fused_add_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, epsilon: float, centred: bool
) -> tuple[Tensor, Tensor]:
    """The sum of x and a branch (B, T, C), or x alone, and its LayerNorm, or, if it is not `centred`, its RMSNorm."""
    if branch is not None:
        x, branch = x.to(torch.promote_types(x.dtype, branch.dtype)), branch.flatten(0, -2)
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    total, y, *_ = torch.ops.ingot.add_norm(x.flatten(0, -2), branch, weight, bias, epsilon, centred, dtype)
    return x if branch is None else total.view(x.shape), y.view(x.shape)


@torch.library.custom_op("ingot::add_norm", mutates_args=())
def _add_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, epsilon: float, centred: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum (M, C), if there is a branch, its norm, and of each row the mean, if it is subtracted, and one over the spread."""
    total = x if branch is None else (x + branch).to(x.dtype)
    wide = total.float()
    mean = wide.mean(1) if centred else wide.new_empty(0)
    away = wide - mean[:, None] if centred else wide
    inverse = torch.rsqrt(away.square().mean(1) + epsilon)
    y = away * inverse[:, None] * weight
    y = (y if bias is None else y + bias).to(dtype)
    return x.new_empty(0) if branch is None else total, y, mean, inverse


@_add_norm.register_kernel("cuda")
def _add_norm_cuda(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, epsilon: float, centred: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from ingot.model.kernels.triton_norm import add_norm, fits

    if not fits(x):
        return _add_norm._init_fn(x, branch, weight, bias, epsilon, centred, dtype)  # type: ignore[no-any-return]
    return add_norm(x, branch, weight, bias, epsilon, centred, dtype)


@_add_norm.register_fake
def _add_norm_shapes(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor | None, epsilon: float, centred: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inverse = x.new_empty(len(x), dtype=torch.float32)
    total, mean = x.new_empty(0 if branch is None else x.shape), inverse.new_empty(inverse.shape if centred else 0)
    return total, x.new_empty(x.shape, dtype=dtype), mean, inverse


@torch.library.custom_op("ingot::add_norm_backward", mutates_args=())
def _add_norm_backward(
    dy: Tensor, d_total: Tensor | None, total: Tensor, weight: Tensor, mean: Tensor, inverse: Tensor, biased: bool,
    branch_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient for the stream (M, C), the same in a branch's format where it has another, and those of weight and bias.

    The last two are sums in float32, (2, C), or (1, C) without a bias. Without means it is an RMSNorm.
    """
    dy, wide = dy.float(), total.float()
    unit = (wide - mean[:, None] if len(mean) else wide) * inverse[:, None]
    scaled = dy * weight
    dx = scaled - unit * (scaled * unit).mean(1, keepdim=True)
    dx = (dx - scaled.mean(1, keepdim=True) if len(mean) else dx) * inverse[:, None]
    dx = (dx if d_total is None else dx + d_total).to(total.dtype)
    sums = torch.stack([(dy * unit).sum(0), dy.sum(0)][: 2 if biased else 1])
    return dx, dx.new_empty(0) if branch_dtype is None else dx.to(branch_dtype), sums


@_add_norm_backward.register_kernel("cuda")
def _add_norm_backward_cuda(
    dy: Tensor, d_total: Tensor | None, total: Tensor, weight: Tensor, mean: Tensor, inverse: Tensor, biased: bool,
    branch_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from ingot.model.kernels.triton_norm import add_norm_backward, fits

    given = dy, d_total, total, weight, mean, inverse, biased, branch_dtype
    return add_norm_backward(*given) if fits(total) else _add_norm_backward._init_fn(*given)


@_add_norm_backward.register_fake
def _add_norm_backward_shapes(
    dy: Tensor, d_total: Tensor | None, total: Tensor, weight: Tensor, mean: Tensor, inverse: Tensor, biased: bool,
    branch_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    narrow = total.new_empty(0) if branch_dtype is None else total.new_empty(total.shape, dtype=branch_dtype)
    return total.new_empty(total.shape), narrow, total.new_empty(2 if biased else 1, total.size(1), dtype=torch.float32)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, branch, weight, bias, *_ = inputs
    ctx.set_materialize_grads(False)  # the last sum of a model has no gradient, and zeros would be read
    ctx.biased, ctx.branched = bias is not None, branch is not None
    ctx.branch_dtype = None if branch is None or branch.dtype == x.dtype else branch.dtype
    ctx.save_for_backward(x if branch is None else output[0], weight, *output[2:])


def _gradients(ctx: Any, d_total: Tensor | None, dy: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    total, weight, mean, inverse = ctx.saved_tensors
    dy = torch.zeros_like(total) if dy is None else dy
    dx, narrow, sums = torch.ops.ingot.add_norm_backward(
        dy, d_total, total, weight, mean, inverse, ctx.biased, ctx.branch_dtype
    )  # fmt: skip
    d_branch = (dx if ctx.branch_dtype is None else narrow) if ctx.branched else None
    d_weight, *d_bias = (part.to(weight.dtype) for part in sums.unbind())
    return dx, d_branch, d_weight, d_bias[0] if d_bias else None, None, None, None


_add_norm.register_autograd(_gradients, setup_context=_keep)
