"""Logits and cross-entropy in plain torch, shared by all implementations of the loss (loss.py)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -1  # a target with this value is not predicted and contributes neither loss nor gradient


def head_logits(hidden: Tensor, weight: Tensor, softcap: float | None = None) -> Tensor:
    """Return the logits (..., V) of hidden states (..., C); `softcap`, if given, limits them to (-softcap, softcap) with tanh."""
    logits = F.linear(hidden, weight.to(hidden.dtype))
    return logits if softcap is None else softcap * torch.tanh(logits.float() / softcap)


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the summed loss of (N) targets, given their logits (N, V)."""
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")


def loss_and_grad(h: Tensor, w: Tensor, y: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Return the summed loss of (n) targets and its gradient w.r.t. h @ w.T (n, V), not zeroed for ignored targets."""
    logits = head_logits(h, w, softcap).float()
    log_p = logits.log_softmax(-1)
    index = y.clamp(min=0)[:, None]
    hit = log_p.gather(1, index)  # (n, 1)
    loss = -hit.masked_fill((y == IGNORED)[:, None], 0.0).sum()
    # The gradient is p, minus 1 at the target. expm1(log p) is p - 1 without the rounding of p, which loses accuracy near p = 1.
    grad, grad_hit = log_p.exp_(), hit.expm1()
    if softcap is not None:
        slope = 1 - (logits / softcap).square()
        grad, grad_hit = grad * slope, grad_hit * slope.gather(1, index)
    return loss, grad.to(h.dtype).scatter_(1, index, grad_hit.to(h.dtype))
