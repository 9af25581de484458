"""Redrawn rows: every epoch concatenates the documents in a new order, cuts rows from a random offset and shuffles them.

The contents of a row depend only on the seed, the epoch and the row number. The concatenated stream is never stored: memory holds
the end of each document (8 bytes per document) for one epoch, and tokens are copied from the files when a row is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ingot.data.loading.order import ByNumber
from ingot.data.store.documents import Documents
from ingot.runtime.seeds import mix, permuted
from ingot.runtime.tensors import IGNORED, Batch

DOCUMENTS, ROWS, OFFSET = 0, 1, 2  # mixed into the seed so that the three draws are independent
PART = 1 << 20  # documents drawn at a time


@dataclass(frozen=True)
class _Join:
    """The documents of an epoch, concatenated into a ring."""

    ends: NDArray[np.int64]  # end of each document, in the epoch's order
    offset: int  # position of the first row in the ring


class RedrawnRows(ByNumber):
    """Rows of `seq_len` tokens from documents that are reshuffled each epoch; every token is an input once per epoch.

    The documents form a ring: a row may begin inside a document that another row ends with, and the target of the last token is
    the first. The last row of an epoch is padded with positions without targets. Tokens that a document repeats from the previous
    one are left out.
    """

    def __init__(self, split: Documents, seq_len: int, seed: int, documents: bool = False):
        self.seq_len, self.planes = seq_len, 3 if documents else 2
        self._split, self._seed = split, seed
        self._starts, self._repeats = split.document_starts(), split.document_repeats()
        self._documents = len(self._starts) - 1
        self.tokens = split.tokens - (0 if self._repeats is None else int(self._repeats.sum(dtype=np.int64)))
        self._rows = -(-self.tokens // seq_len)
        self._join = lru_cache(maxsize=1)(self._draw)  # one entry is enough: rows are read epoch by epoch

    def epoch(self, sample: int) -> int:
        return sample // self._rows

    def available(self, samples: range, epochs: int) -> int:
        return max(0, min(samples.stop, epochs * self._rows) - samples.start)

    def read(self, samples: range, share: range, batch: Batch) -> int:
        numbers = np.arange(samples.start, samples.stop, dtype=np.uint64)
        epochs, rows = np.divmod(numbers, np.uint64(self._rows))
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            rows[here] = permuted(rows[here], self._rows, key=mix(self._seed, epoch, ROWS))
            mine = np.flatnonzero(here[share.start : share.stop])
            if len(mine):
                self._fill(batch, mine, self._join(epoch), rows[share.start + mine].astype(np.int64), epoch)
        empty = self._rows * self.seq_len - self.tokens  # padding positions in the last row of an epoch
        return len(samples) * self.seq_len - empty * int(np.count_nonzero(rows == self._rows - 1))

    def _fill(self, batch: Batch, lines: NDArray[np.int64], join: _Join, rows: NDArray[np.int64], epoch: int) -> None:
        """Write rows of one epoch, given by their numbers in the ring, into lines of the batch."""
        counts = np.minimum(self.seq_len, self.tokens - rows * self.seq_len)
        begins = (join.offset + rows * self.seq_len) % self.tokens
        stops = begins + counts + 1  # one past the last target
        first = np.searchsorted(join.ends, begins, side="right")
        # A row that wraps around the ring keeps counting documents: with D documents, index D is index 0 again.
        last = np.searchsorted(join.ends, (stops - 1) % self.tokens, side="right") + (stops > self.tokens) * self._documents
        sizes = last - first + 1
        places = np.repeat(first - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
        starts, lengths = self._chosen(places % self._documents, epoch)
        # Tokens of each row's first document that precede the row.
        skipped = begins - join.ends[first] + lengths[np.cumsum(sizes) - sizes]
        window, at = np.empty(self.seq_len + 1, np.int32), 0
        for line, count, skip, size in zip(lines.tolist(), counts.tolist(), skipped.tolist(), sizes.tolist(), strict=True):
            pieces = zip(starts[at : at + size].tolist(), lengths[at : at + size].tolist(), strict=True)
            self._fill_line(batch[line], window[: count + 1], skip, pieces)
            at += size

    def _fill_line(self, line: Batch, window: NDArray[np.int32], skip: int, pieces: Iterable[tuple[int, int]]) -> None:
        """Write a row from the start and length of each of its documents, without the first `skip` tokens of the first one."""
        filled, count, number = 0, len(window) - 1, 0
        for start, length in pieces:
            stop = min(filled + length - skip, count + 1)
            self._split.read(start + skip, start + skip + stop - filled, window[filled:stop])
            if self.planes == 3:
                line[2, filled:stop] = number
                number += stop > filled
            filled, skip = stop, 0
        line[0, :count], line[1, :count] = window[:-1], window[1:]
        line[0, count:], line[1, count:] = 0, IGNORED
        if self.planes == 3:
            line[2, count:] = number  # padding attends only to itself

    def _draw(self, epoch: int) -> _Join:
        ends = np.empty(self._documents, np.int64)
        for first in range(0, self._documents, PART):
            places = np.arange(first, min(first + PART, self._documents))
            ends[places] = self._chosen(places, epoch)[1]
        return _Join(np.cumsum(ends, out=ends), mix(self._seed, epoch, OFFSET) % self.tokens)

    def _chosen(self, places: NDArray[np.int64], epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the starts and lengths of the documents at the given positions of an epoch's order."""
        chosen = permuted(places.astype(np.uint64), self._documents, key=mix(self._seed, epoch, DOCUMENTS))
        starts, stops = (self._starts[chosen + np.uint64(one)].astype(np.int64) for one in (0, 1))
        if self._repeats is not None:
            starts += self._repeats[chosen]
        return starts, stops - starts
