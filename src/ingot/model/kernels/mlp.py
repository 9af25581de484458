"""Two layers with an activation between them: it is a part of the product before it, its slope of the product back.

The compiler reads what the first product wrote to activate it, and in the backward pass reads it again with the gradient that the
second product wrote: five passes over the widest tensor of a layer. Here tiles are activated before they are written. The squared
ReLU leaves only its own output, whose root is the slope; GELU has no such way back, so its scores are kept, as the compiler keeps
them, and activated again while their gradient is made. The other products are the library's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu2": lambda x: F.relu(x).square(),
    "gelu-tanh": partial(F.gelu, approximate="tanh"),
    "gelu-erf": F.gelu,
}


def fused_mlp(x: Tensor, up: Tensor, bias: Tensor | None, down: Tensor, activation: str) -> Tensor:
    """What two layers, (N, C) with a bias (N) and (C, N), make of (B, T, C), with an activation of those above between them."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    bias = None if bias is None else bias.to(dtype)
    y = torch.ops.ingot.mlp(x.flatten(0, -2).to(dtype), up.to(dtype), bias, down.to(dtype), activation)[0]
    return y.view(*x.shape[:-1], len(down))


def _keeps_scores(activation: str) -> bool:
    return activation != "relu2"


@torch.library.custom_op("ingot::mlp", mutates_args=())
def _mlp(x: Tensor, up: Tensor, bias: Tensor | None, down: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """(M, C) of (M, C), and the inner (M, N) that the backward pass needs: scores, or for the squared ReLU activations."""
    scores = F.linear(x, up, bias)
    y = ACTIVATIONS[activation](scores.float()).to(x.dtype)
    return y @ down.T, scores if _keeps_scores(activation) else y


@_mlp.register_kernel("cuda")
def _mlp_cuda(x: Tensor, up: Tensor, bias: Tensor | None, down: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    from ingot.model.kernels.triton_mlp import activated_product, fits

    x, up = x.contiguous(), up.contiguous()
    if not fits(x, up, down):
        return _mlp._init_fn(x, up, bias, down, activation)  # type: ignore[no-any-return]
    y, kept = activated_product(x, up, bias, activation, _keeps_scores(activation))
    return y @ down.T, kept


@_mlp.register_fake
def _mlp_shapes(x: Tensor, up: Tensor, bias: Tensor | None, down: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x), len(down)), x.new_empty(len(x), len(up))


@torch.library.custom_op("ingot::mlp_backward", mutates_args=())
def _mlp_backward(dy: Tensor, down: Tensor, kept: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The gradient (M, N) of the scores, and their activation where it is not what was kept."""
    d_inner = (dy @ down).float()
    if activation == "relu2":
        return (d_inner * 2 * kept.float().sqrt()).to(dy.dtype), kept.new_empty(0)
    scores, approximate = kept.float(), "tanh" if activation == "gelu-tanh" else "none"
    d_scores = torch.ops.aten.gelu_backward(d_inner, scores, approximate=approximate)
    return d_scores.to(dy.dtype), ACTIVATIONS[activation](scores).to(dy.dtype)


@_mlp_backward.register_kernel("cuda")
def _mlp_backward_cuda(dy: Tensor, down: Tensor, kept: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    from ingot.model.kernels.triton_mlp import fits, sloped_product

    dy, down, kept = dy.contiguous(), down.contiguous(), kept.contiguous()
    if not fits(dy, down, kept):
        return _mlp_backward._init_fn(dy, down, kept, activation)  # type: ignore[no-any-return]
    d_scores, y = sloped_product(dy, down, kept, activation, _keeps_scores(activation))
    return d_scores, y if _keeps_scores(activation) else kept.new_empty(0)


@_mlp_backward.register_fake
def _mlp_backward_shapes(dy: Tensor, down: Tensor, kept: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    return kept.new_empty(kept.shape), kept.new_empty(kept.shape if _keeps_scores(activation) else 0)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, up, bias, down, ctx.activation = inputs
    ctx.biased = bias is not None
    ctx.set_materialize_grads(False)  # the second output has no gradient, and zeros in its place would be as large as it is
    ctx.save_for_backward(x, up, down, output[1])


def _gradients(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    x, up, down, kept = ctx.saved_tensors
    d_scores, y = torch.ops.ingot.mlp_backward(dy, down, kept, ctx.activation)
    d_down = dy.T @ (y if _keeps_scores(ctx.activation) else kept)
    return d_scores @ up, d_scores.T @ x, d_scores.sum(0) if ctx.biased else None, d_down, None


_mlp.register_autograd(_gradients, setup_context=_keep)
