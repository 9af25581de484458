"""What a token teaches, apart from how many of them a budget buys: the training losses of runs after as many tokens."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from ingot.runs.metrics import is_number

Losses = Mapping[int, float]  # of training, by the tokens that a run had seen


def losses_of(records: Iterable[Mapping[str, Any]]) -> Losses:
    """The training losses among the records of a run."""
    steps = [record for record in records if record.get("kind") == "train"]
    return {int(r["tokens"]): float(r["loss"]) for r in steps if is_number(r.get("tokens")) and is_number(r.get("loss"))}


def losses_apart(pairs: Iterable[tuple[Losses, Losses]]) -> float | None:
    """How far the losses of second runs lie above those of the first, on average over the later half of what both noted.

    None: no two of them have noted a loss after as many tokens.
    """
    found = []
    for first, second in pairs:
        common = sorted(first.keys() & second.keys())
        if late := common[len(common) // 2 :]:
            found.append(statistics.fmean(second[tokens] - first[tokens] for tokens in late))
    return statistics.fmean(found) if found else None
