"""AdamW and Muon over dicts of arrays, as optim/groups.py and torch compute them; states have torch's names."""

from __future__ import annotations

import math
from collections import defaultdict

import mlx.core as mx

from ingot.backends.base import GroupRates
from ingot.backends.mlx.build import Model
from ingot.backends.mlx.layers import Weights
from ingot.backends.mlx.state import number
from ingot.config.schema import OptimizerSection
from ingot.errors import ConfigError
from ingot.optim.assign import Group, assign, groups_of
from ingot.optim.muon import Polynomial, polynomials

Memory = dict[str, Weights]  # by parameter: step, exp_avg and exp_avg_sq of AdamW, or momentum of Muon


def members(settings: OptimizerSection, model: Model, weights: Weights) -> list[tuple[Group, list[str]]]:
    """Every group that has parameters, with their names; each trainable parameter is in one."""
    group_of = assign(settings, model.kinds, model.block_matrices)
    found = []
    for group in groups_of(settings):
        names = [name for name, other in group_of.items() if other == group.name]
        for name in names:
            if group.optimizer == "muon" and weights[name].ndim != 2:
                shape = list(weights[name].shape)
                raise ConfigError(f"the group {group.name} gives {name} of shape {shape} to Muon, which takes matrices only")
        if names:
            found.append((group, names))
    return found


def adamw(p: mx.array, g: mx.array, memory: Weights, group: Group, rates: GroupRates) -> tuple[mx.array, Weights]:
    """The parameter and its memory after a step, computed in float32."""
    beta1, beta2 = group.betas
    full, g = p.astype(mx.float32), g.astype(mx.float32)
    zero = mx.zeros_like(full)
    step = number(memory["step"]) + 1 if memory else 1.0
    mean = memory.get("exp_avg", zero).astype(mx.float32)
    square = memory.get("exp_avg_sq", zero).astype(mx.float32)
    mean = mean + (1 - beta1) * (g - mean)
    square = beta2 * square + (1 - beta2) * g * g
    full = full * (1 - rates.lr * rates.weight_decay)
    root = mx.sqrt(square) / math.sqrt(1 - beta2**step) + group.epsilon
    full = full - (rates.lr / (1 - beta1**step)) * mean / root
    kept = {"step": mx.array(step), "exp_avg": mean.astype(p.dtype), "exp_avg_sq": square.astype(p.dtype)}
    return full.astype(p.dtype), kept


def muon(
    weights: Weights, grads: Weights, memory: Memory, names: list[str], rates: GroupRates, settings: OptimizerSection
) -> tuple[Weights, Memory]:
    """The matrices of a group and their memories after a step; those of one shape are orthogonalised together."""
    steps = polynomials(settings.muon_coefficients, settings.muon_iterations)
    momentum = rates.momentum or 0.0
    by_shape: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in names:
        by_shape[tuple(weights[name].shape)].append(name)
    updated, kept = {}, {}
    for (rows, columns), same in by_shape.items():
        g = mx.stack([grads[name] for name in same])  # (P, m, n)
        held = [memory[name]["momentum"] if memory.get(name) else mx.zeros_like(weights[name]) for name in same]
        after = mx.stack(held) * momentum + g
        update = orthogonalise(g + momentum * after if settings.muon_nesterov else after, steps)
        if settings.muon_normalise_rows:
            update = equal_rows(update)
        update = update * (rates.lr * math.sqrt(max(1.0, rows / columns)))
        for i, name in enumerate(same):
            updated[name] = weights[name] * (1.0 - rates.lr * rates.weight_decay) - update[i]
            kept[name] = {"momentum": after[i]}
    return updated, kept


def orthogonalise(matrices: mx.array, steps: tuple[Polynomial, ...]) -> mx.array:
    """Push the singular values of every matrix of an (N, m, n) stack towards one, in float32: bf16 gives NaN."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.swapaxes(-1, -2) if tall else matrices).astype(mx.float32)
    x = x / (length(x) + 1e-7)
    for a, b, c in steps:
        gram = x @ x.swapaxes(-1, -2)  # (N, m, m)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.swapaxes(-1, -2) if tall else x


def equal_rows(updates: mx.array) -> mx.array:
    """Every row of each (m, n) update at the same length, the length of the whole unchanged; see optim/muon.py."""
    rows = updates / mx.maximum(mx.sqrt(mx.sum(updates * updates, axis=-1, keepdims=True)), 1e-12)
    return rows * (length(updates) / mx.maximum(length(rows), 1e-7))


def length(matrices: mx.array) -> mx.array:
    """The Frobenius norm of each matrix of a stack, as (N, 1, 1)."""
    return mx.sqrt(mx.sum(matrices * matrices, axis=(-2, -1), keepdims=True))
