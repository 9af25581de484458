"""Scores of every next token, and the loss of those that are all held at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ingot.model.layers import IGNORED


def head_logits(hidden: Tensor, weight: Tensor, softcap: float | None = None) -> Tensor:
    """Scores of every next token (..., V); a softcap bends them into plus or minus itself."""
    logits = F.linear(hidden, weight.to(hidden.dtype))
    return logits if softcap is None else softcap * torch.tanh(logits.float() / softcap)


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of (N) targets, given their logits (N, V)."""
    logits = logits.float()
    if logits.device.type == "cpu" and logits.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _LossWithGradient.apply(logits, targets)  # type: ignore[no-untyped-call,no-any-return]
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


class _LossWithGradient(torch.autograd.Function):
    """torch's cross-entropy in half of its time on a CPU, where passes over the logits are what it takes.

    torch makes logarithms of all probabilities, and of these the gradient with an array of zeros on its way. Here the softmax is
    the gradient already, but for the target's, and only the target's logarithm is taken.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ignored, place = targets == IGNORED, targets.clamp(min=0)[:, None]
        grad = logits.softmax(-1)
        # By way of the largest one: its probability is never so small that it has no logarithm.
        log_total = logits.amax(-1, keepdim=True) - grad.amax(-1, keepdim=True).log()
        losses = (log_total - logits.gather(1, place)).masked_fill_(ignored[:, None], 0.0)
        grad.scatter_(1, place, grad.gather(1, place) - 1.0)
        if ignored.any():
            grad.masked_fill_(ignored[:, None], 0.0)
        ctx.save_for_backward(grad)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None]:
        (grad,) = ctx.saved_tensors
        return grad * scale, None
