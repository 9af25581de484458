"""Head, softcap and cross-entropy with the head's three products in 8 bits: twice as fast as in bf16, and coarser.

Hidden states and weights have 3 bits after the point (e4m3), the gradient of the logits 2 and a wider range (e5m2); all sums are
float32. Scales are fixed powers of two, so nothing has to be looked for before a product, and what lies outside is cut off. The
kernel of the loss writes the gradient in 8 bits beside the logits, which are gone before the backward pass. The parameter stays
what it is: only the products see it rounded, and the gradient is that of the rounded product, as if rounding had a slope of 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ingot.model.kernels.products import product_format
from ingot.model.layers import IGNORED
from ingot.model.loss import loss_and_grad

NARROW, WIDE = torch.float8_e4m3fn, torch.float8_e5m2
HIDDEN = 2.0**-3  # up to 56: after the last norm no number is above the root of the width, unless a gain makes it so
WEIGHT = 2.0**-5  # up to 14; below 0.0005 steps no longer shrink, and are 0.00006
GRADIENT = 2.0**-15  # of one token's unscaled loss, whose gradient is at most 1; down to 2e-9, steps below 5e-10


def fp8_loss(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    """Summed loss of (N) targets, given (N, C) hidden states and a head (V, C)."""
    return torch.ops.ingot.fp8_head_loss(hidden.to(product_format(hidden)), weight, targets, softcap)[0]


def _rounded(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-largest, largest).to(dtype)


def _bytes(x: Tensor) -> Tensor:
    """8-bit numbers as they are handed on: what is not a number to autograd gets no gradient."""
    return x.view(torch.uint8)


@torch.library.custom_op("ingot::fp8_head_loss", mutates_args=())
def _fp8_head_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The summed loss; its gradient for the logits (N, V), hidden states (C, N) and weights (C, V), in 8 bits."""
    h, w = _rounded(hidden, HIDDEN, NARROW), _rounded(weight, WEIGHT, NARROW)
    loss, grad = loss_and_grad(h.float() * HIDDEN, w.float() * WEIGHT, targets, softcap)
    grad = _rounded(grad.masked_fill_((targets == IGNORED)[:, None], 0.0), GRADIENT, WIDE)
    return loss, _bytes(grad), _bytes(h.T.contiguous()), _bytes(w.T.contiguous())


@_fp8_head_loss.register_kernel("cuda")
def _fp8_head_loss_cuda(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from ingot.model.kernels.triton_fp8 import rounded
    from ingot.model.kernels.triton_loss import losses_of_logits_

    (h, h_turned), (w, w_turned) = rounded(hidden, HIDDEN, NARROW), rounded(weight, WEIGHT, NARROW)
    logits = _product(h, w, hidden.new_full((), HIDDEN * WEIGHT, dtype=torch.float32), hidden.dtype, fast=True)
    grad = torch.empty_like(logits, dtype=WIDE)
    loss = losses_of_logits_(logits, targets, softcap, True, into=grad, factor=1 / GRADIENT).sum()
    return loss, _bytes(grad), _bytes(h_turned), _bytes(w_turned)


@_fp8_head_loss.register_fake
def _fp8_head_loss_shapes(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (N, C), V = hidden.shape, len(weight)
    empty = [hidden.new_empty(shape, dtype=torch.uint8) for shape in ((N, V), (C, N), (C, V))]
    return hidden.new_empty((), dtype=torch.float32), empty[0], empty[1], empty[2]


@torch.library.custom_op("ingot::fp8_head_backward", mutates_args=())
def _fp8_head_backward(grad: Tensor, hidden: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gradients of hidden states (N, C), and of weights (V, C) in float32, times `scale`."""
    g, h, w = grad.view(WIDE).float(), hidden.view(NARROW).float(), weight.view(NARROW).float()
    d_hidden = (g @ w.T) * (scale.float() * (GRADIENT * WEIGHT))
    return d_hidden.to(dtype), (g.T @ h.T) * (scale.float() * (GRADIENT * HIDDEN))


@_fp8_head_backward.register_kernel("cuda")
def _fp8_head_backward_cuda(
    grad: Tensor, hidden: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    from ingot.model.kernels.triton_fp8 import transposed

    g, h, w = grad.view(WIDE), hidden.view(NARROW), weight.view(NARROW)
    d_hidden = _product(g, w, scale.float() * (GRADIENT * WEIGHT), dtype)
    return d_hidden, _product(transposed(g), h, scale.float() * (GRADIENT * HIDDEN), torch.float32)


@_fp8_head_backward.register_fake
def _fp8_head_backward_shapes(
    grad: Tensor, hidden: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    (N, V), C = grad.shape, len(hidden)
    return grad.new_empty((N, C), dtype=dtype), grad.new_empty((V, C), dtype=torch.float32)


def _product(a: Tensor, b: Tensor, scale: Tensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """a (M, K) times b (N, K) transposed, times `scale`. `fast`: partial sums have fewer bits, as the logits' few may."""
    return torch._scaled_mm(a, b.T, scale, torch.ones_like(scale), out_dtype=dtype, use_fast_accum=fast)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.dtypes = inputs[0].dtype, inputs[1].dtype
    ctx.set_materialize_grads(False)  # bytes have no gradient, and zeros in its place would be as large as they are
    ctx.save_for_backward(*output[1:])


def _gradients(ctx: Any, scale: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    of_hidden, of_weight = ctx.dtypes
    d_hidden, d_weight = torch.ops.ingot.fp8_head_backward(*ctx.saved_tensors, scale, of_hidden)
    return d_hidden, d_weight.to(of_weight), None, None


_fp8_head_loss.register_autograd(_gradients, setup_context=_keep)
