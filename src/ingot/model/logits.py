"""Scores of every next token, and the loss of those that are all held at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.model.layers import IGNORED


def head_logits(hidden: Tensor, weight: Tensor, softcap: float | None = None) -> Tensor:
    """Scores of every next token (..., V); a softcap bends them into plus or minus itself."""
    logits = F.linear(hidden, weight.to(hidden.dtype))
    return logits if softcap is None else softcap * torch.tanh(logits.float() / softcap)


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of (N) targets, given their logits (N, V)."""
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
