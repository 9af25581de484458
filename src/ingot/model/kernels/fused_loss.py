"""Output head, softcap and cross-entropy as one operation, in bf16 or with FP8 matmuls.

`fused_loss`: the logits of a micro-batch are stored once, in bf16, and overwritten with their gradient. Without fusion, they are
read once for the loss and again for the gradient, which is a second tensor. Here one kernel reads a row, returns its loss and
overwrites the row. The gradient is saved for the backward pass, which only scales it.

`fp8_loss`: the head's three matmuls in FP8 are twice as fast as in bf16, but less precise. Hidden states and weights have
3 mantissa bits (e4m3), the gradient of the logits has 2 and a wider range (e5m2); accumulation is in float32. Scales are fixed
powers of two, so that no maximum has to be computed before a matmul; values out of range saturate. The loss kernel writes the
FP8 gradient to a second tensor, and the logits are freed before the backward pass. The weight parameter keeps its dtype: only
the matmuls see rounded values, and gradients are computed as if nothing were rounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ingot.model.cross_entropy import IGNORED, loss_and_grad
from ingot.model.kernels.matmul import matmul, matmul_dtype

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HIDDEN_SCALE = 2.0**-3  # FP8 covers values up to 56; after the last norm, hidden states are at most sqrt(width) times the gain
WEIGHT_SCALE = 2.0**-5  # FP8 covers weights up to 14; below 0.0005 they are subnormal, in steps of 0.00006
GRAD_SCALE = 2.0**-15  # gradients of the summed loss are at most 1; below 2e-9 they are subnormal, in steps of 5e-10


def fused_loss(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    """Return the summed loss of (N) targets from (N, C) hidden states and a head (V, C), which may be in float32."""
    return torch.ops.ingot.head_loss(hidden.to(matmul_dtype(hidden)), weight, targets, softcap, torch.is_grad_enabled())[0]


@torch.library.custom_op("ingot::head_loss", mutates_args=())
def _head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, with_grad: bool) -> tuple[Tensor, Tensor]:
    """Return the summed loss and its gradient with respect to the logits (N, V), an empty tensor unless `with_grad`."""
    if hidden.is_cuda:
        from ingot.model.kernels.triton_loss import losses_of_logits_

        logits = matmul(hidden, weight.to(hidden.dtype).T)
        loss = losses_of_logits_(logits, targets, softcap, with_grad).sum()
        return loss, logits if with_grad else logits.new_empty(0)
    loss, grad = loss_and_grad(hidden, weight.to(hidden.dtype), targets, softcap)
    return loss, grad.masked_fill_((targets == IGNORED)[:, None], 0.0) if with_grad else grad.new_empty(0)


_head_loss.register_fake(
    lambda hidden, weight, targets, softcap, with_grad: (
        hidden.new_empty((), dtype=torch.float32), hidden.new_empty((len(hidden), len(weight)) if with_grad else 0)
    )
)  # fmt: skip


def _save_head_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, weight, *_ = inputs
    ctx.set_materialize_grads(False)  # else autograd would allocate a zero gradient for the second output
    ctx.save_for_backward(hidden, weight, output[1])


def _head_loss_backward(ctx: Any, scale: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    hidden, weight, grad = ctx.saved_tensors
    d_hidden = (grad @ weight.to(grad.dtype)) * scale
    d_weight = (grad.T @ hidden).to(weight.dtype) * scale  # scaled after the cast, so that it is rounded only once
    return d_hidden.to(hidden.dtype), d_weight.to(weight.dtype), None, None, None


_head_loss.register_autograd(_head_loss_backward, setup_context=_save_head_loss)


def fp8_loss(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    """Return the summed loss of (N) targets from (N, C) hidden states and a head (V, C), with FP8 matmuls."""
    return torch.ops.ingot.fp8_head_loss(hidden.to(matmul_dtype(hidden)), weight, targets, softcap)[0]


def _rounded(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


def _bytes(x: Tensor) -> Tensor:
    """View an FP8 tensor as bytes, because autograd does not expect a gradient for integers."""
    return x.view(torch.uint8)


@torch.library.custom_op("ingot::fp8_head_loss", mutates_args=())
def _fp8_head_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the summed loss and, as FP8 bytes, the gradient of the logits (N, V) and the transposed `hidden` and `weight`."""
    h, w = _rounded(hidden, HIDDEN_SCALE, E4M3), _rounded(weight, WEIGHT_SCALE, E4M3)
    loss, grad = loss_and_grad(h.float() * HIDDEN_SCALE, w.float() * WEIGHT_SCALE, targets, softcap)
    grad = _rounded(grad.masked_fill_((targets == IGNORED)[:, None], 0.0), GRAD_SCALE, E5M2)
    return loss, _bytes(grad), _bytes(h.T.contiguous()), _bytes(w.T.contiguous())


