"""How long the steps of a run took, by its metrics.jsonl: percentiles, and where it stood still.

A record says how many seconds were trained before it, so the time between two is that of the steps between them; evaluation and
saves are not in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ingot.runs.metrics import is_number

STALL = 3.0  # times the median that a step takes where it is called a stall
SHARES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True)
class Stall:
    """A stretch of steps that took far longer than usual."""

    step: int  # the last of them
    seconds: float  # more than usual


@dataclass(frozen=True)
class Timing:
    """Seconds per step: percentiles by name, and the stalls, longest first."""

    percentiles: dict[str, float]
    stalls: list[Stall]


def step_times(records: Iterable[Mapping[str, Any]]) -> Timing:
    """The timing of a run; empty where it has not two records of one session."""
    trained = [record for record in records if record.get("kind") == "train"]
    found: list[tuple[int, float, int]] = []  # the step, the seconds of one, how many
    for before, after in pairwise(trained):
        numbers: list[Any] = [one.get(name) for name in ("step", "elapsed_seconds") for one in (before, after)]
        if before.get("session") != after.get("session") or not all(map(is_number, numbers)):
            continue
        steps, seconds = int(numbers[1]) - int(numbers[0]), float(numbers[3]) - float(numbers[2])
        if steps > 0 and seconds >= 0:
            found.append((int(numbers[1]), seconds / steps, steps))
    if not found:
        return Timing({}, [])
    each = sorted(one for _, one, _ in found)
    usual = statistics.median(each)
    slow = [Stall(step, (one - usual) * steps) for step, one, steps in found if one > STALL * usual]
    percentiles = {name: each[min(len(each) - 1, int(share * len(each)))] for name, share in SHARES.items()}
    return Timing(percentiles, sorted(slow, key=lambda stall: -stall.seconds))
