"""Which rows of the token stream a step reads: a pure function of the cursor, the same for any number of ranks.

A run reads samples 0, 1, 2, ... A sample number decides a window of the stream; a step takes the next `rows` numbers and every
rank computes its share of them. So a run may move to other ranks between two steps and every window is still used exactly once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ingot.data.dataset import Split
from ingot.errors import DataError
from ingot.runtime.ranks import Ranks

Rows = NDArray[np.int32]  # (rows, seq_len + 1): inputs and, one place further, their targets
Lender = Callable[[tuple[int, int]], Rows]


class Order(Protocol):
    """An endless numbered sequence of windows."""

    def starts(self, samples: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Where the windows of these sample numbers begin."""

    def epoch(self, sample: int) -> int:
        """How many times the data had been read completely before this sample."""


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

    def starts(self, samples: NDArray[np.uint64]) -> NDArray[np.int64]:
        # The remainder favours low starts by less than one part in 2**32 for any stream that fits a disk.
        draws = _scramble(samples ^ np.uint64(mix(self.seed, 0)))
        return (draws % np.uint64(self.tokens - self.seq_len)).astype(np.int64)


ORDERS: dict[str, Callable[[int, int, int], Order]] = {"shuffle": Shuffle, "random": Random}


def make_order(sampling: str, split: Split, seq_len: int, seed: int) -> Order:
    """The order that `data.sampling` names, over one split."""
    if split.tokens <= seq_len:
        raise DataError(
            f"the text has {split.tokens:,} tokens and a row needs data.seq_len + 1 = {seq_len + 1:,}; "
            "use more text or shorter rows"
        )
    return ORDERS[sampling](split.tokens, seq_len, seed)


def permuted(places: NDArray[np.uint64], size: int, key: int) -> NDArray[np.uint64]:
    """The images of `places` under a pseudo-random permutation of range(size), without a table.

    Four Feistel rounds permute the next larger power of four; an image outside the range is permuted again until it falls inside.
    """
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(mix(key, i)) for i in range(4)]
    out = places.astype(np.uint64)
    outside = np.ones(out.shape, dtype=bool)
    while outside.any():
        left, right = out[outside] >> half, out[outside] & mask
        for k in keys:
            left, right = right, left ^ (_scramble(right ^ k) & mask)
        out[outside] = (left << half) | right
        outside = out >= np.uint64(size)
    return out


def mix(*numbers: int) -> int:
    """One well-scrambled 64-bit number out of several."""
    state = np.uint64(0x9E3779B97F4A7C15)
    for number in numbers:
        state = _scramble(np.atleast_1d(state ^ np.uint64(number & 0xFFFFFFFFFFFFFFFF)))[0]
    return int(state)


def _scramble(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64: a bijection of 64-bit numbers that leaves no pattern of its input."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def read_rows(split: Split, starts: NDArray[np.int64], out: Rows) -> Rows:
    """Copy the windows that begin at `starts` into the rows of `out`; their length is out's."""
    for row, start in zip(out, starts.tolist(), strict=True):
        split.read(start, start + len(row), row)
    return out


class RowReader:
    """One rank's rows of step after step, read ahead by a thread into buffers that `lend` makes.

    A buffer is written again only after `next` was called twice more, so a copy to a device may still be under way meanwhile.
    """

    ahead = 2

    def __init__(self, split: Split, order: Order, rows: int, seq_len: int, ranks: Ranks, sample: int, lend: Lender):
        self._split, self._order, self._rows, self._share = split, order, rows, ranks.share(rows)
        self._sample = sample
        self._free: queue.Queue[Rows] = queue.Queue()
        for _ in range(self.ahead + 2):
            self._free.put(lend((len(self._share), seq_len + 1)))
        self._ready: queue.Queue[Rows | Exception] = queue.Queue(maxsize=self.ahead)
        self._lent: list[Rows] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._read, name="read-ahead", daemon=True)
        self._thread.start()

    def next(self) -> Rows:
        """The rows of the next step."""
        rows = self._ready.get()
        if isinstance(rows, Exception):
            self._ready.put(rows)  # for whoever asks again: nobody will ever put another
            raise rows
        self._lent.append(rows)
        if len(self._lent) > 2:
            self._free.put(self._lent.pop(0))
        return rows

    def close(self) -> None:
        """End the thread; what it read ahead is dropped."""
        self._closing.set()
        while self._thread.is_alive():
            with suppress(queue.Empty):
                self._ready.get_nowait()
            self._free.put(np.empty((0, 0), np.int32))
            self._thread.join(timeout=0.05)

    def _read(self) -> None:
        try:
            while not self._closing.is_set():
                buffer = self._free.get()
                if self._closing.is_set():
                    return
                samples = np.arange(self._sample + self._share.start, self._sample + self._share.stop, dtype=np.uint64)
                self._ready.put(read_rows(self._split, self._order.starts(samples), buffer))
                self._sample += self._rows
        except Exception as error:  # handed to the loop, which raises it at its next step
            self._ready.put(error)
