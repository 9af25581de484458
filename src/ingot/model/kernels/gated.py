"""A gated MLP, down(up(x) * silu(gate(x))), with the gate in the products around it and its two inner layers as one matrix.

The compiler reads what two products wrote to multiply them, and backward writes the gradient of the inner layer to read it again
with both. Here it never leaves a tile; and both inner layers have one gradient, so the way back is one product for both.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def fused_gated_mlp(x: Tensor, up: Tensor, gate: Tensor, down: Tensor) -> Tensor:
    """What three layers, twice (N, C) and (C, N), make of (B, T, C)."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    both = torch.cat([up.to(dtype), gate.to(dtype)])
    y = torch.ops.ingot.gated_mlp(x.flatten(0, -2).to(dtype), both, down.to(dtype))[0]
    return y.view(*x.shape[:-1], len(down))


@torch.library.custom_op("ingot::gated_mlp", mutates_args=())
def _gated(x: Tensor, both: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(M, C) of (M, C), and what the backward pass needs: the gated (M, N), and what it is made of, side by side (M, 2 N)."""
    inner = x @ both.T
    up, gate = inner.float().chunk(2, dim=1)
    y = (up * F.silu(gate)).to(x.dtype)
    return y @ down.T, y, inner


@_gated.register_kernel("cuda")
def _gated_cuda(x: Tensor, both: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from ingot.model.kernels.triton_gated import fits_gated, gated_product

    x = x.contiguous()
    if not fits_gated(x, both, down):
        return _gated._init_fn(x, both, down)  # type: ignore[no-any-return]
    y, inner = gated_product(x, both)
    return y @ down.T, y, inner


@_gated.register_fake
def _gated_shapes(x: Tensor, both: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(len(x), len(down)), x.new_empty(len(x), len(both) // 2), x.new_empty(len(x), len(both))


# The gradient of the outer weights is a part of it: the compiler would cast dy for that product and once more for this operation.
@torch.library.custom_op("ingot::gated_mlp_backward", mutates_args=())
def _gated_backward(dy: Tensor, down: Tensor, y: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of both inner layers, side by side (M, 2 N), and of `down` (C, N)."""
    d_inner = (dy @ down).float()
    up, gate = inner.float().chunk(2, dim=1)
    share = gate.sigmoid()
    d_gate = d_inner * up * share * (1 + gate * (1 - share))
    return torch.cat([d_inner * gate * share, d_gate], dim=1).to(dy.dtype), dy.T @ y


@_gated_backward.register_kernel("cuda")
def _gated_backward_cuda(dy: Tensor, down: Tensor, y: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    from ingot.model.kernels.triton_gated import fits_gated, gated_slope

    dy, down = dy.contiguous(), down.contiguous()
    if not fits_gated(dy, inner.T, down):
        return _gated_backward._init_fn(dy, down, y, inner)  # type: ignore[no-any-return]
    return gated_slope(dy, down, inner), dy.T @ y


@_gated_backward.register_fake
def _gated_backward_shapes(dy: Tensor, down: Tensor, y: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    return inner.new_empty(inner.shape), down.new_empty(down.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # only the first output has a gradient
    ctx.save_for_backward(*inputs, *output[1:])


def _gradients(ctx: Any, dy: Tensor, *_: Tensor | None) -> tuple[Tensor, ...]:
    x, both, down, y, inner = ctx.saved_tensors
    d_inner, d_down = torch.ops.ingot.gated_mlp_backward(dy, down, y, inner)
    return d_inner @ both, d_inner.T @ x, d_down


_gated.register_autograd(_gradients, setup_context=_keep)
