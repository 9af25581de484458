"""Muon: momentum whose update is replaced by the nearest semi-orthogonal matrix, for all matrices of one shape at once.

Orthogonalising one small matrix is a chain of products too small to fill a device. Matrices of one shape are stacked and
iterated together; the result is that of one by one. What is remembered of them stays stacked from step to step: the state of a
parameter is its part of the stack.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.config.schema import OptimizerSection
from ingot.optim.normuon import even_out
from ingot.optim.orthogonal import orthogonalise, polynomials
from ingot.optim.polar_express import Polynomial

Number = float | Tensor


def equal_rows(updates: Tensor) -> Tensor:
    """Every row of each (m, n) update at the same length, the length of the whole unchanged; a row of zeros stays one.

    A tall matrix has more rows than directions, and orthogonalising leaves some of them long and others short, so that some
    neurons learn many times faster than others. The rows of a wide one are nearly equal already.
    """
    rows = F.normalize(updates, dim=-1)
    whole = (-2, -1)
    return rows * (updates.norm(dim=whole, keepdim=True) / rows.norm(dim=whole, keepdim=True).clamp_min(1e-7))


class Options(NamedTuple):
    """What of a step stays the same from one to the next: the graph of a compiled one."""

    nesterov: bool
    dtype: torch.dtype  # of the orthogonalisation
    steps: tuple[Polynomial, ...]
    normalise_rows: bool
    beta2: float | None
    decays: bool
    cautious: bool


def update_matrices(
    params: Tensor,
    grads: Tensor,
    momentum_before: Tensor,
    squares_before: Tensor | None,
    lr: Number,
    momentum: Number,
    weight_decay: Number,
    skip: Tensor | None,
    o: Options,
) -> Tensor:
    """One step of matrices of one shape (P, m, n): the new ones. Their momentum and, of NorMuon, running squares change in place.

    Nothing changes where `skip` is one.
    """
    after = momentum_before * momentum + grads
    direction = grads + momentum * after if o.nesterov else after
    update, squares = orthogonalise(direction, o.steps, o.dtype), squares_before
    if o.normalise_rows:
        update = equal_rows(update)
    if o.beta2 is not None and squares_before is not None:
        update, squares = even_out(update, squares_before, o.beta2)
    # A tall matrix has more rows than directions: the factor gives every row the update it would have in a square one.
    update = update * (lr * math.sqrt(max(1.0, params.size(1) / params.size(2))))
    decay = lr * weight_decay
    if skip is not None:
        stays = skip.bool()
        update, after = torch.where(stays, 0.0, update), torch.where(stays, momentum_before, after)
        squares = None if squares is None or squares_before is None else torch.where(stays, squares_before, squares)
        decay = decay * (1.0 - skip)
    if o.decays:
        # Cautious: only what the update brings nearer to zero as well.
        params = params * (1.0 - decay * (params * update >= 0) if o.cautious else 1.0 - decay)
    momentum_before.copy_(after)
    if squares_before is not None and squares is not None:
        squares_before.copy_(squares)
    return params - update


class Muon(torch.optim.Optimizer):
    """Muon for matrices. Every parameter must have two dimensions; the rest belongs to AdamW.

    What a group does not have itself it takes from the settings. All of it may change between steps, as `lr` and `momentum` do.
    `compiled`: a step is a few kernels instead of dozens, each of which reads and writes all matrices.
    """

    def __init__(self, params: Iterable[Any], settings: OptimizerSection, compiled: bool = False):
        defaults = {
            "lr": settings.muon_learning_rate,
            "momentum": settings.muon_momentum,
            "nesterov": settings.muon_nesterov,
            "iterations": settings.muon_iterations,
            "weight_decay": settings.muon_weight_decay,
            "cautious": settings.muon_cautious,
            "beta2": settings.muon_beta2,
            "coefficients": settings.muon_coefficients,
            "normalise_rows": settings.muon_normalise_rows,
            "precision": settings.muon_precision,
        }
        super().__init__(params, defaults)
        self._compiled = compiled
        self._stacks: dict[tuple[str, int], tuple[Tensor, list[Tensor]]] = {}  # and their parts, by name and first parameter
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() != 2:
                    raise ValueError(f"Muon takes matrices; a parameter of shape {tuple(p.shape)} belongs to AdamW")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        # The backend may set `found_inf`, as it does for fused AdamW: where it is one nothing changes, and the host need not ask.
        skip: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for params in by_shape.values():
                self._update(params, group, skip)

    def _update(self, params: list[Tensor], group: dict[str, Any], skip: Tensor | None) -> None:
        rows, columns = params[0].shape
        # GPUs multiply bf16 many times faster and the iteration forgives it; CPUs gain nothing from it.
        half = group["precision"] == "bf16" or (group["precision"] == "auto" and params[0].is_cuda)
        options = Options(
            nesterov=group["nesterov"],
            dtype=torch.bfloat16 if half else torch.float32,
            steps=polynomials(group["coefficients"], group["iterations"]),
            normalise_rows=group["normalise_rows"],
            beta2=group["beta2"],
            decays=bool(group["weight_decay"]) or self._compiled,  # one graph, also where a schedule ends at 0
            cautious=group["cautious"],
        )
        grads = torch.stack([p.grad for p in params])  # type: ignore[misc]  # (P, m, n)
        momentum = self._memory(params, "momentum", (rows, columns))
        squares = None
        if options.beta2 is not None:
            squares = self._memory(params, "squares", (rows, 1) if rows >= columns else (1, columns))
        lr, beta, decay = group["lr"], group["momentum"], group["weight_decay"]
        if self._compiled:  # as tensors: other numbers would be another graph
            lr, beta, decay = (torch.full((), float(number), device=grads.device) for number in (lr, beta, decay))
        update = _compiled_update() if self._compiled else update_matrices
        new = update(torch.stack(params), grads, momentum, squares, lr, beta, decay, skip, options)
        torch._foreach_copy_(params, list(new.unbind(0)))

    def _memory(self, params: list[Tensor], name: str, shape: tuple[int, int]) -> Tensor:
        """What is remembered of every parameter under a name, (P, ...); zeros at first.

        The stack of the step before, unless a state was put back or other parameters have gradients.
        """
        stack, parts = self._stacks.get((name, id(params[0])), (None, []))
        kept = [self.state[p].get(name) for p in params]
        if stack is None or len(kept) != len(parts) or any(one is not part for one, part in zip(kept, parts, strict=True)):
            stack = torch.stack([p.new_zeros(shape) if one is None else one for p, one in zip(params, kept, strict=True)])
            parts = list(stack.unbind(0))
            for p, part in zip(params, parts, strict=True):
                self.state[p][name] = part
            self._stacks[name, id(params[0])] = stack, parts
        return stack


@functools.cache
def _compiled_update() -> Callable[..., Tensor]:
    return torch.compile(update_matrices, dynamic=False)
