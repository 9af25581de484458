"""One token after another, with a key-value cache until the context is full; then its last tokens are read anew for each.

Tokens are drawn on the host, each row by a generator of its own: what a row draws depends on its seed alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ingot.backends.mlx.build import Model
from ingot.backends.mlx.layers import Cached, Pass, Weights
from ingot.errors import RunError
from ingot.generate.sampling import Sampling
from ingot.generate.scores import RowScores


def write(
    model: Model, weights: Weights, prompts: list[list[int]], sampling: Sampling, vocab_size: int, dtype: mx.Dtype
) -> Iterator[list[int]]:
    """Yield the next token of every prompt, for ever; only ids below `vocab_size` are drawn."""
    draws = [np.random.default_rng(seed) for seed in sampling.row_seeds(len(prompts))]
    written: list[set[int]] = [set() for _ in prompts]
    seen = new = np.array(prompts, dtype=np.int32)  # (B, T)
    cache: list[Cached] = []
    cached = sampling.use_cache
    while True:
        seen = seen[:, -model.context :]
        held = cache[0][0].shape[2] if cache else 0
        cached = cached and held + new.shape[1] <= model.context  # once over, the cache lacks tokens for good
        if cached:
            run = Pass(dtype, cache=cache)
            logits = model.last_logits(weights, mx.array(new), run)
            cache = run.grown
        else:
            logits = model.last_logits(weights, mx.array(seen), Pass(dtype))
        scores = np.array(logits)[:, :vocab_size]
        if not np.isfinite(scores).all():
            raise RunError("the model's scores are not finite, so it cannot write: its weights are damaged or diverged")
        if sampling.repetition_penalty != 1:
            for row, said in zip(scores, written, strict=True):
                penalise(row, sorted(said), sampling.repetition_penalty)
        tokens = [choose(row, sampling, draw) for row, draw in zip(scores, draws, strict=True)]
        for said, token in zip(written, tokens, strict=True):
            said.add(token)
        new = np.array(tokens, dtype=np.int32)[:, None]
        seen = np.concatenate([seen, new], axis=1)
        yield tokens


def score_row(
    model: Model, weights: Weights, row: Sequence[int], first: int, top: int, vocab_size: int, dtype: mx.Dtype
) -> RowScores:
    """Log-probabilities of the tokens of a row from a place on, and the likeliest tokens there."""
    tokens = mx.array(np.array([row[:-1]], dtype=np.int32))
    scores = np.array(model.logits_from(weights, tokens, first - 1, Pass(dtype)).astype(mx.float32))[0].astype(np.float64)
    scores -= scores.max(-1, keepdims=True)
    scores = (scores - np.log(np.exp(scores).sum(-1, keepdims=True))).astype(np.float32)  # (N, V)
    ids = np.argsort(-scores[:, :vocab_size], axis=-1, kind="stable")[:, :top]
    chosen = np.take_along_axis(scores, np.array(row[first:], dtype=np.int64)[:, None], -1)[:, 0]
    return RowScores(first, chosen, ids, np.take_along_axis(scores, ids, -1))


def penalise(scores: NDArray[Any], ids: list[int], penalty: float) -> None:
    """Make tokens that a text has already less likely: a score above 0 is divided by the penalty, one below multiplied by it."""
    scores[ids] = np.where(scores[ids] < 0, scores[ids] * penalty, scores[ids] / penalty)


def choose(scores: NDArray[Any], sampling: Sampling, draw: np.random.Generator) -> int:
    """The next token after one row of scores (V)."""
    if sampling.greedy:
        return int(scores.argmax())
    ids = np.argsort(-scores, kind="stable")
    if 0 < sampling.top_k < len(ids):
        ids = ids[: sampling.top_k]
    p = np.exp((scores[ids].astype(np.float64) - scores[ids[0]]) / sampling.temperature)
    p /= p.sum()
    if sampling.top_p < 1:
        p[p.cumsum() - p >= max(sampling.top_p, 1e-9)] = 0.0  # the likelier tokens' share
    sums = p.cumsum()
    found = int(np.searchsorted(sums, draw.random() * sums[-1], side="right"))
    return int(ids[min(found, int(np.flatnonzero(p)[-1]))])
