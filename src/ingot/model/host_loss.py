"""Head and loss on a CPU together with their gradients, for some tokens at a time.

There passes over the logits are what a loss takes. torch's cross-entropy makes logarithms of all probabilities and of these the
gradient, with an array of zeros on its way; here the softmax is the gradient already, but for the target's, and only the target's
logarithm is taken. As in chunks (chunked_loss.py) the gradients of hidden states and weights are made at once, while the logits
are still in the processor's cache, and it is they that the backward pass scales: they are smaller.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ingot.model.layers import IGNORED
from ingot.model.logits import head_logits

NUMBERS = 2**19  # logits that are held at once, 2 MiB, about what a core has a cache for
FEWEST = 512  # tokens at once: with fewer the weights are read too often


def host_loss(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor | None:
    """Summed loss of (N) targets given (N, C) hidden states and the head (V, C).

    None, for the plain way, unless gradients are wanted of float32 numbers on a CPU, by an eager model.
    """
    if torch.compiler.is_compiling() or hidden.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return None
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if not wanted or not hidden.dtype == weight.dtype == torch.float32:
        return None
    return _HostLoss.apply(hidden, weight, targets, softcap)  # type: ignore[no-untyped-call,no-any-return]


class _HostLoss(torch.autograd.Function):
    """The summed loss, whose gradients wait for the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
        tokens, words = len(targets), len(weight)
        parts = max(1, min(math.ceil(tokens * words / NUMBERS), tokens // FEWEST))
        d_hidden, d_weight, losses = torch.empty_like(hidden), torch.zeros_like(weight), []
        for h, y, d in zip(hidden.chunk(parts), targets.chunk(parts), d_hidden.chunk(parts), strict=True):
            loss, grad = loss_and_gradient(head_logits(h, weight, softcap), y, softcap)
            losses.append(loss)
            torch.mm(grad, weight, out=d)
            d_weight.addmm_(grad.T, h)
        ctx.save_for_backward(d_hidden, d_weight)
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * scale, d_weight * scale, None, None


def loss_and_gradient(logits: Tensor, targets: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Summed loss of (n) targets given their logits (n, V), and its gradient for the logits before the softcap."""
    ignored, place = targets == IGNORED, targets.clamp(min=0)[:, None]
    grad = logits.softmax(-1)
    # By way of the largest one: its probability is never so small that it has no logarithm.
    log_total = logits.amax(-1, keepdim=True) - grad.amax(-1, keepdim=True).log()
    losses = (log_total - logits.gather(1, place)).masked_fill_(ignored[:, None], 0.0)
    grad.scatter_(1, place, grad.gather(1, place) - 1.0)
    if ignored.any():
        grad.masked_fill_(ignored[:, None], 0.0)
    if softcap is not None:
        grad.mul_(1 - (logits / softcap).square_())
    return losses.sum(), grad
