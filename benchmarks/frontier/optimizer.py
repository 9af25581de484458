"""Muon with the candidates as options, Adam for the rest, and what changes with the time.

Matrices of one shape are stacked and updated by one compiled function; what changes from step to step is a tensor, because a
number would compile anew.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from frontier.arms import Arm
from frontier.model import compiled
from ingot.optim.muon import orthogonalise, polynomials

MATRICES = {"q", "k", "v", "o", "fc", "up", "down", "value_projection"}
SECOND_BETA = 0.95  # of NorMuon's running mean of squares
POLAR_EXPRESS = polynomials("polar-express", 5)


def even_out(update: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """NorMuon: divide each row of (P, m, n) updates by its running root mean square and keep the norm of the whole.

    As its authors and nanochat do, wide matrices have their columns divided instead: the side that has more. `second` holds the
    running mean squares; they come back as they are after this step.
    """
    side = -1 if update.size(-2) >= update.size(-1) else -2
    squares = update.square().mean(side, keepdim=True)
    second = second.lerp(squares, 1 - SECOND_BETA)
    scale = second.clamp_min(1e-10).rsqrt()
    before, after = squares.sum((-2, -1), keepdim=True), (squares * scale.square()).sum((-2, -1), keepdim=True)
    return update * scale * (before / after.clamp_min(1e-20)).sqrt(), second


def update_matrices(
    params: Tensor,
    grads: Tensor,
    momentum_buffer: Tensor,
    second: Tensor,
    rate: Tensor,
    momentum: Tensor,
    decay: Tensor,
    normuon: bool,
    cautious: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of Muon on a stack (P, m, n): the new weights, momentum and running squares."""
    momentum_buffer = momentum_buffer * momentum + grads
    direction = grads + momentum * momentum_buffer
    half = torch.bfloat16 if grads.is_cuda else torch.float32
    update = orthogonalise(direction, POLAR_EXPRESS, half)
    if normuon:
        update, second = even_out(update, second)
    rate = rate * math.sqrt(max(1.0, params.size(-2) / params.size(-1)))
    shrink = params * (update * params >= 0) if cautious else params  # cautious: only where the step goes towards zero as well
    return params - rate * (update + decay * shrink), momentum_buffer, second


class Stack:
    """The matrices of one shape and what Muon remembers of them."""

    def __init__(self, params: list[nn.Parameter]):
        self.params = params
        count, (rows, columns), device = len(params), params[0].shape, params[0].device
        self.momentum = torch.zeros(count, rows, columns, device=device)
        self.second = torch.zeros(count, *((rows, 1) if rows >= columns else (1, columns)), device=device)


class Optimizer:
    """Muon and Adam over a model's weights; `step` takes the part of the time that is gone."""

    def __init__(self, arm: Arm, named: Iterable[tuple[str, nn.Parameter]]):
        self._arm = arm
        by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        by_kind: dict[str, list[nn.Parameter]] = defaultdict(list)
        for name, p in named:
            kind = name.rpartition(".")[2]
            if kind in MATRICES:
                by_shape[p.shape].append(p)
            else:
                by_kind[kind].append(p)
        self._stacks = [Stack(params) for params in by_shape.values()]
        groups = [{"params": params, **adam_settings(arm, kind)} for kind, params in by_kind.items()]
        device = groups[0]["params"][0].device
        self._adam = torch.optim.AdamW(groups, fused=True)
        for group in self._adam.param_groups:
            group["peak"] = group["lr"]
        self._rate, self._momentum, self._decay = (torch.zeros((), device=device) for _ in range(3))
        self._update = compiled(update_matrices) if device.type == "cuda" else update_matrices

    @torch.no_grad()
    def step(self, step: int, progress: float) -> None:
        """Update every weight and forget the gradients."""
        a = self._arm
        scale = a.rate * rate_scale(a, progress)
        self._rate.fill_(a.muon_rate * scale)
        self._momentum.fill_(a.momentum_start + (a.momentum - a.momentum_start) * min(1.0, step / max(1, a.momentum_steps)))
        self._decay.fill_(a.decay * decay_scale(a.decay_schedule, progress))
        for s in self._stacks:
            grads = torch.stack([p.grad for p in s.params])  # type: ignore[misc]
            settings = self._rate, self._momentum, self._decay, a.normuon, a.cautious
            new, momentum, second = self._update(torch.stack(s.params), grads, s.momentum, s.second, *settings)  # type: ignore[arg-type]
            torch._foreach_copy_(list[Tensor](s.params), list(new.unbind(0)))
            s.momentum.copy_(momentum)
            s.second.copy_(second)
        for group in self._adam.param_groups:
            group["lr"] = group["peak"] * scale
        self._adam.step()
        for s in self._stacks:
            for p in s.params:
                p.grad = None
        self._adam.zero_grad()

    def forget(self) -> None:
        """Back to before the first step."""
        for s in self._stacks:
            s.momentum.zero_()
            s.second.zero_()
        self._adam.state.clear()


def adam_settings(arm: Arm, kind: str) -> dict[str, Any]:
    """Rate, betas and decay of what is not a matrix to Muon."""
    by_width = math.sqrt(768 / arm.width)
    betas = (0.8, 0.95)
    rate, decay = 0.05, 0.0  # skip, smear, backout
    match kind:
        case "embedding":
            rate, decay = arm.tied_rate if arm.tied else arm.embedding_rate * by_width, arm.embedding_decay
        case "head":
            rate, decay = arm.head_rate * by_width, arm.head_decay
        case "value_table":
            rate, decay = arm.embedding_rate * by_width, arm.table_decay
        case "mix_x":
            rate = 0.005
        case "mix_x0":
            rate, betas = 0.5, (0.96, 0.95)
        case "value_keep" | "value_first" | "qk_gain":
            rate = 0.02
        case "head_gate" | "value_gate" | "smear_gate":
            rate = arm.gate_rate
    return {"lr": rate, "betas": betas, "eps": 1e-10, "weight_decay": decay}


def rate_scale(arm: Arm, progress: float) -> float:
    """Flat, then a straight fall to the floor over the last `fall` of the time."""
    gone = max(0.0, progress - (1 - arm.fall)) / arm.fall if arm.fall else 0.0
    return 1 - (1 - arm.floor) * min(1.0, gone)


def decay_scale(schedule: str, progress: float) -> float:
    """The decay as a part of its strength: falling to 0, constant, or rising (1, a quarter at half-time, 1.25 at the end)."""
    if schedule == "constant":
        return 1.0
    if schedule == "falling":
        return max(0.0, 1 - progress)
    return 1 - 1.5 * progress if progress < 0.5 else 0.25 + 2 * (min(progress, 1.0) - 0.5)


class Averages:
    """Running averages of the weights with several decays; they begin with the weights at the first call."""

    def __init__(self, params: list[nn.Parameter], decays: tuple[float, ...], every: int):
        self._params, self._every = params, every
        self.decays = decays
        self.weights: dict[float, list[Tensor]] = {}

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights in, as often as `every` steps would have."""
        for decay in self.decays:
            if decay not in self.weights:
                self.weights[decay] = [p.detach().clone() for p in self._params]
            else:
                torch._foreach_lerp_(self.weights[decay], list(self._params), 1 - decay**self._every)
