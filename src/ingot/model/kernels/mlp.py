"""Two layers with an activation between them: it is a part of the product before it, its slope of the product back.

The compiler reads what the first product wrote to activate it, and in the backward pass reads it again with the gradient that the
second product wrote: five passes over the widest tensor of a layer. Here tiles are activated before they are written. The squared
ReLU leaves only its own output, whose root is the slope; GELU has no such way back, so its scores are kept too. Tiles are
quack-kernels', or ours in Triton where that package is not to be had or there is a bias, whose gradient is then summed with them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.model.kernels.products import product, product_format, quack, takes

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu2": lambda x: F.relu(x).square(),
    "gelu-tanh": partial(F.gelu, approximate="tanh"),
    "gelu-erf": F.gelu,
}


def fused_mlp(x: Tensor, up: Tensor, bias: Tensor | None, down: Tensor, activation: str) -> Tensor:
    """What two layers, (N, C) with a bias (N) and (C, N), make of (B, T, C), with an activation of those above between them."""
    dtype = product_format(x)
    bias = None if bias is None else bias.to(dtype)
    y = torch.ops.ingot.mlp(x.flatten(0, -2).to(dtype), up.to(dtype), bias, down.to(dtype), activation)[0]
    return y.view(*x.shape[:-1], len(down))


def _keeps_scores(activation: str) -> bool:
    return activation != "relu2"


@torch.library.custom_op("ingot::mlp", mutates_args=())
def _mlp(x: Tensor, up: Tensor, bias: Tensor | None, down: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """(M, C) of (M, C), and what the backward pass needs: activations (M, N), and scores where these have no way back."""
    scores = F.linear(x, up, bias)
    y = ACTIVATIONS[activation](scores.float()).to(x.dtype)
    return y @ down.T, y, scores if _keeps_scores(activation) else y.new_empty(0)


@_mlp.register_kernel("cuda")
def _mlp_cuda(x: Tensor, up: Tensor, bias: Tensor | None, down: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    from ingot.model.kernels.triton_mlp import activated_product, fits

    x, up = x.contiguous(), up.contiguous()
    if not fits(x, up, down):
        return _mlp._init_fn(x, up, bias, down, activation)  # type: ignore[no-any-return]
    if bias is None and (by := _by_quack(activation, x, up, down)) is not None:
        y, scores = by.activated_product(x, up, activation)
    else:
        y, scores = activated_product(x, up, bias, activation, _keeps_scores(activation))
    return product(y, down.T), y, scores if _keeps_scores(activation) else y.new_empty(0)


def _by_quack(activation: str, *operands: Tensor) -> ModuleType | None:
    """quack-kernels' products, where they have this activation and take these matrices."""
    return quack(operands[0].device) if activation in ("relu2", "gelu-tanh") and takes(*operands) else None


@_mlp.register_fake
def _mlp_shapes(x: Tensor, up: Tensor, bias: Tensor | None, down: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    inner = x.new_empty(len(x), len(up))
    return x.new_empty(len(x), len(down)), inner, inner.new_empty(inner.shape if _keeps_scores(activation) else 0)


# The gradient of the outer weights is a part of it: the compiler would cast dy for that product and once more for this operation.
@torch.library.custom_op("ingot::mlp_backward", mutates_args=())
def _mlp_backward(
    dy: Tensor, up: Tensor, down: Tensor, y: Tensor, scores: Tensor, activation: str, biased: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x (M, C), of the scores (M, N), of a bias (N) in float32, where there is one, and of `down` (C, N)."""
    d_inner = (dy @ down).float()
    if activation == "relu2":
        d_scores = d_inner * 2 * y.float().sqrt()
    else:
        approximate = "tanh" if activation == "gelu-tanh" else "none"
        d_scores = torch.ops.aten.gelu_backward(d_inner, scores.float(), approximate=approximate)
    d_bias = d_scores.sum(0) if biased else d_scores.new_empty(0)
    d_scores = d_scores.to(dy.dtype)
    return d_scores @ up, d_scores, d_bias, dy.T @ y


@_mlp_backward.register_kernel("cuda")
def _mlp_backward_cuda(
    dy: Tensor, up: Tensor, down: Tensor, y: Tensor, scores: Tensor, activation: str, biased: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from ingot.model.kernels.triton_mlp import fits, sloped_product

    dy, down = dy.contiguous(), down.contiguous()
    kept = (scores if _keeps_scores(activation) else y).contiguous()
    if not fits(dy, down, kept):
        return _mlp_backward._init_fn(dy, up, down, y, scores, activation, biased)  # type: ignore[no-any-return]
    if not biased and (by := _by_quack(activation, dy, down, kept)) is not None:
        d_scores, d_bias = by.sloped_product(dy, down, kept, activation), dy.new_empty(0, dtype=torch.float32)
    else:
        d_scores, d_bias = sloped_product(dy, down, kept, activation, biased)
    return product(d_scores, up), d_scores, d_bias, dy.T @ y


@_mlp_backward.register_fake
def _mlp_backward_shapes(
    dy: Tensor, up: Tensor, down: Tensor, y: Tensor, scores: Tensor, activation: str, biased: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_bias = y.new_empty(y.size(1) if biased else 0, dtype=torch.float32)
    return dy.new_empty(len(dy), up.size(1)), y.new_empty(y.shape), d_bias, down.new_empty(down.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, up, bias, down, ctx.activation = inputs
    ctx.biased = bias is not None
    ctx.set_materialize_grads(False)  # only the first output has a gradient, and zeros in its place would be as large as it is
    ctx.save_for_backward(x, up, down, *output[1:])


def _gradients(ctx: Any, dy: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    x, *saved = ctx.saved_tensors
    dx, d_scores, d_bias, d_down = torch.ops.ingot.mlp_backward(dy, *saved, ctx.activation, ctx.biased)
    return dx, d_scores.T @ x, d_bias.to(dy.dtype) if ctx.biased else None, d_down, None


_mlp.register_autograd(_gradients, setup_context=_keep)
