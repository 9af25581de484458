"""Head, softcap and cross-entropy: the logits of a micro-batch exist once, in bf16, and their gradient takes their place.

The plain form reads the logits for the loss, reads them again for the gradient and writes that beside them. Here one kernel reads
a row, gives its loss and overwrites it; the products before and after it are the library's. The gradient waits, unscaled, for the
backward pass, as in chunks (chunked_loss.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ingot.model.kernels.products import product, product_format
from ingot.model.layers import IGNORED
from ingot.model.loss import loss_and_grad


def fused_loss(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
    """Summed loss of (N) targets, given (N, C) hidden states and a head (V, C), which may be kept in a wider format."""
    return torch.ops.ingot.head_loss(hidden.to(product_format(hidden)), weight, targets, softcap, torch.is_grad_enabled())[0]


@torch.library.custom_op("ingot::head_loss", mutates_args=())
def _head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, with_grad: bool) -> tuple[Tensor, Tensor]:
    """The summed loss and its gradient for the logits (N, V); none of it where it is not wanted."""
    loss, grad = loss_and_grad(hidden, weight.to(hidden.dtype), targets, softcap)
    return loss, grad.masked_fill_((targets == IGNORED)[:, None], 0.0) if with_grad else grad.new_empty(0)


@_head_loss.register_kernel("cuda")
def _head_loss_cuda(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, with_grad: bool
) -> tuple[Tensor, Tensor]:
    from ingot.model.kernels.triton_loss import losses_of_logits_

    logits = product(hidden, weight.to(hidden.dtype).T)
    loss = losses_of_logits_(logits, targets, softcap, with_grad).sum()
    return loss, logits if with_grad else logits.new_empty(0)


@_head_loss.register_fake
def _head_loss_shapes(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, with_grad: bool
) -> tuple[Tensor, Tensor]:
    return hidden.new_empty((), dtype=torch.float32), hidden.new_empty((len(hidden), len(weight)) if with_grad else 0)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, weight, *_ = inputs
    ctx.set_materialize_grads(False)  # the second output has no gradient, and zeros in its place would be as large as it is
    ctx.save_for_backward(hidden, weight, output[1])


def _gradients(ctx: Any, scale: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    hidden, weight, grad = ctx.saved_tensors
    d_hidden = (grad @ weight.to(grad.dtype)) * scale
    d_weight = (grad.T @ hidden).to(weight.dtype) * scale  # scaled after it is widened: not rounded twice
    return d_hidden.to(hidden.dtype), d_weight.to(weight.dtype), None, None, None


_head_loss.register_autograd(_gradients, setup_context=_keep)
