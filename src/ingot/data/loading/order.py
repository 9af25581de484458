"""Row order: the start of a row is a pure function of its sample number and does not depend on the world size.

A run reads samples 0, 1, 2, ... Each sample number determines a row. A step takes the next sample numbers, and every rank
processes its share of the rows. A run can therefore change its world size between two steps and still use every row exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ingot.runtime.seeds import mix, permuted, scramble

Places = Mapping[str, int]  # bucket name -> number of rows read from the bucket so far


# A front end that emulates another program (compat/) replaces this advice with one that names that program's option.
GO_ON_WITHOUT_BUCKET = "set data.exhausted=renormalise or raise data.epochs"


class DataExhausted(Exception):
    """Raised when a step has no rows left: all epochs are done, or the mix draws from a bucket whose epochs are done."""

    def __init__(self, bucket: str | None = None) -> None:
        super().__init__(bucket)
        self.bucket = bucket

    @property
    def reason(self) -> str:
        """Return the stop reason recorded in state.json and result.json."""
        return "data" if self.bucket is None else f"bucket_exhausted:{self.bucket}"

    def told(self, epochs: int | None) -> str:
        """Return the stop reason as a message for the user."""
        if self.bucket is None:
            return f"the data is exhausted: all of its epochs (data.epochs={epochs}) have been read"
        return (
            f"the bucket {self.bucket} is exhausted (data.epochs={epochs}) but the mix still draws from it: "
            f"{GO_ON_WITHOUT_BUCKET}, and continue this run"
        )


class ByNumber:
    """Base class for rows that depend only on the sample number, not on the phase or on how much of each bucket was read."""

    def at(self, phase: int, places: Places) -> Self:
        return self

    def after(self, samples: range) -> tuple[int, Places]:
        return samples.stop, {}


@dataclass(frozen=True)
class Shuffle:
    """Non-overlapping windows that tile the stream; each epoch reads every window once, in a new random order."""

    tokens: int
    seq_len: int
    seed: int

    @property
    def windows(self) -> int:
        return (self.tokens - 1) // self.seq_len

    def epoch(self, sample: int) -> int:
        """Return the number of complete passes over the data before this sample."""
        return sample // self.windows

    def rows_in(self, epochs: int) -> int:
        """Return the number of rows in `epochs` epochs."""
        return epochs * self.windows

    def starts(self, samples: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the start positions of the windows with these sample numbers."""
        epochs, places = np.divmod(samples, np.uint64(self.windows))
        windows = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            windows[here] = permuted(places[here], self.windows, key=mix(self.seed, int(epoch)))
        return windows.astype(np.int64) * self.seq_len


@dataclass(frozen=True)
class Random:
    """Windows at random positions, drawn independently with replacement, as in nanoGPT."""

    tokens: int
    seq_len: int
    seed: int

    def epoch(self, sample: int) -> int:
        return sample * self.seq_len // self.tokens

    def rows_in(self, epochs: int) -> None:
        """Return None: this order never ends."""

    def starts(self, samples: NDArray[np.uint64]) -> NDArray[np.int64]:
        # The modulo favours low start positions by less than one part in 2**32 for any stream that fits on a disk.
        draws = scramble(samples ^ np.uint64(mix(self.seed, 0)))
        return (draws % np.uint64(self.tokens - self.seq_len)).astype(np.int64)


@dataclass(frozen=True)
class Sequential:
    """Tokens in stream order, as golf reads them: a step consists of spans, and a span has one more token than it has inputs.

    The extra token is the last target of the span and is never an input. After the end of the stream, reading starts again.
    """

    tokens: int
    seq_len: int
    rows: int  # rows per step
    spans: int | Sequence[int]  # number of equal spans per step, or the rows per span as a list that repeats

    def epoch(self, sample: int) -> int:
        return int(self._place(np.array([sample], np.uint64))[0]) // self.tokens

    def rows_in(self, epochs: int) -> int:
        lengths = self._lengths
        turns, rest = divmod(epochs * self.tokens, sum(lengths) * self.seq_len + len(lengths))
        rows = turns * sum(lengths)
        for length in lengths:
            rows += min(length, max(0, rest - 1) // self.seq_len)
            rest -= length * self.seq_len + 1
        return rows

    def starts(self, samples: NDArray[np.uint64]) -> NDArray[np.int64]:
        return self._place(samples) % self.tokens

    @property
    def _lengths(self) -> Sequence[int]:
        """Return the number of rows in each span; the list repeats cyclically."""
        return [self.rows // self.spans] if isinstance(self.spans, int) else self.spans

    def _place(self, samples: NDArray[np.uint64]) -> NDArray[np.int64]:
        lengths = self._lengths
        ends = np.cumsum(lengths)
        turn, row = np.divmod(samples.astype(np.int64), ends[-1])
        spans = turn * len(lengths) + np.searchsorted(ends, row, side="right")  # number of spans that end before the row
        return (turn * ends[-1] + row) * self.seq_len + spans


Order = Shuffle | Random | Sequential
