"""Many rows of tokens scored by a trained model: those of about one length together, as many as the memory holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ingot.errors import RunError
from ingot.generate.scores import RowScores
from ingot.trained.model import LoadedModel

BATCH_TOKENS = 1 << 14  # of all rows that are scored at once, filling included


def score_rows(
    model: LoadedModel,
    rows: Sequence[Sequence[int]],
    firsts: Sequence[int],
    top: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[RowScores]:
    """Log-probabilities of each row's tokens from its place `first` (1 or more) on, in the order of the rows."""
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))  # the largest first: what does not fit is known at once
    found: dict[int, RowScores] = {}
    most = BATCH_TOKENS
    while order:
        part = order[: max(1, most // len(rows[order[0]]))]
        try:
            scores = model.backend.score_rows([rows[i] for i in part], [firsts[i] for i in part], top)
        except MemoryError:
            if len(part) == 1:
                raise RunError("the device's memory does not hold one row; use another device") from None
            most //= 2
            continue
        found |= dict(zip(part, scores, strict=True))
        order = order[len(part) :]
        progress(len(found), len(rows))
    return [found[i] for i in range(len(rows))]
