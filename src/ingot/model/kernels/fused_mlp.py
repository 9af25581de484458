"""MLPs with the activation fused into the first matmul, and its derivative into a backward matmul; not fused on CPUs.

`fused_mlp` is down(act(up(x))). Unfused, even in a compiled model, the activation reads the result of the first matmul, and the
backward pass reads it again with the gradient from the second matmul: five passes over the widest tensors of a layer. Here the
activation is applied to tiles before they are written. For squared ReLU, only the output is saved, because its root gives the
derivative. GELU is not invertible, so the pre-activations are saved, too. The matmuls use quack-kernels if possible; otherwise,
for example if there is a bias, they use our Triton kernels.

`fused_gated_mlp` is down(up(x) * silu(gate(x))), with the rows of `up` and `gate` interleaved in one matrix: a value and its gate
are adjacent in a tile, and the backward pass needs one matmul for both. This requires quack-kernels and a Hopper GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.model.kernels.matmul import matmul, matmul_dtype, quack_kernels, quack_takes

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu2": lambda x: F.relu(x).square(),
    "gelu-tanh": partial(F.gelu, approximate="tanh"),
    "gelu-erf": F.gelu,
}


def fused_mlp(x: Tensor, up: Tensor, bias: Tensor | None, down: Tensor, activation: str) -> Tensor:
    """Return down(act(up(x))) for x (..., C), up (N, C), its optional bias (N), down (C, N) and an activation in ACTIVATIONS."""
    dtype = matmul_dtype(x)
    bias = None if bias is None else bias.to(dtype)
    y = torch.ops.ingot.mlp(x.flatten(0, -2).to(dtype), up.to(dtype), bias, down.to(dtype), activation)[0]
    return y.view(*x.shape[:-1], len(down))


def _keeps_scores(activation: str) -> bool:
    return activation != "relu2"


@torch.library.custom_op("ingot::mlp", mutates_args=())
def _mlp(x: Tensor, up: Tensor, bias: Tensor | None, down: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output (M, C), the activations (M, N) and the pre-activations (M, N), which are empty for squared ReLU."""
    if x.is_cuda:
        from ingot.model.kernels.triton_mlp import activated_matmul, fits

        x, up = x.contiguous(), up.contiguous()
        if fits(x, up, down):
            if bias is None and (quack := _quack_for(activation, x, up, down)) is not None:
                y, scores = quack.activated_matmul(x, up, activation)
            else:
                y, scores = activated_matmul(x, up, bias, activation, _keeps_scores(activation))
            return matmul(y, down.T), y, scores if _keeps_scores(activation) else y.new_empty(0)
    scores = F.linear(x, up, bias)
    y = ACTIVATIONS[activation](scores.float()).to(x.dtype)
    return y @ down.T, y, scores if _keeps_scores(activation) else y.new_empty(0)


def _quack_for(activation: str, *operands: Tensor) -> ModuleType | None:
    """Return our module quack_matmul if quack-kernels supports this activation and these operands, else None."""
    return quack_kernels(operands[0].device) if activation in ("relu2", "gelu-tanh") and quack_takes(*operands) else None


