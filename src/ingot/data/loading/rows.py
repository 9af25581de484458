"""Which rows of the token stream a step reads: a pure function of the cursor, the same for any number of ranks.

A run reads samples 0, 1, 2, ... A sample number decides a row; a step takes the next numbers and every rank computes its share of
them. So a run may move to other ranks between two steps and every row is still used exactly once.
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

from ingot.data.store.dataset import Split
from ingot.runtime.ranks import Ranks

IGNORED = -1  # a target that is not predicted
Batch = NDArray[np.int32]  # (rows, planes, seq_len): tokens, targets and, with a document mask, the document of each token
Lender = Callable[[tuple[int, int, int]], Batch]


class Rows(Protocol):
    """An endless numbered sequence of rows."""

    @property
    def planes(self) -> int: ...

    @property
    def seq_len(self) -> int: ...

    def read(self, samples: range, share: range, batch: Batch) -> int:
        """Write those of the samples whose places are in `share`, and say how many targets all of them have."""

    def epoch(self, sample: int) -> int:
        """How many times the data had been read completely before this sample."""


class Order(Protocol):
    """Where the windows of a stream begin, by sample number."""

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


@dataclass(frozen=True)
class Stream:
    """The tokens in their order, as golf reads them: a step is `spans` stretches, each of one token more than it trains on.

    The token more is the last target of its stretch and never an input. Behind the last token comes the first again.
    """

    tokens: int
    seq_len: int
    rows: int  # in a step
    spans: int

    def epoch(self, sample: int) -> int:
        return int(self._place(np.array([sample], np.uint64))[0]) // self.tokens

    def starts(self, samples: NDArray[np.uint64]) -> NDArray[np.int64]:
        return self._place(samples) % self.tokens

    def _place(self, samples: NDArray[np.uint64]) -> NDArray[np.int64]:
        span, row = np.divmod(samples.astype(np.int64), self.rows // self.spans)
        return span * (self.rows // self.spans * self.seq_len + 1) + row * self.seq_len


@dataclass(frozen=True)
class Windows:
    """Rows that are stretches of the stream, wherever documents begin."""

    split: Split
    order: Order
    seq_len: int
    documents: bool = False

    @property
    def planes(self) -> int:
        return 3 if self.documents else 2

    def epoch(self, sample: int) -> int:
        return self.order.epoch(sample)

    def read(self, samples: range, share: range, batch: Batch) -> int:
        mine = samples[share.start : share.stop]
        starts = self.order.starts(np.arange(mine.start, mine.stop, dtype=np.uint64))
        window = np.empty(self.seq_len + 1, np.int32)
        for row, start in zip(batch, starts.tolist(), strict=True):
            self._read(start, window)
            row[0], row[1] = window[:-1], window[1:]
            if self.documents:
                row[2] = document_numbers(self.split, start, self.seq_len)
        return len(samples) * self.seq_len

    def _read(self, start: int, out: NDArray[np.int32]) -> None:
        stop = min(start + len(out), self.split.tokens)
        self.split.read(start, stop, out)
        if stop - start < len(out):
            self._read(0, out[stop - start :])


def document_numbers(split: Split, start: int, length: int) -> NDArray[np.int32]:
    """For every token of a window, how many documents have begun in it so far; behind the end of the stream comes its start."""
    starts = split.document_starts()
    numbers = np.zeros(length, np.int32)
    done = 0
    while done < length:
        here = min(length - done, split.tokens - start)
        first, last = np.searchsorted(starts, [start, start + here])
        numbers[np.asarray(starts[first:last]).astype(np.int64) - start + done] = 1
        done, start = done + here, 0
    return np.cumsum(numbers, dtype=np.int32)


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


@dataclass(frozen=True)
class Portion:
    """What one rank reads for one step, and what is true of the step as a whole."""

    batch: Batch
    targets: int  # in the step, over all ranks
    epoch: int


class RowReader:
    """One rank's rows of step after step, read ahead by a thread into buffers that `lend` makes.

    A buffer is written again only after `next` was called twice more, so a copy to a device may still be under way meanwhile.
    """

    ahead = 2

    def __init__(self, source: Rows, rows: int, ranks: Ranks, sample: int, lend: Lender):
        self._source, self._rows, self._share = source, rows, ranks.share(rows)
        self._sample = sample
        self._free: queue.Queue[Batch] = queue.Queue()
        for _ in range(self.ahead + 2):
            self._free.put(lend((len(self._share), source.planes, source.seq_len)))
        self._ready: queue.Queue[Portion | Exception] = queue.Queue(maxsize=self.ahead)
        self._lent: list[Batch] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._read, name="read-ahead", daemon=True)
        self._thread.start()

    def next(self) -> Portion:
        """The rows of the next step."""
        portion = self._ready.get()
        if isinstance(portion, Exception):
            self._ready.put(portion)  # for whoever asks again: nobody will ever put another
            raise portion
        self._lent.append(portion.batch)
        if len(self._lent) > 2:
            self._free.put(self._lent.pop(0))
        return portion

    def close(self) -> None:
        """End the thread; what it read ahead is dropped."""
        self._closing.set()
        while self._thread.is_alive():
            with suppress(queue.Empty):
                self._ready.get_nowait()
            self._free.put(np.empty((0, 0, 0), np.int32))
            self._thread.join(timeout=0.05)

    def _read(self) -> None:
        try:
            while not self._closing.is_set():
                buffer = self._free.get()
                if self._closing.is_set():
                    return
                self._ready.put(read_portion(self._source, self._sample, self._rows, self._share, buffer))
                self._sample += self._rows
        except Exception as error:  # handed to the loop, which raises it at its next step
            self._ready.put(error)


def read_portion(source: Rows, sample: int, rows: int, share: range, buffer: Batch) -> Portion:
    """Read a rank's share of the step that begins at `sample`."""
    targets = source.read(range(sample, sample + rows), share, buffer)
    return Portion(buffer, targets, source.epoch(sample + rows))
