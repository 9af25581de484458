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


def even_out(updates: Tensor, squares: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """NorMuon: each row of (P, m, n) updates divided by its running root mean square, the length of the whole unchanged.

    Of wide matrices the columns, the side that has more. `squares` are the running means, which come back as they are after this.
    """
    now = updates.square().mean(-1 if updates.size(-2) >= updates.size(-1) else -2, keepdim=True)
    squares = squares.lerp(now, 1 - beta)
    scale, whole = squares.clamp_min(1e-10).rsqrt(), (-2, -1)
    length = now.sum(whole, keepdim=True) / (now * scale.square()).sum(whole, keepdim=True).clamp_min(1e-20)
    return updates * scale * length.sqrt(), squares


class Muon(torch.optim.Optimizer):
    """Muon for matrices. Every parameter must have two dimensions; the rest belongs to AdamW.

    What a group does not have itself it takes from the settings. All of it may change between steps, as `lr` and `momentum` do.
    """

    def __init__(self, params: Iterable[Any], settings: OptimizerSection):
        defaults = {
            "lr": settings.muon_learning_rate,
            "momentum": settings.muon_momentum,
            "momentum_form": settings.muon_momentum_form,
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
        grads = torch.stack([p.grad for p in params])  # type: ignore[misc]  # (P, m, n)
        rows, columns = grads.shape[1:]
        before = self._memory(params, "momentum", (rows, columns))
        after, direction = _momentum(before, grads, group)
        # GPUs multiply bf16 many times faster and the iteration forgives it; CPUs gain nothing from it.
        half = group["precision"] == "bf16" or (group["precision"] == "auto" and grads.is_cuda)
        steps = polynomials(group["coefficients"], group["iterations"])
        update = orthogonalise(direction, steps, torch.bfloat16 if half else torch.float32)
        if group["normalise_rows"]:
            update = equal_rows(update)
        kept = [("momentum", before, after)]
        if group["beta2"] is not None:
            before = self._memory(params, "squares", (rows, 1) if rows >= columns else (1, columns))
            update, after = even_out(update, before, group["beta2"])
            kept.append(("squares", before, after))
        # A tall matrix has more rows than directions: the factor gives every row the update it would have in a square one.
        update = update * (group["lr"] * math.sqrt(max(1.0, rows / columns)))
        decay: float | Tensor = group["lr"] * group["weight_decay"]
        if skip is not None:
            update = torch.where(skip.bool(), 0.0, update)
            kept = [(name, before, torch.where(skip.bool(), before, after)) for name, before, after in kept]
            decay = decay * (1.0 - skip)
        if group["weight_decay"] and group["cautious"]:  # only what the update brings nearer to zero as well
            torch._foreach_mul_(params, list((1.0 - decay * (torch.stack(params) * update >= 0)).unbind(0)))
        elif group["weight_decay"]:
            torch._foreach_mul_(params, 1.0 - decay)
        torch._foreach_sub_(params, list(update.unbind(0)))
        for name, _, after in kept:
            torch._foreach_copy_([self.state[p][name] for p in params], list(after.unbind(0)))

    def _memory(self, params: list[Tensor], name: str, shape: tuple[int, int]) -> Tensor:
        """What is remembered of every parameter under a name, (P, ...); zeros at first."""
        for p in params:
            if name not in self.state[p]:
                self.state[p][name] = p.new_zeros(shape)
        return torch.stack([self.state[p][name] for p in params])


def _momentum(before: Tensor, grads: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The momentum after a step, and the direction of the step."""
    momentum = group["momentum"]
    if group["momentum_form"] == "mean":
        after = before.lerp(grads, 1 - momentum)
        return after, grads.lerp(after, momentum) if group["nesterov"] else after
    after = before * momentum + grads
    return after, grads + momentum * after if group["nesterov"] else after
