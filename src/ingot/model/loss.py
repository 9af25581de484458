"""From hidden states to the loss: with the logits of the whole batch, in chunks, as a CPU likes it, or by a kernel of ours."""

from __future__ import annotations

import torch
from torch import Tensor

from ingot.model.host_loss import host_loss
from ingot.model.layers import IGNORED
from ingot.model.logits import head_logits as head_logits
from ingot.model.logits import summed_loss


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    softcap: float | None = None,
    chunk: int | None = None,
    fused: bool = False,
    fp8: bool = False,
) -> Tensor:
    """Mean loss of (..., T) targets given hidden states (..., T, C), `chunk` tokens at a time; 0 where no target counts.

    `fused`: by our kernel, which needs a GPU, for all tokens at once. `fp8`: the same with products of 8 bits, where gradients
    are wanted.
    """
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    if fp8 and torch.is_grad_enabled():
        from ingot.model.kernels.fp8_loss import fp8_loss  # here, as below: torch's compiler comes with it, seconds of imports

        loss = fp8_loss(hidden, weight, targets, softcap)
    elif fused and chunk is None:
        from ingot.model.kernels.loss import fused_loss

        loss = fused_loss(hidden, weight, targets, softcap)
    elif chunk is None:
        together = host_loss(hidden, weight, targets, softcap)
        loss = summed_loss(head_logits(hidden, weight, softcap), targets) if together is None else together
    else:
        from ingot.model.chunked_loss import chunked_loss

        loss = chunked_loss(hidden, weight, targets, softcap, chunk, torch.compiler.is_compiling())
    return loss / (targets != IGNORED).sum().clamp(min=1)