@_fp8_head_loss.register_kernel("cuda")
def _fp8_head_loss_cuda(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from ingot.model.kernels.triton_loss import losses_of_logits_, rounded

    (h, h_transposed), (w, w_transposed) = rounded(hidden, HIDDEN_SCALE, E4M3), rounded(weight, WEIGHT_SCALE, E4M3)
    logits = _fp8_matmul(h, w, hidden.new_full((), HIDDEN_SCALE * WEIGHT_SCALE, dtype=torch.float32), hidden.dtype, fast=True)
    grad = torch.empty_like(logits, dtype=E5M2)
    loss = losses_of_logits_(logits, targets, softcap, True, into=grad, factor=1 / GRAD_SCALE).sum()
    return loss, _bytes(grad), _bytes(h_transposed), _bytes(w_transposed)


@_fp8_head_loss.register_fake
def _(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> tuple[Tensor, ...]:
    (N, C), V = hidden.shape, len(weight)
    return hidden.new_empty((), dtype=torch.float32), *(hidden.new_empty(s, dtype=torch.uint8) for s in ((N, V), (C, N), (C, V)))


@torch.library.custom_op("ingot::fp8_head_backward", mutates_args=())
def _fp8_head_grads(grad: Tensor, hidden: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the gradients of hidden states (N, C) and, in float32, of weights (V, C), both multiplied by `scale`."""
    g, h, w = grad.view(E5M2).float(), hidden.view(E4M3).float(), weight.view(E4M3).float()
    d_hidden = (g @ w.T) * (scale.float() * (GRAD_SCALE * WEIGHT_SCALE))
    return d_hidden.to(dtype), (g.T @ h.T) * (scale.float() * (GRAD_SCALE * HIDDEN_SCALE))


@_fp8_head_grads.register_kernel("cuda")
def _fp8_head_grads_cuda(
    grad: Tensor, hidden: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    from ingot.model.kernels.triton_loss import transposed

    g, h, w = grad.view(E5M2), hidden.view(E4M3), weight.view(E4M3)
    d_hidden = _fp8_matmul(g, w, scale.float() * (GRAD_SCALE * WEIGHT_SCALE), dtype)
    return d_hidden, _fp8_matmul(transposed(g), h, scale.float() * (GRAD_SCALE * HIDDEN_SCALE), torch.float32)


_fp8_head_grads.register_fake(
    lambda grad, hidden, weight, scale, dtype: (
        grad.new_empty((len(grad), len(hidden)), dtype=dtype), grad.new_empty((grad.size(1), len(hidden)), dtype=torch.float32)
    )
)  # fmt: skip


def _fp8_matmul(a: Tensor, b: Tensor, scale: Tensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Return `scale` * a (M, K) @ b (N, K).T for FP8 operands; `fast` accumulates less precisely, which is enough for logits."""
    return torch._scaled_mm(a, b.T, scale, torch.ones_like(scale), out_dtype=dtype, use_fast_accum=fast)


def _save_fp8_head_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.dtypes = inputs[0].dtype, inputs[1].dtype
    ctx.set_materialize_grads(False)  # else autograd would allocate zero gradients for the byte tensors
    ctx.save_for_backward(*output[1:])


def _fp8_head_loss_backward(ctx: Any, scale: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    hidden_dtype, weight_dtype = ctx.dtypes
    d_hidden, d_weight = torch.ops.ingot.fp8_head_backward(*ctx.saved_tensors, scale, hidden_dtype)
    return d_hidden, d_weight.to(weight_dtype), None, None


_fp8_head_loss.register_autograd(_fp8_head_loss_backward, setup_context=_save_fp8_head_loss)
