"""MLX's device, and a model on it for generation and scoring. It uses the weights' average if there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ingot.backends.base import Rounder
from ingot.backends.limits import refuse_ranks_on_mlx
from ingot.backends.mlx.build import PRECISIONS, MLXModel, number, outline, records
from ingot.backends.mlx.models import Cached, Pass, Weights
from ingot.backends.sampling import RowScores, Sampling
from ingot.config.schema import Config
from ingot.errors import ConfigError, DataError, RunError, Setting
from ingot.runtime.devices import Device
from ingot.runtime.ranks import Ranks
from ingot.runtime.tensors import IGNORED, Batch, TensorRecord

VERSION = metadata.version("mlx")


def find_mlx_device() -> Device:
    """Return MLX's device: the GPU of a Mac, elsewhere the CPU, preferred precision first."""
    if on_metal():
        return Device("mlx", 0, f"mlx {VERSION}, {mx.device_info().get('device_name', 'GPU')}", None, ("bf16", "fp32"))
    return Device("mlx", 0, f"mlx {VERSION}, CPU", None, ("fp32", "bf16"))


def on_metal() -> bool:
    """Return True if there is an Apple GPU."""
    return bool(mx.metal.is_available())


def make_matmul() -> tuple[int, Callable[[], object]]:
    """Return a function that multiplies large float32 matrices, and their size."""
    size = 1024 if on_metal() else 256
    a = mx.ones((size, size))
    return size, lambda: mx.eval(a @ a)


def choose(scores: NDArray[Any], sampling: Sampling, draw: np.random.Generator) -> int:
    """Return the next token, given one row of logits (V)."""
    if sampling.greedy:
        return int(scores.argmax())
    ids = np.argsort(-scores, kind="stable")
    if 0 < sampling.top_k < len(ids):
        ids = ids[: sampling.top_k]
    p = np.exp((scores[ids].astype(np.float64) - scores[ids[0]]) / sampling.temperature)
    p /= p.sum()
    if sampling.top_p < 1:
        p[p.cumsum() - p >= max(sampling.top_p, 1e-9)] = 0.0  # cut where likelier tokens reach top_p
    sums = p.cumsum()
    index = int(np.searchsorted(sums, draw.random() * sums[-1], side="right"))
    return int(ids[min(index, int(np.flatnonzero(p)[-1]))])


class Alone:
    """The group of one process; every method returns at once."""

    def __init__(self, ranks: Ranks):
        refuse_ranks_on_mlx(ranks.world_size)
        self.ranks = ranks

    def maximum(self, values: Sequence[float]) -> list[float]:
        """Return the values: with a single rank they are their own maximum and sum."""
        return list(values)

    total = maximum

    def broadcast(self, text: str) -> str:
        """Return the first rank's text on every rank."""
        return text

    def close(self) -> None:
        """Do nothing: MLX inference runs on a single rank."""


