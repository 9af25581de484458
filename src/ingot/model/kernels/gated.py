"""A gated MLP, down(up(x) * silu(gate(x))), with the gate in the products around it and its two inner layers as one matrix.

The compiler reads what two products wrote to multiply them, and backward writes the gradient of the inner layer to read it again
with both. Here it never leaves a tile, where a number and the one that it gates lie side by side, as rows of the matrix do; and
both inner layers have one gradient, so the way back is one product for both. The tiles are quack-kernels', on Hopper.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.model.kernels.products import product, product_format, quack, takes


def fused_gated_mlp(x: Tensor, up: Tensor, gate: Tensor, down: Tensor) -> Tensor:
    """What three layers, twice (N, C) and (C, N), make of (B, T, C)."""
    dtype = product_format(x)
    both = torch.stack([gate.to(dtype), up.to(dtype)], dim=1).flatten(0, 1)  # (2 N, C), in turn
    y = torch.ops.ingot.gated_mlp(x.flatten(0, -2).to(dtype), both, down.to(dtype))[0]
    return y.view(*x.shape[:-1], len(down))


@torch.library.custom_op("ingot::gated_mlp", mutates_args=())
def _gated(x: Tensor, both: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(M, C) of (M, C), and what the backward pass needs: the gated (M, N), and what it is made of, in turn (M, 2 N)."""
    inner = x @ both.T
    gate, up = inner.float().view(len(inner), -1, 2).unbind(2)
    y = (up * F.silu(gate)).to(x.dtype)
    return y @ down.T, y, inner


@_gated.register_kernel("cuda")
def _gated_cuda(x: Tensor, both: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, by = x.contiguous(), _by_quack(x.device)
    if not takes(x, both, down):
        return _gated._init_fn(x, both, down)  # type: ignore[no-any-return]
    y, inner = by.gated_product(x, both)
    return product(y, down.T), y, inner


def _by_quack(device: torch.device) -> ModuleType:
    by = quack(device)
    if by is None:
        raise RuntimeError("the gate's products need quack-kernels and a Hopper GPU")
    return by


@_gated.register_fake
def _gated_shapes(x: Tensor, both: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(len(x), len(down)), x.new_empty(len(x), len(both) // 2), x.new_empty(len(x), len(both))


# The gradient of the outer weights is a part of it: the compiler would cast dy for that product and once more for this operation.
@torch.library.custom_op("ingot::gated_mlp_backward", mutates_args=())
def _gated_backward(dy: Tensor, both: Tensor, down: Tensor, y: Tensor, inner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x (M, C), of both inner layers, in turn (M, 2 N), and of `down` (C, N)."""
    d_gated = (dy @ down).float()
    gate, up = inner.float().view(len(inner), -1, 2).unbind(2)
    share = gate.sigmoid()
    d_gate = d_gated * up * share * (1 + gate * (1 - share))
    d_inner = torch.stack([d_gate, d_gated * gate * share], dim=2).flatten(1).to(dy.dtype)
    return d_inner @ both, d_inner, dy.T @ y


@_gated_backward.register_kernel("cuda")
def _gated_backward_cuda(dy: Tensor, both: Tensor, down: Tensor, y: Tensor, inner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dy, down = dy.contiguous(), down.contiguous()
    if not takes(dy, down, inner):
        return _gated_backward._init_fn(dy, both, down, y, inner)  # type: ignore[no-any-return]
    d_inner = _by_quack(dy.device).gated_slope(dy, down, inner)
    return product(d_inner, both), d_inner, dy.T @ y


@_gated_backward.register_fake
def _gated_backward_shapes(dy: Tensor, both: Tensor, down: Tensor, y: Tensor, inner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return dy.new_empty(len(dy), both.size(1)), inner.new_empty(inner.shape), down.new_empty(down.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # only the first output has a gradient
    ctx.save_for_backward(*inputs, *output[1:])


def _gradients(ctx: Any, dy: Tensor, *_: Tensor | None) -> tuple[Tensor, ...]:
    x, *saved = ctx.saved_tensors
    dx, d_inner, d_down = torch.ops.ingot.gated_mlp_backward(dy, *saved)
    return dx, d_inner.T @ x, d_down


_gated.register_autograd(_gradients, setup_context=_keep)
