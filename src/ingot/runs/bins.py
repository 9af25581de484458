"""The numbers of any count of lines in a bounded number of bins: minimum, mean and maximum of neighbours.

A bin holds `stride` lines; when all bins are full, pairs become one and the stride doubles. So what the bins say does not depend
on the pieces in which the lines came, and a line costs the same at the beginning and after a million others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MOST_BINS = 768  # a chart is about as many pixels wide; 1,000 further lines change at most 884 bins

Columns = NDArray[np.float64]


class Bins:
    """Bins of several columns; a number that is not finite counts as none."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.lines, self.stride = 0, 1
        shape = (len(self.names), MOST_BINS)
        self.low, self.high = np.full(shape, np.nan), np.full(shape, np.nan)  # (columns, bins)
        self._total, self._count = np.zeros(shape), np.zeros(shape)

    @property
    def used(self) -> int:
        """How many bins hold a line."""
        return -(-self.lines // self.stride)

    @property
    def mean(self) -> Columns:
        """The mean of each column in each bin, nan where there is none."""
        return np.divide(self._total, self._count, out=np.full_like(self._total, np.nan), where=self._count > 0)

    def push(self, columns: Columns) -> int:
        """Take further lines, (columns, lines), and return the first bin that has changed."""
        count = columns.shape[1]
        first = self.lines // self.stride
        while (self.lines + count - 1) // self.stride >= MOST_BINS:
            self._join_pairs()
            first = 0
        place = (self.lines + np.arange(count)) // self.stride
        for row, values in enumerate(columns):
            known = np.isfinite(values)
            at, found = place[known], values[known]
            np.fmin.at(self.low[row], at, found)
            np.fmax.at(self.high[row], at, found)
            np.add.at(self._total[row], at, found)
            np.add.at(self._count[row], at, 1.0)
        self.lines += count
        return first

    def _join_pairs(self) -> None:
        rest = (len(self.names), MOST_BINS // 2)
        empty, zeros = np.full(rest, np.nan), np.zeros(rest)
        self.low = np.hstack([np.fmin(self.low[:, ::2], self.low[:, 1::2]), empty])
        self.high = np.hstack([np.fmax(self.high[:, ::2], self.high[:, 1::2]), empty])
        self._total = np.hstack([self._total[:, ::2] + self._total[:, 1::2], zeros])
        self._count = np.hstack([self._count[:, ::2] + self._count[:, 1::2], zeros])
        self.stride *= 2

    def pack(self) -> Columns:
        """All numbers of the used bins, to be kept."""
        return np.stack([part[:, : self.used] for part in (self.low, self.high, self._total, self._count)])

    def unpack(self, packed: Columns, lines: int, stride: int) -> None:
        """Take over what was kept; ValueError where it does not fit."""
        self.lines, self.stride = lines, stride
        if packed.shape != (4, len(self.names), self.used) or self.used > MOST_BINS:
            raise ValueError("these are bins of another kind")
        for part, known in zip((self.low, self.high, self._total, self._count), packed, strict=True):
            part[:, : self.used] = known
