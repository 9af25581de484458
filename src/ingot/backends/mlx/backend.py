"""The training step of the MLX backend.

RNG state is never stored: dropout keys are derived from (seed, step), so a resumed run draws the same random numbers.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from ingot.backends.base import GroupRates, State, StepPlan, StepResult
from ingot.backends.mlx.inference import MLXInference, array, draw, find_mlx_device, number, record, records
from ingot.backends.mlx.models import DROPOUTS, Pass, Weights
from ingot.config.memory import recomputed_every
from ingot.config.schema import Config, OptimizerSection
from ingot.optim.assign import ParameterGroup
from ingot.optim.muon import Polynomial, polynomials
from ingot.runtime.machine import host_bytes
from ingot.runtime.ranks import Ranks
from ingot.runtime.seeds import mix
from ingot.runtime.tensors import Batch, TensorRecord

# AdamW (as in torch) and Muon (as in optim/muon.py) on dicts of arrays; the optimizer state has the same keys as in torch.

OptimizerState = dict[str, Weights]  # per parameter name: step, exp_avg and exp_avg_sq (AdamW) or momentum and squares (Muon)


def adamw(p: mx.array, g: mx.array, memory: Weights, group: ParameterGroup, rates: GroupRates) -> tuple[mx.array, Weights]:
    """Take one AdamW step in float32; return the new parameter and its new state."""
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
    weights: Weights, grads: Weights, memory: OptimizerState, names: list[str], rates: GroupRates, settings: OptimizerSection
) -> tuple[Weights, OptimizerState]:
    """Take one Muon step; return the new matrices and their state. Matrices of the same shape are orthogonalised together."""
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
        if settings.muon_normalise_rows:  # give every row the same norm without changing the matrix norm; see optim/muon.py
            rows_of_one = update / mx.maximum(mx.sqrt(mx.sum(update * update, axis=-1, keepdims=True)), 1e-12)
            update = rows_of_one * (length(update) / mx.maximum(length(rows_of_one), 1e-7))
        if settings.muon_beta2 is not None:  # NorMuon: divide rows by their running root mean square; see optim/muon.py
            now = mx.mean(mx.square(update), axis=-1 if rows >= columns else -2, keepdims=True)
            before = [memory.get(name, {}).get("squares", mx.zeros_like(now[0])) for name in same]
            squares = settings.muon_beta2 * mx.stack(before) + (1 - settings.muon_beta2) * now
            scaled = update * mx.rsqrt(mx.maximum(squares, 1e-10))
            update = scaled * (length(update) / mx.maximum(length(scaled), 1e-10))
        update = update * (rates.lr * math.sqrt(max(1.0, rows / columns)))
        decay = rates.lr * rates.weight_decay
        for i, name in enumerate(same):
            decays = weights[name] * update[i] >= 0 if settings.muon_cautious else 1.0
            updated[name] = weights[name] * (1.0 - decay * decays) - update[i]
            kept[name] = {"momentum": after[i]} | ({} if settings.muon_beta2 is None else {"squares": squares[i]})
    return updated, kept


def orthogonalise(matrices: mx.array, steps: tuple[Polynomial, ...]) -> mx.array:
    """Push the singular values of each matrix in a stack (N, m, n) towards one, in float32 because bf16 gives NaN."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.swapaxes(-1, -2) if tall else matrices).astype(mx.float32)
    x = x / (length(x) + 1e-7)
    for a, b, c in steps:
        gram = x @ x.swapaxes(-1, -2)  # (N, m, m)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.swapaxes(-1, -2) if tall else x


def length(matrices: mx.array) -> mx.array:
    """Return the Frobenius norms (N, 1, 1) of a stack of N matrices."""
    return mx.sqrt(mx.sum(matrices * matrices, axis=(-2, -1), keepdims=True))


MICRO_BATCH_TOKENS = 8192  # larger micro-batches are no faster and fill the memory of a 16 GB Mac
CLIP_EPSILON = 1e-6  # added to the gradient norm before dividing by it; same value as in torch


