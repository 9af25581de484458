"""Where a row begins: a pure function of its number, the same for any number of ranks.

A run reads samples 0, 1, 2, ... A sample number decides a row; a step takes the next numbers and every rank computes its share of
them. So a run may move to other ranks between two steps and every row is still used exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ingot.runtime.seeds import mix, permuted, scramble

Places = Mapping[str, int]  # by bucket, how many of its rows have been read


GO_ON_WITHOUT_BUCKET = "set data.exhausted=renormalise or raise data.epochs"  # a door has words of its own for it


class DataExhausted(Exception):
    """A step cannot be read: all epochs are over, or those of a bucket that the mix asks for."""

    def __init__(self, bucket: str | None = None) -> None:
        super().__init__(bucket)
        self.bucket = bucket

    @property
    def reason(self) -> str:
        """Why the run ends, as state.json and result.json tell it."""
        return "data" if self.bucket is None else f"bucket_exhausted:{self.bucket}"

    def told(self, epochs: int | None) -> str:
        """Why the run ends, for people."""
        if self.bucket is None:
            return f"the data is at its end: data.epochs={epochs}"
        return (
            f"the bucket {self.bucket} is at its end (data.epochs={epochs}) and the mix asks for more of it: "
            f"{GO_ON_WITHOUT_BUCKET}, and continue this run"
        )


class ByNumber:
    """Rows of which a sample number says it all, whatever the phase and however much of each bucket was read."""

    def at(self, phase: int, places: Places) -> Self:
        return self

    def after(self, samples: range) -> tuple[int, Places]:
        return samples.stop, {}


class Order(Protocol):
    """Where the windows of a stream begin, by sample number."""

    def starts(self, samples: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Where the windows of these sample numbers begin."""

    def epoch(self, sample: int) -> int:
        """How many times the data had been read completely before this sample."""

    def rows_in(self, epochs: int) -> int | None:
        """How many rows so many epochs have; None: epochs have no end."""


@dataclass(frozen=True)
class Shuffle:
    """Windows that tile the stream, each once per epoch, in an order of its own for every epoch."""

    tokens: int
    seq_len: int
    seed: int

    @property
    def windows(self) -> int:
        return (self.tokens - 1) // self.seq_len

    def epoch(self, sample: int) -> int:
        return sample // self.windows

    def rows_in(self, epochs: int) -> int:
        return epochs * self.windows

    def starts(self, samples: NDArray[np.uint64]) -> NDArray[np.int64]:
        epochs, places = np.divmod(samples, np.uint64(self.windows))
        windows = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            windows[here] = permuted(places[here], self.windows, key=mix(self.seed, int(epoch)))
        return windows.astype(np.int64) * self.seq_len


@dataclass(frozen=True)
class Random:
    """Windows that begin anywhere, drawn independently and with replacement, as nanoGPT draws them."""

    tokens: int
    seq_len: int
    seed: int

    def epoch(self, sample: int) -> int:
        return sample * self.seq_len // self.tokens

    def rows_in(self, epochs: int) -> None:
        return None

    def starts(self, samples: NDArray[np.uint64]) -> NDArray[np.int64]:
        # The remainder favours low starts by less than one part in 2**32 for any stream that fits a disk.
        draws = scramble(samples ^ np.uint64(mix(self.seed, 0)))
        return (draws % np.uint64(self.tokens - self.seq_len)).astype(np.int64)


@dataclass(frozen=True)
class Sequential:
    """The tokens in their order, as golf reads them: a step is several spans, each of one token more than it trains on.

    The token more is the last target of its span and never an input. After the last token comes the first again.
    """

    tokens: int
    seq_len: int
    rows: int  # in a step
    spans: int | Sequence[int]  # equal parts of a step, or the rows of one span after the other, which repeat

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
        """The rows of one span after the other, which repeat."""
        return [self.rows // self.spans] if isinstance(self.spans, int) else self.spans

    def _place(self, samples: NDArray[np.uint64]) -> NDArray[np.int64]:
        lengths = self._lengths
        ends = np.cumsum(lengths)
        turn, row = np.divmod(samples.astype(np.int64), ends[-1])
        spans = turn * len(lengths) + np.searchsorted(ends, row, side="right")  # that end before the row
        return (turn * ends[-1] + row) * self.seq_len + spans
