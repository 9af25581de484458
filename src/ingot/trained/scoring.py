"""Many rows of tokens scored by a model: those of about one length together, as many as the memory holds.

Ranks share the batches, and each of them calls the model as often as the others: a sharded model gathers inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ingot.backends.base import Inference
from ingot.errors import Interrupted, RunError
from ingot.generate.scores import RowScores

BATCH_TOKENS = 1 << 14  # of all rows that are scored at once, filling included


def score_rows(
    backend: Inference,
    rows: Sequence[Sequence[int]],
    firsts: Sequence[int],
    top: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[RowScores]:
    """Log-probabilities of each row's tokens from its place `first` (1 or more) on, in the order of the rows; of one rank."""
    found: dict[int, RowScores] = {}
    for done, scores in score_batches(backend, rows, firsts, top):
        found |= scores
        progress(done, len(rows))
    return [found[i] for i in range(len(rows))]


def score_batches(
    backend: Inference,
    rows: Sequence[Sequence[int]],
    firsts: Sequence[int],
    top: int = 1,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, dict[int, RowScores]]]:
    """How many rows the ranks have scored so far, and the scores of those that this one has just scored, by their numbers.

    Every rank calls it with the same rows; Interrupted, on all of them, where `stop` says so on any.
    """
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))  # the largest first: what does not fit is known at once
    most, ranks = BATCH_TOKENS, backend.ranks
    while order:
        parts, end = [], 0
        for _ in range(ranks.world_size):
            # Where nothing is left for a rank it scores the last row again, which nobody asks for.
            longest = len(rows[order[min(end, len(order) - 1)]])
            parts.append(order[end : end + max(1, most // longest)])
            end += len(parts[-1])
        mine = parts[ranks.rank]
        scored = mine or order[-1:]
        full = False
        try:
            scores = backend.score_rows([rows[i] for i in scored], [firsts[i] for i in scored], top)
        except MemoryError:
            full = True
        anybody_full, stopped = backend.maximum([full, stop()])
        if stopped:
            raise Interrupted
        if anybody_full:
            if all(len(part) <= 1 for part in parts):
                raise RunError("the device's memory does not hold one row; use another device")
            most //= 2
            continue
        order = order[end:]
        yield len(rows) - len(order), dict(zip(mine, scores, strict=False))