class MLXBackend(MLXInference):
    """The MLX implementation of Backend (methods documented in base.py), which trains in a single process."""

    uses_loss_scaling = False
    writers = 1

    def __init__(self, config: Config, vocab_size: int, ranks: Ranks):
        t, o = config.training, config.optimizer
        outline, initial, self._groups = draw(config, vocab_size)
        super().__init__(config, outline, vocab_size, find_mlx_device().precision(t.precision), ranks)
        self.load_weights(initial, "the initial model")
        self.notes: list[str] = []
        self._optimizer, self._seed, self._micro_batch_setting = o, t.seed, t.micro_batch
        self._trained = [name for _, names in self._groups for name in names]
        self._memory: OptimizerState = {}
        self._micro_batches: list[int] = []  # micro-batch size of each stage
        if o.ema_decay is not None:
            self._begin_average()
        dropout = float(getattr(config.model, "dropout", 0.0))
        self._run = Pass(self._dtype, dropout=dropout, recompute=bool(recomputed_every(config, vocab_size, host_bytes())))
        self._eager = t.eager
        # By default, compile only on Metal: on a CPU, MLX compiles every kernel with g++, which is slow.
        self._compile = bool(mx.metal.is_available() if t.compile == "auto" else t.compile)

        def loss(trained: Weights, others: Weights, keys: mx.array, window: int, *planes: mx.array) -> mx.array:
            run = replace(self._run, keys=keys if self._run.dropout else None, window=window)
            return self._losses({**others, **trained}, run, *planes)

        both: Callable[..., Any] = mx.value_and_grad(loss)
        self._value_and_grad = mx.compile(both) if self._compile else both

    def tune(self, stages: Sequence[tuple[StepPlan, Batch]], kept: Mapping[str, Any]) -> None:
        """Choose the micro-batch size of each stage, or reuse that of an earlier session on the same device model."""
        kept_stages = kept.get("stages", [kept]) if kept.get("device") == self.device.name else []
        self._micro_batches = []
        for plan, batch in stages:
            before = kept_stages[plan.stage] if plan.stage < len(kept_stages) else {}
            most = before.get("micro_batch", max(1, MICRO_BATCH_TOKENS // batch.shape[2]))
            rows = most if self._micro_batch_setting == "auto" else self._micro_batch_setting
            self._micro_batches.append(min(int(rows), len(batch)))

    def tuned(self) -> dict[str, Any]:
        stages = [{"micro_batch": rows, "attention": "default"} for rows in self._micro_batches or [0]]
        return {
            "device": self.device.name,
            "world_size": 1,
            "precision": self.precision,
            **stages[0],
            "compile": self._compile,
            **({"stages": stages} if len(stages) > 1 else {}),
        }

    def host_buffer(self, shape: tuple[int, int, int]) -> Batch:
        return np.empty(shape, dtype=np.int32)  # ordinary memory: the GPU of a Mac shares the host's memory

    def step(self, batch: Batch, targets: int, plan: StepPlan) -> StepResult:
        """Run one step and wait until it has finished."""
        loss, grads = self._accumulate(batch, targets, plan)
        norm = mx.sqrt(sum((mx.sum(mx.square(g.astype(mx.float32))) for g in grads.values()), mx.zeros(())))
        loss_value, norm_value = number(loss), number(norm)
        skipped = not np.isfinite([loss_value, norm_value]).all()
        if not skipped:
            clip = self._optimizer.clip_norm
            if clip and (scale := clip / (norm_value + CLIP_EPSILON)) < 1:
                grads = {name: g * scale for name, g in grads.items()}
            self._update(grads, plan)
        return StepResult(loss_value, norm_value, skipped, time.perf_counter())

    def _accumulate(self, batch: Batch, targets: int, plan: StepPlan) -> tuple[mx.array, Weights]:
        """Return the mean loss over all targets of the step, and its gradients."""
        trained = {name: self._weights[name] for name in self._trained}
        others = {name: w for name, w in self._weights.items() if name not in trained}
        rows = self._micro_batches[plan.stage]
        total, sums = mx.zeros(()), {name: mx.zeros_like(w) for name, w in trained.items()}
        for part, start in enumerate(range(0, len(batch), rows)):
            keys = mx.random.split(mx.random.key(mix(self._seed, plan.step, part)), num=1 + DROPOUTS * self._settings.layers)
            planes = self._upload(batch[start : start + rows])
            loss, grads = self._value_and_grad(trained, others, keys, int(plan.model.get("window", 0)), *planes)
            total = total + loss / targets
            sums = {name: held + grads[name] / targets for name, held in sums.items()}
            if self._eager:
                mx.eval(total, sums)  # evaluate here, because lazy evaluation would keep all micro-batches in memory at once
        return total, sums

    def _update(self, grads: Weights, plan: StepPlan) -> None:
        weights, memory = dict(self._weights), dict(self._memory)
        for group, names in self._groups:
            rates = plan.groups[group.name]
            if group.optimizer == "muon":
                updated, kept = muon(weights, grads, memory, names, rates, self._optimizer)
                weights |= updated
                memory |= kept
                continue
            for name in names:
                weights[name], memory[name] = adamw(weights[name], grads[name], memory.get(name, {}), group, rates)
        self._weights, self._memory = weights, memory
        if self._average is not None and plan.ema_decay is not None:
            step = 1 - plan.ema_decay
            self._average = {name: a + step * (weights[name].astype(mx.float32) - a) for name, a in self._average.items()}
        mx.eval(self._weights, self._memory, self._average or {})

    def _begin_average(self) -> None:
        self._average = {name: self._weights[name].astype(mx.float32) for name in self._trained}

    def load_weights(self, weights: Mapping[str, TensorRecord], where: str) -> None:
        super().load_weights(weights, where)
        if self._average is not None:
            self._begin_average()

    def snapshot(self) -> Callable[[], State]:
        memory = [record(f"{name}/{key}", value) for name, kept in self._memory.items() for key, value in kept.items()]
        average = {"ema": records(self._average)} if self._average is not None else {}
        state = {"model": records(self._weights), "optimizer": memory, **average}
        return lambda: state

    @contextmanager
    def without_trace(self) -> Iterator[None]:
        """Undo all steps taken in the block. Arrays are never modified in place, so keeping references to them is enough."""
        before = self._weights, self._memory, self._average
        try:
            yield
        finally:
            self._weights, self._memory, self._average = before

    def load(self, state: Mapping[str, Mapping[str, TensorRecord]]) -> None:
        """Restore a state saved by the MLX or the torch backend."""
        self.load_weights(state["model"], "the checkpoint")
        states: OptimizerState = defaultdict(dict)
        for source in state["optimizer"].values():
            parameter, _, key = source.name.rpartition("/")
            states[parameter][key] = array(source)
        self._memory = {name: states[name] for name in self._trained if name in states}  # omits the loss scale of an fp16 run
        if self._average is not None:
            self._average |= {name: array(source, mx.float32) for name, source in state.get("ema", {}).items()}

    def peak_memory(self) -> tuple[int, int]:
        peak = int(mx.get_peak_memory())
        return peak, peak

    def wait(self) -> None:
        mx.synchronize()

    def release(self) -> None:
        mx.clear_cache()