@_mlp.register_fake
def _mlp_shapes(x: Tensor, up: Tensor, bias: Tensor | None, down: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    inner = x.new_empty(len(x), len(up))
    return x.new_empty(len(x), len(down)), inner, inner.new_empty(inner.shape if _keeps_scores(activation) else 0)


# The gradient of `down` is also computed here, because the compiler would cast dy a second time for a separate matmul.
@torch.library.custom_op("ingot::mlp_backward", mutates_args=())
def _mlp_grads(
    dy: Tensor, up: Tensor, down: Tensor, y: Tensor, scores: Tensor, activation: str, biased: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x (M, C), the pre-activations (M, N), the bias (N or empty, in float32) and `down` (C, N)."""
    if dy.is_cuda:
        from ingot.model.kernels.triton_mlp import fits, sloped_matmul

        dy, down = dy.contiguous(), down.contiguous()
        saved = (scores if _keeps_scores(activation) else y).contiguous()
        if fits(dy, down, saved):
            if not biased and (quack := _quack_for(activation, dy, down, saved)) is not None:
                d_scores, d_bias = quack.sloped_matmul(dy, down, saved, activation), dy.new_empty(0, dtype=torch.float32)
            else:
                d_scores, d_bias = sloped_matmul(dy, down, saved, activation, biased)
            return matmul(d_scores, up), d_scores, d_bias, dy.T @ y
    d_inner = (dy @ down).float()
    if activation == "relu2":
        d_scores = d_inner * 2 * y.float().sqrt()
    else:
        approximate = "tanh" if activation == "gelu-tanh" else "none"
        d_scores = torch.ops.aten.gelu_backward(d_inner, scores.float(), approximate=approximate)
    d_bias = d_scores.sum(0) if biased else d_scores.new_empty(0)
    d_scores = d_scores.to(dy.dtype)
    return d_scores @ up, d_scores, d_bias, dy.T @ y


@_mlp_grads.register_fake
def _mlp_grads_shapes(
    dy: Tensor, up: Tensor, down: Tensor, y: Tensor, scores: Tensor, activation: str, biased: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_bias = y.new_empty(y.size(1) if biased else 0, dtype=torch.float32)
    return dy.new_empty(len(dy), up.size(1)), y.new_empty(y.shape), d_bias, down.new_empty(down.shape)


def _save_mlp(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, up, bias, down, ctx.activation = inputs
    ctx.biased = bias is not None
    ctx.set_materialize_grads(False)  # only the first output has a gradient; allocate no zeros for the rest
    ctx.save_for_backward(x, up, down, *output[1:])


def _mlp_backward(ctx: Any, dy: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    x, *saved = ctx.saved_tensors
    dx, d_scores, d_bias, d_down = torch.ops.ingot.mlp_backward(dy, *saved, ctx.activation, ctx.biased)
    return dx, d_scores.T @ x, d_bias.to(dy.dtype) if ctx.biased else None, d_down, None


_mlp.register_autograd(_mlp_backward, setup_context=_save_mlp)


def fused_gated_mlp(x: Tensor, up: Tensor, gate: Tensor, down: Tensor) -> Tensor:
    """Return down(up(x) * silu(gate(x))) for x (..., C), up and gate (N, C), and down (C, N)."""
    dtype = matmul_dtype(x)
    both = torch.stack([gate.to(dtype), up.to(dtype)], dim=1).flatten(0, 1)  # (2 N, C), gate and up rows alternate
    y = torch.ops.ingot.gated_mlp(x.flatten(0, -2).to(dtype), both, down.to(dtype))[0]
    return y.view(*x.shape[:-1], len(down))


@torch.library.custom_op("ingot::gated_mlp", mutates_args=())
def _gated(x: Tensor, both: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output (M, C) and, for backward, the gated values (M, N) and the interleaved gate and up values (M, 2 N)."""
    if x.is_cuda:
        x, quack = x.contiguous(), _required_quack(x.device)
        if quack_takes(x, both, down):
            y, inner = quack.gated_matmul(x, both)
            return matmul(y, down.T), y, inner
    inner = x @ both.T
    gate, up = inner.float().view(len(inner), -1, 2).unbind(2)
    y = (up * F.silu(gate)).to(x.dtype)
    return y @ down.T, y, inner


def _required_quack(device: torch.device) -> ModuleType:
    quack = quack_kernels(device)
    if quack is None:
        raise RuntimeError("the fused gated MLP needs quack-kernels and a Hopper GPU")
    return quack


_gated.register_fake(lambda x, both, down: tuple(x.new_empty(len(x), width) for width in (len(down), len(both) // 2, len(both))))


# The gradient of `down` is also computed here, because the compiler would cast dy a second time for a separate matmul.
@torch.library.custom_op("ingot::gated_mlp_backward", mutates_args=())
def _gated_grads(dy: Tensor, both: Tensor, down: Tensor, y: Tensor, inner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x (M, C), of the interleaved gate and up values (M, 2 N), and of `down` (C, N)."""
    if dy.is_cuda:
        dy, down = dy.contiguous(), down.contiguous()
        if quack_takes(dy, down, inner):
            d_inner = _required_quack(dy.device).gated_slope(dy, down, inner)
            return matmul(d_inner, both), d_inner, dy.T @ y
    d_gated = (dy @ down).float()
    gate, up = inner.float().view(len(inner), -1, 2).unbind(2)
    share = gate.sigmoid()
    d_gate = d_gated * up * share * (1 + gate * (1 - share))
    d_inner = torch.stack([d_gate, d_gated * gate * share], dim=2).flatten(1).to(dy.dtype)
    return d_inner @ both, d_inner, dy.T @ y


_gated_grads.register_fake(
    lambda dy, both, down, y, inner: (
        dy.new_empty(len(dy), both.size(1)), inner.new_empty(inner.shape), down.new_empty(down.shape)
    )
)  # fmt: skip


def _save_gated(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # only the first output has a gradient
    ctx.save_for_backward(*inputs, *output[1:])


def _gated_backward(ctx: Any, dy: Tensor, *_: Tensor | None) -> tuple[Tensor, ...]:
    x, *saved = ctx.saved_tensors
    dx, d_inner, d_down = torch.ops.ingot.gated_mlp_backward(dy, *saved)
    return dx, d_inner.T @ x, d_down


_gated.register_autograd(_gated_backward, setup_context=_save_gated)
