"""The loss without the logits of the whole batch: chunk by chunk, each with its gradients.

Logits are the largest thing a small model makes: 64 rows of 1,024 tokens over 50,304 words are 13 GB in float32, and
their gradient as many. In chunks, a piece of them lives just long enough to give its loss and, in the same pass, its gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ingot.model.kernels.products import product_format
from ingot.model.layers import IGNORED
from ingot.model.logits import head_logits, summed_loss


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