class MLXInference(Alone):
    """A model, and its weights, which its functions take as an argument."""

    def __init__(self, model: MLXModel, weights: Weights, vocab_size: int, precision: str, ranks: Ranks):
        super().__init__(ranks)
        self.device = find_mlx_device()
        self.model, self.vocab_size, self.precision = model, vocab_size, precision
        self.parameters = sum(p.numel() for p in model.outline.parameters())
        self._dtype = PRECISIONS[precision]
        self._weights = weights
        self._average: Weights | None = None

    @classmethod
    def of(cls, config: Config, vocab_size: int) -> MLXInference:
        """Build the model of a config, still without weights."""
        precision = "bf16" if config.training.precision == "bf16" else "fp32"  # a model trained in fp16 is scored in fp32
        return cls(outline(config, vocab_size), {}, vocab_size, precision, Ranks())

    def score(self, batch: Batch) -> float:
        """Return the summed loss of the targets that count."""
        if not np.count_nonzero(batch[:, 1] != IGNORED):
            return 0.0
        return number(self.model.losses(self._shown(), *self._upload(batch), run=Pass(self._dtype)))

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> Iterator[list[int]]:
        """Continue prompts, token by token; those of different lengths are computed one by one."""
        weights, seeds = self._shown(), sampling.row_seeds(len(prompts))
        if len({len(prompt) for prompt in prompts}) <= 1:
            return self._write(weights, prompts, seeds, sampling)
        alone = [self._write(weights, [prompt], (seed,), sampling) for prompt, seed in zip(prompts, seeds, strict=True)]
        return ([row[0] for row in rows] for rows in zip(*alone, strict=True))

    def _write(self, weights: Weights, prompts: list[list[int]], seeds: Sequence[int], sampling: Sampling) -> Iterator[list[int]]:
        """Yield the next token of every prompt, forever; beyond the context, its last tokens are read again for each new one."""
        draws = [np.random.default_rng(seed) for seed in seeds]
        written: list[set[int]] = [set() for _ in prompts]
        seen = new = np.array(prompts, dtype=np.int32)  # (B, T)
        cache: list[Cached] = []
        cached, context = sampling.use_cache, self.model.outline.context
        while True:
            seen = seen[:, -context:]
            held = cache[0][0].shape[2] if cache else 0
            cached = cached and held + new.shape[1] <= context  # beyond the context the cache would miss tokens
            run = Pass(self._dtype, cache=cache if cached else None)
            logits = self.model.logits_from(weights, mx.array(new if cached else seen), -1, run)
            scores, cache = np.array(logits)[:, 0, : self.vocab_size], run.grown
            if not np.isfinite(scores).all():
                raise RunError("the model's logits are not finite, so it cannot generate: its weights are damaged or diverged")
            if (penalty := sampling.repetition_penalty) != 1:
                for row, earlier in zip(scores, written, strict=True):
                    ids = sorted(earlier)
                    row[ids] = np.where(row[ids] < 0, row[ids] * penalty, row[ids] / penalty)
            tokens = [choose(row, sampling, draw) for row, draw in zip(scores, draws, strict=True)]
            for earlier, token in zip(written, tokens, strict=True):
                earlier.add(token)
            new = np.array(tokens, dtype=np.int32)[:, None]
            seen = np.concatenate([seen, new], axis=1)
            yield tokens

    def score_rows(self, rows: Sequence[Sequence[int]], firsts: Sequence[int], top: int) -> list[RowScores]:
        """Return log-probabilities of given tokens, row by row."""
        weights, scored = self._shown(), []
        for row, first in zip(rows, firsts, strict=True):
            tokens = mx.array(np.array([row[:-1]], dtype=np.int32))
            logits = self.model.logits_from(weights, tokens, first - 1, Pass(self._dtype)).astype(mx.float32)
            scores = np.array(logits)[0].astype(np.float64)
            scores -= scores.max(-1, keepdims=True)
            scores = (scores - np.log(np.exp(scores).sum(-1, keepdims=True))).astype(np.float32)  # (N, V)
            ids = np.argsort(-scores[:, : self.vocab_size], axis=-1, kind="stable")[:, :top]
            chosen = np.take_along_axis(scores, np.array(row[first:], dtype=np.int64)[:, None], -1)[:, 0]
            scored.append(RowScores(first, chosen, ids, np.take_along_axis(scores, ids, -1)))
        return scored

    def cast(self, precision: str) -> bool:
        """Cast the weights for generation."""
        if precision not in PRECISIONS:
            return False
        self._dtype = PRECISIONS[precision]
        self._weights = {name: w.astype(self._dtype) for name, w in self._weights.items()}
        return True

    def weights(self) -> list[TensorRecord]:
        """Return copies of the weights that are scored."""
        return records(self._shown())

    def rounder(self, batches: Iterable[Batch]) -> Rounder:
        """Refuse: MLX does not round weights."""
        raise ConfigError(
            "{0} does not round weights to few bits:",
            Setting("training.device", "mlx"),
            advice="export the run with --device cpu",
        )

    def load_weights(self, weights: Mapping[str, TensorRecord], where: str) -> None:
        """Load other weights."""
        self._weights = self.model.read(weights, where)

    def _shown(self) -> Weights:
        """Return the average of the weights in their dtypes, or the weights themselves."""
        average = self._average or {}
        return {name: average[name].astype(w.dtype) if name in average else w for name, w in self._weights.items()}

    def _upload(self, batch: Batch) -> list[mx.array]:
        """Return tokens, targets and, where rows have them, document numbers."""
        if (largest := batch[:, :2].max()) >= self.vocab_size:
            raise DataError(f"the data holds token {largest}, outside the vocabulary; inspect it with: ingot data verify")
        return [mx.array(np.ascontiguousarray(batch[:, plane])) for plane in range(batch.shape[1])]
