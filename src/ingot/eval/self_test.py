"""Check that an evaluation is valid: tokens are scored exactly once, no prediction sees the future, probabilities sum to 1.

The checks compare the summed loss of a batch, computed as in an evaluation, with the loss after changing future tokens and with
the probabilities that the model computes without targets. A model that fails a check may look better than it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from ingot.eval.evaluator import Evaluator
from ingot.runtime.tensors import IGNORED, Batch

ROWS, POSITIONS = 4, 4  # number of rows that are checked, and of positions in each row
SAME_SHAPE_TOLERANCE = 1e-3  # in nats; two forward passes of the same shape differ only by rounding errors, which are far smaller
TOLERANCE = {"fp32": 2e-3, "fp16": 2e-2, "bf16": 5e-2}  # in nats per token; passes of different shapes may use different kernels

Probe = Callable[[Sequence[Sequence[int]], Sequence[int], int], Sequence[Any]]  # type of a backend's score_rows


@dataclass(frozen=True)
class Check:
    """The result of one check: its name, whether it passed, and what was found."""

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
    """Run all checks; `head_rows` is the number of rows of the output head, which may exceed `vocab_size`."""
    draw = np.random.default_rng(0)
    rows = evaluator.rows()  # check a few rows spread over the split, each as a batch of one row
    chosen = rows[np.unique(np.linspace(0, len(rows) - 1, ROWS).astype(np.int64))]
    lines = [batch[i : i + 1] for batch in evaluator.batches(chosen) for i in range(len(batch))]
    lines = [line for line in lines if (line[0, 1] != IGNORED).any()]
    return [
        # The rows of buckets are not checked, because they may be packed or skip repeated text.
        *(_tiled(name, part) for name, part in evaluator.parts.items() if type(part) is Evaluator),
        _check_causal(lines, score, vocab_size, draw),
        *_check_probabilities(lines, score, probabilities, vocab_size, head_rows, TOLERANCE[precision]),
    ]


def _tiled(bucket: str, evaluator: Evaluator) -> Check:
    """Check that the rows of a split score each target exactly once, given the token before it."""
    tokens = evaluator.split.tokens
    positions: Any = SimpleNamespace(tokens=tokens, read=np.arange)  # a dummy split: each token's id is its position
    numbered = replace(evaluator, split=positions, document_mask=False)
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
    found = f"{twice:,} tokens scored more than once, {never:,} not scored, {wrong:,} predicted from a wrong token"
    return Check(name, False, f"{found}; rows {how}")


def _check_causal(lines: Sequence[Batch], score: Callable[[Batch], float], vocab_size: int, draw: Any) -> Check:
    """Check that a target's loss does not depend on the target itself or on later tokens."""
    largest, looks = 0.0, 0
    for line in lines:
        scored = np.flatnonzero(line[0, 1] != IGNORED)
        for place in np.unique(draw.choice(scored, min(POSITIONS, len(scored)), replace=False)).tolist():
            alone = line.copy()
            alone[0, 1] = IGNORED
            alone[0, 1, place] = line[0, 1, place]
            other = alone.copy()
            later = other[0, 0, place + 1 :]
            later[:] = (later + draw.integers(1, max(2, vocab_size), len(later))) % vocab_size
            largest, looks = max(largest, abs(score(alone) - score(other))), looks + 1
    result = f"{looks} tokens in {len(lines)} rows, largest change in loss {largest:.2g} nats"
    return Check("predictions depend only on earlier tokens", bool(largest <= SAME_SHAPE_TOLERANCE), result)


def _check_probabilities(
    lines: Sequence[Batch],
    score: Callable[[Batch], float],
    probabilities: Probe,
    vocab_size: int,
    head_rows: int,
    tolerance: float,
) -> list[Check]:
    """Check that losses match the probabilities that the model computes without targets, and that probabilities sum to one."""
    largest, least, most = 0.0, np.inf, -np.inf
    for line in lines:
        one = line.copy()
        one[0, 2:] = 0  # treat the row as one document, because the probabilities are computed without a document mask
        scored = np.flatnonzero(one[0, 1] != IGNORED)
        first, last = int(scored[0]), int(scored[-1])
        ids = [*one[0, 0, : last + 1].tolist(), int(one[0, 1, last])]
        chosen = probabilities([ids], [first + 1], 1)[0].chosen[scored - first]
        largest = max(largest, abs(score(one) + float(chosen.astype(np.float64).sum())) / len(scored))
        total = float(np.exp(probabilities([ids], [last + 1], vocab_size)[0].top.astype(np.float64)).sum())
        least, most = min(least, total), max(most, total)
    difference = f"{len(lines)} rows, largest difference {largest:.2g} nats per token"
    padded = head_rows > vocab_size  # padding rows of the head get some of the probability
    passed = most <= 1 + SAME_SHAPE_TOLERANCE and least >= (0 if padded else 1 - SAME_SHAPE_TOLERANCE)
    result = f"sum over all {vocab_size:,} tokens at the end of {len(lines)} rows: {least:.6f} to {most:.6f}"
    rest = f"; {head_rows - vocab_size:,} padding rows in the head" if padded else ""
    return [
        Check("losses match the model's probabilities", bool(largest <= tolerance), difference),
        Check("probabilities sum to one", bool(passed), result + rest),
    ]
