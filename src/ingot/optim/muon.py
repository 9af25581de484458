"""Muon: momentum whose update is replaced by the nearest semi-orthogonal matrix, for all matrices of one shape at once.

Orthogonalising one small matrix is a chain of products too small to fill a device. Matrices of one shape are stacked and
iterated together; the result is that of one by one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.config.schema import OptimizerSection
from ingot.optim.orthogonal import orthogonalise, polynomials


def equal_rows(updates: Tensor) -> Tensor:
    """Every row of each (m, n) update at the same length, the length of the whole unchanged; a row of zeros stays one.

    A tall matrix has more rows than directions, and orthogonalising leaves some of them long and others short, so that some
    neurons learn many times faster than others. The rows of a wide one are nearly equal already.
    """
    rows = F.normalize(updates, dim=-1)
    whole = (-2, -1)
    return rows * (updates.norm(dim=whole, keepdim=True) / rows.norm(dim=whole, keepdim=True).clamp_min(1e-7))


class Muon(torch.optim.Optimizer):
    """Muon for matrices. Every parameter must have two dimensions; the rest belongs to AdamW.

    What a group does not have itself it takes from the settings. All of it may change between steps, as `lr` and `momentum` do.
    """

    def __init__(self, params: Iterable[Any], settings: OptimizerSection):
        defaults = {
            "lr": settings.muon_learning_rate,
            "momentum": settings.muon_momentum,
            "nesterov": settings.muon_nesterov,
            "iterations": settings.muon_iterations,
            "weight_decay": settings.muon_weight_decay,
            "coefficients": settings.muon_coefficients,
            "normalise_rows": settings.muon_normalise_rows,
            "precision": settings.muon_precision,
        }
        super().__init__(params, defaults)
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
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        grads = torch.stack([p.grad for p in params])  # type: ignore[misc]  # (P, m, n)
        before = torch.stack([self.state[p]["momentum"] for p in params])
        momentum, rows, columns = group["momentum"], grads.size(1), grads.size(2)
        after = before * momentum + grads
        direction = grads + momentum * after if group["nesterov"] else after
        # GPUs multiply bf16 many times faster and the iteration forgives it; CPUs gain nothing from it.
        half = group["precision"] == "bf16" or (group["precision"] == "auto" and grads.is_cuda)
        steps = polynomials(group["coefficients"], group["iterations"])
        update = orthogonalise(direction, steps, torch.bfloat16 if half else torch.float32)
        if group["normalise_rows"]:
            update = equal_rows(update)
        # A tall matrix has more rows than directions: the factor gives every row the update it would have in a square one.
        update = update * (group["lr"] * math.sqrt(max(1.0, rows / columns)))
        decay: float | Tensor = group["lr"] * group["weight_decay"]
        if skip is not None:
            update = torch.where(skip.bool(), 0.0, update)
            after = torch.where(skip.bool(), before, after)
            decay = decay * (1.0 - skip)
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1.0 - decay)
        torch._foreach_sub_(params, list(update.unbind(0)))
        torch._foreach_copy_([self.state[p]["momentum"] for p in params], list(after.unbind(0)))
