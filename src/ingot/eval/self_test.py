"""Whether a score is one: each token scored once, without a sight of itself or of what follows, by probabilities that sum to 1.

The checks ask what `evaluate` asks, the summed loss of a batch, and hold it against rows whose future was changed and against the
model's probabilities, for which it is given no targets. A model that fails one of them may look better than it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ingot.eval.evaluator import Evaluator
from ingot.runtime.tensors import IGNORED, Batch

ROWS, PLACES = 4, 4  # rows that are looked at, and tokens of each
SAME = 1e-3  # nats: passes of one shape over the same tokens differ by rounding alone, which is far less
CLOSE = {"fp32": 2e-3, "fp16": 2e-2, "bf16": 5e-2}  # nats per token: another shape may be computed by another kernel


class Probabilities(Protocol):
    """Logs of the probabilities of a row's tokens from some place on, and of the likeliest tokens there."""

    @property
    def chosen(self) -> NDArray[np.float32]: ...
    @property
    def top(self) -> NDArray[np.float32]: ...


Probe = Callable[[Sequence[Sequence[int]], Sequence[int], int], Sequence[Probabilities]]  # rows, their first places, top


@dataclass(frozen=True)
class Check:
    """What was looked at, whether it is as it must be, and what was found."""

    name: str
    passed: bool
    found: str


def self_test(
    evaluator: Evaluator,
    score: Callable[[Batch], float],
    probabilities: Probe,
    vocab_size: int,
    head_rows: int,
    precision: str = "fp32",
) -> list[Check]:
    """All checks of the way in which a model is scored; `head_rows` are those of its head, which may be more than the tokens."""
    draw = np.random.default_rng(0)
    lines = _lines(evaluator)
    return [
        *_scored_once(evaluator),
        _blind_to_the_future(lines, score, vocab_size, draw),
        _by_probabilities(lines, score, probabilities, precision),
        _sum_to_one(lines, probabilities, vocab_size, head_rows),
    ]


def _lines(evaluator: Evaluator) -> list[Batch]:
    """Rows from the first to the last, each as a batch of its own."""
    rows = evaluator.rows()
    chosen = rows[np.unique(np.linspace(0, len(rows) - 1, ROWS).astype(np.int64))]
    lines = [batch[i : i + 1] for batch in evaluator.batches(chosen) for i in range(len(batch))]
    return [line for line in lines if (line[0, 1] != IGNORED).any()]


@dataclass(frozen=True)
class _Numbered:
    """A split whose tokens are their own places."""

    tokens: int

    def read(self, start: int, stop: int, *_: Any) -> NDArray[np.int64]:
        return np.arange(start, stop)


def _scored_once(evaluator: Evaluator) -> list[Check]:
    """One check for each part of a split whose rows are windows; rows of whole documents are made elsewhere."""
    parts = getattr(evaluator, "parts", {"": evaluator})
    return [_tiled(name, part) for name, part in parts.items() if type(part) is Evaluator]


def _tiled(bucket: str, evaluator: Evaluator) -> Check:
    tokens = evaluator.split.tokens
    numbered = replace(evaluator, split=_Numbered(tokens), document_mask=False)  # type: ignore[arg-type]
    times, wrong = np.zeros(tokens, np.int64), 0
    for batch in numbered.batches(numbered.rows()):
        row, place = np.nonzero(batch[:, 1] != IGNORED)
        targets = batch[:, 1][row, place]
        np.add.at(times, targets, 1)
        wrong += int(np.count_nonzero(batch[:, 0][row, place] != targets - 1))
    least = numbered.count(None) * evaluator.stride if evaluator.whole_rows else tokens - 1
    scored = int(times.sum())
    passed = wrong == 0 and times[0] == 0 and times.max() <= 1 and scored == least
    name = "every token is scored once" + (f" ({bucket})" if bucket else "")
    how = f"{evaluator.seq_len:,} tokens long, {evaluator.stride:,} apart"
    if passed:
        return Check(name, True, f"{scored:,} tokens, rows {how}")
    twice, never = int(np.count_nonzero(times > 1)), int(np.count_nonzero(times[1:] == 0))
    return Check(name, False, f"{twice:,} tokens more than once, {never:,} never, {wrong:,} after another token, rows {how}")


def _blind_to_the_future(lines: Sequence[Batch], score: Callable[[Batch], float], vocab_size: int, draw: Any) -> Check:
    """The loss of a token must be the same whatever stands at its own place and after it."""
    largest, looks = 0.0, 0
    for line in lines:
        scored = np.flatnonzero(line[0, 1] != IGNORED)
        for place in np.unique(draw.choice(scored, min(PLACES, len(scored)), replace=False)).tolist():
            alone = line.copy()
            alone[0, 1] = IGNORED
            alone[0, 1, place] = line[0, 1, place]
            other = alone.copy()
            later = other[0, 0, place + 1 :]
            later[:] = (later + draw.integers(1, max(2, vocab_size), len(later))) % vocab_size
            largest, looks = max(largest, abs(score(alone) - score(other))), looks + 1
    told = f"{looks} tokens of {len(lines)} rows, largest change {largest:.2g} nats"
    return Check("no token sees itself or the future", bool(largest <= SAME), told)


def _by_probabilities(lines: Sequence[Batch], score: Callable[[Batch], float], probabilities: Probe, precision: str) -> Check:
    """The loss must be that of probabilities which are computed without targets."""
    largest = 0.0
    for line in lines:
        one = line.copy()
        one[0, 2:] = 0  # as one document, for which there are probabilities
        scored = np.flatnonzero(one[0, 1] != IGNORED)
        ids, first = _row(one, scored)
        asked = probabilities([ids], [first], 1)[0].chosen[scored - scored[0]]
        largest = max(largest, abs(score(one) + float(asked.astype(np.float64).sum())) / len(scored))
    told = f"{len(lines)} rows, largest difference {largest:.2g} nats per token"
    return Check("losses are those of the model's probabilities", bool(largest <= CLOSE[precision]), told)


def _sum_to_one(lines: Sequence[Batch], probabilities: Probe, vocab_size: int, head_rows: int) -> Check:
    least, most = np.inf, -np.inf
    for line in lines:
        ids, _ = _row(line, np.flatnonzero(line[0, 1] != IGNORED))
        total = float(np.exp(probabilities([ids], [len(ids) - 1], vocab_size)[0].top.astype(np.float64)).sum())
        least, most = min(least, total), max(most, total)
    padded = head_rows > vocab_size  # rows of the head that stand for no token have a share
    passed = most <= 1 + SAME and least >= (0 if padded else 1 - SAME)
    told = f"of all {vocab_size:,} tokens after {len(lines)} rows: {least:.6f} to {most:.6f}"
    rest = f"; {head_rows - vocab_size:,} rows of the head stand for none" if padded else ""
    return Check("probabilities sum to one", bool(passed), told + rest)


def _row(line: Batch, scored: NDArray[np.int64]) -> tuple[list[int], int]:
    """The tokens of a row with its last scored target, and the place of the first that is scored."""
    last = int(scored[-1])
    return [*line[0, 0, : last + 1].tolist(), int(line[0, 1, last])], int(scored[0]) + 1
