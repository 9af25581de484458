"""The loss and its gradients, computed in chunks, so that the logits of the whole batch are never in memory at once.

This module is imported only when it is needed, because `torch.compiler.disable` imports torch's compiler, which takes seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ingot.model.cross_entropy import IGNORED, head_logits, loss_and_grad, summed_loss
from ingot.model.kernels.matmul import matmul_dtype


# Excluded from the graph of a compiled model, which would keep all chunks in memory and, in torch 2.11, give wrong gradients.
@torch.compiler.disable
def chunked_loss(hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, chunk: int, compiled: bool) -> Tensor:
    """Return the summed loss of (N) targets and (N, C) hidden states; `chunk` is in tokens; if `compiled`, use torch.compile."""
    if not torch.is_grad_enabled():
        parts = zip(hidden.split(chunk), targets.split(chunk), strict=True)  # type: ignore[no-untyped-call]
        return torch.stack([summed_loss(head_logits(h, weight, softcap), y) for h, y in parts]).sum()
    return _ChunkedLoss.apply(hidden, weight, targets, softcap, chunk, compiled)  # type: ignore[no-untyped-call]


class _ChunkedLoss(torch.autograd.Function):
    """The summed loss. The forward pass also computes and saves the gradients; the backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, chunk: int, compiled: bool
    ) -> Tensor:
        grad_of, dtype = _compiled_grad() if compiled else loss_and_grad, matmul_dtype(hidden)
        w = weight.to(dtype)
        loss = hidden.new_zeros((), dtype=torch.float32)
        d_hidden = torch.empty_like(hidden, dtype=dtype)
        d_weight = torch.zeros_like(weight, dtype=torch.float32)
        parts = (t.split(chunk) for t in (hidden, targets, d_hidden))  # type: ignore[no-untyped-call]
        for x, y, d_x in zip(*parts, strict=True):
            ignored = (y == IGNORED)[:, None]
            h = x.to(dtype).masked_fill(ignored, 0.0)
            more, grad = grad_of(h, w, y, softcap)
            loss += more
            d_x.copy_((grad @ w).masked_fill_(ignored, 0.0))
            if grad.dtype == torch.float32:
                d_weight.addmm_(grad.T, h)
            else:  # float32 output on GPUs, so that sums over tokens cannot overflow and are rounded only once
                d_weight += torch.mm(grad.T, h, out_dtype=torch.float32) if grad.is_cuda else grad.T @ h
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> Any:
        d_hidden, d_weight = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        return d_hidden.to(hidden_dtype) * scale, (d_weight * scale).to(weight_dtype), None, None, None, None


@functools.cache
def _compiled_grad() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(loss_and_grad, dynamic=False)
