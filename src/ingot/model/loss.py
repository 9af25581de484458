"""The mean loss computed from hidden states, in five implementations.

| name    | used for                          | saves                                                               |
|---------|-----------------------------------|---------------------------------------------------------------------|
| plain   | all other cases                   | nothing: torch's cross-entropy                                      |
| host    | eager float32 training on a CPU   | memory traffic: gradients use logits that are still in the cache    |
| chunked | `training.loss_chunk`             | memory: logits of only `chunk` tokens at a time (chunked_loss.py)   |
| fused   | the kernel `loss` on a GPU        | time: one Triton kernel instead of several (kernels/fused_loss.py)  |
| fp8     | training with `training.fp8_head` | time: the head's matmuls run in fp8 (kernels/fused_loss.py)         |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ingot.model.cross_entropy import IGNORED, head_logits, summed_loss
from ingot.model.kernels.fused_loss import fp8_loss, fused_loss

HOST_LOGITS = 2**19  # logits per chunk on a CPU: 2 MiB in float32, about the size of a core's cache
HOST_TOKENS = 256  # minimum number of tokens per chunk on a CPU; with fewer, the weights would be read too often
LARGEST_LOSS = 80.0  # the probability of a target with a larger loss is rounded in float32, or 0


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    softcap: float | None = None,
    chunk: int | None = None,
    fused: bool = False,
    fp8: bool = False,
) -> Tensor:
    """Return the mean loss of (..., T) targets given hidden states (..., T, C) and a head (V, C); 0 if all targets are ignored.

    `chunk` is the number of tokens whose logits are in memory at once. `fp8` has no effect if gradients are disabled.
    """
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    if fp8 and torch.is_grad_enabled():
        loss = fp8_loss(hidden, weight, targets, softcap)
    elif fused and chunk is None:
        loss = fused_loss(hidden, weight, targets, softcap)
    elif chunk is not None:
        from ingot.model.chunked_loss import chunked_loss  # imports torch's compiler, which takes seconds

        loss = chunked_loss(hidden, weight, targets, softcap, chunk, torch.compiler.is_compiling())
    elif (host := host_loss(hidden, weight, targets, softcap)) is not None:
        loss = host
    else:
        loss = summed_loss(head_logits(hidden, weight, softcap), targets)
    return loss / (targets != IGNORED).sum().clamp(min=1)


def later_loss(
    loss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    later: Sequence[Tensor],
    shares: Sequence[float],
    softcap: float | None,
) -> Tensor:
    """Return the sum of the mean losses of `later` targets, weighted by `shares`, given the mean `loss` of the usual `targets`.

    The losses of two targets under the same logits differ only by the targets' logits, so only those logits are computed.
    """

    def logit(y: Tensor) -> Tensor:
        logits = (hidden.float() * F.embedding(y.clamp(min=0), weight)).sum(-1)
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    total, first = loss * sum(shares), logit(targets)
    for share, y in zip(shares, later, strict=True):
        counted = (targets != IGNORED) & (y != IGNORED)
        total = total + share * ((first - logit(y)) * counted).sum() / counted.sum().clamp(min=1)
    return total


def host_loss(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor | None:
    """Return the summed loss of (N) targets; the loss and its gradients are computed together, in chunks of tokens.

    Return None unless the model runs eagerly on a CPU in float32 and needs gradients.
    """
    if torch.compiler.is_compiling() or hidden.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return None
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    if not wanted or not hidden.dtype == weight.dtype == torch.float32:
        return None
    return _HostLoss.apply(hidden, weight, targets, softcap)  # type: ignore[no-untyped-call,no-any-return]


class _HostLoss(torch.autograd.Function):
    """The summed loss. The forward pass also computes the gradients and saves them for the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None) -> Tensor:
        tokens, vocabulary = len(targets), len(weight)
        parts = max(1, min(math.ceil(tokens * vocabulary / HOST_LOGITS), tokens // HOST_TOKENS))
        d_hidden, d_weight, losses = torch.empty_like(hidden), torch.zeros_like(weight), []
        for h, y, d in zip(hidden.chunk(parts), targets.chunk(parts), d_hidden.chunk(parts), strict=True):
            logits, ignored, index = head_logits(h, weight, softcap), y == IGNORED, y.clamp(min=0)[:, None]
            slope = None if softcap is None else 1 - (logits / softcap).square_()
            grad = torch.softmax(logits, -1, out=logits)  # in place, because memory traffic takes as long as the exponentials
            p = grad.gather(1, index)
            loss = p.log().neg_().masked_fill_(ignored[:, None], 0.0)
            losses.append(loss.sum() if loss.max() < LARGEST_LOSS else summed_loss(head_logits(h, weight, softcap), y))
            grad.scatter_(1, index, p - 1.0)
            if ignored.any():
                grad.masked_fill_(ignored[:, None], 0.0)
            if slope is not None:
                grad.mul_(slope)
            torch.mm(grad, weight, out=d)
            d_weight.addmm_(grad.T, h)
        ctx.save_for_backward(d_hidden, d_weight)
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * scale, d_weight * scale, None, None
