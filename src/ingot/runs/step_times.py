"""How long steps took, of lines that come bit by bit, in bounded memory; `timing.step_times` says it of all lines at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.runs.timing import SHARES, STALL, Stall, Timing

WIDTH, SHORTEST, CLASSES = 0.01, 1e-6, 2800  # classes of times by their logarithm: from a microsecond to 15 days
MOST_SLOW = 64  # stretches that are remembered


class StepTimes:
    """How many steps took how long, and the slowest stretches."""

    def __init__(self) -> None:
        self.counts = np.zeros(CLASSES)
        self.slowest: list[tuple[int, float, int]] = []  # the step, the seconds of one, how many

    def push(self, step: NDArray[np.float64], seconds: NDArray[np.float64], steps: NDArray[np.float64]) -> None:
        """Take stretches of steps: the last of each, the seconds of one, how many."""
        classes = np.log(np.maximum(seconds, SHORTEST) / SHORTEST) / WIDTH
        np.add.at(self.counts, np.minimum(classes, CLASSES - 1).astype(int), 1.0)
        for at in np.argsort(seconds)[-MOST_SLOW:]:
            self.slowest.append((int(step[at]), float(seconds[at]), int(steps[at])))
        self.slowest = sorted(self.slowest, key=lambda one: -one[1])[:MOST_SLOW]

    def recall(self, counts: NDArray[np.float64], slowest: Sequence[Sequence[Any]]) -> None:
        """Take over what was kept; ValueError where it does not fit."""
        if counts.shape != (CLASSES,):
            raise ValueError("these are times of another kind")
        self.counts = counts
        self.slowest = [(int(step), float(seconds), int(steps)) for step, seconds, steps in slowest]

    def timing(self) -> Timing:
        """Percentiles, right to a hundredth of their value, and the slowest of the stalls."""
        if not (total := self.counts.sum()):
            return Timing({}, [])
        upto = np.cumsum(self.counts)
        places = {name: int(np.searchsorted(upto, share * total, side="right")) for name, share in SHARES.items()}
        percentiles = {name: SHORTEST * float(np.exp((min(place, CLASSES - 1) + 0.5) * WIDTH)) for name, place in places.items()}
        usual = percentiles["p50"]
        slow = [Stall(step, (each - usual) * steps) for step, each, steps in self.slowest if each > STALL * usual]
        return Timing(percentiles, sorted(slow, key=lambda stall: -stall.seconds))
