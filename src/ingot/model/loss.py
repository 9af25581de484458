"""From hidden states to the loss: with the logits of the whole batch, in chunks, as a CPU likes it, or by a kernel of ours."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ingot.model.kernels.products import product_format
from ingot.model.layers import IGNORED

# Scores of every next token, and the loss of those that are all held at once.


def head_logits(hidden: Tensor, weight: Tensor, softcap: float | None = None) -> Tensor:
    """Scores of every next token (..., V); a softcap bends them into plus or minus itself."""
    logits = F.linear(hidden, weight.to(hidden.dtype))
    return logits if softcap is None else softcap * torch.tanh(logits.float() / softcap)


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of (N) targets, given their logits (N, V)."""
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")


# Head and loss on a CPU together with their gradients, for some tokens at a time.

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
        loss = chunked_loss(hidden, weight, targets, softcap, chunk, torch.compiler.is_compiling())
    return loss / (targets != IGNORED).sum().clamp(min=1)


# The loss without the logits of the whole batch: chunk by chunk, each with its gradients.


# Not traced into a compiled model: unrolled, the chunks would live side by side, and torch 2.11 computes wrong gradients of them.
@torch.compiler.disable
def chunked_loss(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, chunk: int, compiled: bool) -> Tensor:
    """Summed loss of (N) targets given (N, C) hidden states; in a model that is `compiled`, the chunks are too."""
    if not torch.is_grad_enabled():
        parts = [summed_loss(head_logits(hidden[part], weight, softcap), targets[part]) for part in _parts(targets, chunk)]
        return torch.stack(parts).sum()
    grad_of = _compiled_grad() if compiled else loss_and_grad
    return _ChunkedLoss.apply(hidden, weight, targets, softcap, chunk, product_format(hidden), grad_of)  # type: ignore[no-untyped-call]


def _parts(targets: Tensor, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, len(targets), chunk)]


class _ChunkedLoss(torch.autograd.Function):
    """The summed loss. Its gradients are made along with it and wait, unscaled, for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        softcap: float | None,
        chunk: int,
        dtype: torch.dtype,
        grad_of: Callable[..., tuple[Tensor, Tensor]],
    ) -> Tensor:
        w = weight.to(dtype)
        loss = hidden.new_zeros((), dtype=torch.float32)
        d_hidden = torch.empty_like(hidden, dtype=dtype)
        d_weight = torch.zeros_like(weight, dtype=torch.float32)
        for part in _parts(targets, chunk):
            ignored = (targets[part] == IGNORED)[:, None]
            h = hidden[part].to(dtype).masked_fill(ignored, 0.0)
            more, grad = grad_of(h, w, targets[part], softcap)
            loss += more
            d_hidden[part] = (grad @ w).masked_fill_(ignored, 0.0)
            _add_product(d_weight, grad.T, h)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> Any:
        d_hidden, d_weight = ctx.saved_tensors
        of_hidden, of_weight = ctx.dtypes
        return d_hidden.to(of_hidden) * scale, (d_weight * scale).to(of_weight), None, None, None, None, None


def loss_and_grad(h: Tensor, w: Tensor, y: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Summed loss of a chunk of tokens, and its gradient for h @ w.T (n, V), in which rows of ignored targets mean nothing."""
    logits = head_logits(h, w, softcap).float()
    log_p = logits.log_softmax(-1)
    place = y.clamp(min=0)[:, None]
    hit = log_p.gather(1, place)  # (n, 1)
    loss = -hit.masked_fill((y == IGNORED)[:, None], 0.0).sum()
    grad, grad_hit = log_p.exp_(), hit.expm1()  # p, but p - 1 at the target: taken before rounding, near 1 it is all there is
    if softcap is not None:
        bend = 1 - (logits / softcap).square()
        grad, grad_hit = grad * bend, grad_hit * bend.gather(1, place)
    return loss, grad.to(h.dtype).scatter_(1, place, grad_hit.to(h.dtype))


@functools.cache
def _compiled_grad() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(loss_and_grad, dynamic=False)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b. GPUs give bf16 and fp16 products in float32: no sum over a chunk's tokens overflows or is rounded twice."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    else:
        total += torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a @ b
