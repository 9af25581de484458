"""Document packing: which documents share a row, and the target at the end of each document.

Documents are reshuffled every epoch and packed into rows one block at a time by best fit: the longest first, each into the
fullest row that still has room. The rows of a block are then shuffled, because in packing order a batch would hold documents of
similar length. A document longer than a row is split. No token is predicted twice in an epoch, and the target of a token never
depends on which document follows in the row.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ingot.data.loading.order import ByNumber
from ingot.data.store.dataset import Documents
from ingot.errors import DataError
from ingot.runtime.seeds import mix, permuted
from ingot.runtime.tensors import IGNORED, Batch

BLOCK = 1024  # number of documents packed at a time, enough to fill 98 to 99% of the positions in the rows
DRAWN = 64  # number of blocks whose documents are drawn in one call, which is faster than one call per block


class DocumentPart(NamedTuple):
    """A contiguous part of one document, at most one row long."""

    start: int
    length: int
    ends: bool  # True for the last part of a document
    predicted: int = 0  # number of leading inputs whose targets are already predicted in another part


class PackedRows(ByNumber):
    """Documents packed into rows of `seq_len` tokens; with `alone`, every row holds only one document.

    `bos` is the id that begins every document. It is the target of a document's last token, so the model learns to predict the
    end of a document. Without a BOS id the last token has no target. If the split has an EOS id, the EOS token itself is a target
    and everything after it belongs to another document. `overlap` is the number of tokens shared by consecutive parts of a long
    document. `already_read` is a mask of the documents that the first epoch skips.
    """

    def __init__(
        self,
        split: Documents,
        seq_len: int,
        seed: int,
        bos: int | None,
        documents: bool = False,
        overlap: int = 0,
        alone: bool = False,
        already_read: NDArray[np.bool_] | None = None,
    ):
        self.seq_len, self.planes = seq_len, 3 if documents else 2
        self._split, self._seed, self._bos, self._overlap, self._alone = split, seed, bos, overlap, alone
        self._already_read, self._eos = already_read, -1 if split.eos is None else split.eos
        self._starts, self._repeats = split.document_starts(), split.document_repeats()  # memory-mapped for prepared folders
        self._blocks = max(1, -(-(len(self._starts) - 1) // BLOCK))  # blocks per epoch
        self._firsts = [0]  # index of the first sample of each block, as far as rows have been counted
        self._rows_of = lru_cache(maxsize=1)(self._packed)  # keep only the last block's rows and the last group's documents
        self._documents_of = lru_cache(maxsize=1)(self._drawn)
        self._lock = threading.Lock()  # shared by the training loop and the read-ahead thread

    def epoch(self, sample: int) -> int:
        with self._lock:
            return self._block(sample) // self._blocks

    def available(self, samples: range, epochs: int) -> int:
        with self._lock:
            while self._firsts[-1] < samples.stop and len(self._firsts) <= epochs * self._blocks:
                self._count_block()
            # The index of the first sample after the last epoch, if the rows of all epochs have been counted.
            ends = self._firsts[(end := epochs * self._blocks) : end + 1]
            return max(0, min([samples.stop, *ends]) - samples.start)

    def read(self, samples: range, share: range, batch: Batch) -> int:
        with self._lock:
            rows = [self._row(sample) for sample in samples]
        for line, parts in zip(batch, rows[share.start : share.stop], strict=True):
            self._fill(line, parts)
        return sum(self._count(part) for parts in rows for part in parts)

    def _fill(self, line: Batch, parts: list[DocumentPart]) -> None:
        line[0], line[1], at, number = 0, IGNORED, 0, 0
        for part in parts:
            here = slice(at, at + part.length)
            # Unless the document ends with the part, read one more token: the target of the last input.
            tokens = self._split.read(part.start, part.start + part.length + (not part.ends))
            line[0, here] = tokens[: part.length]
            line[1, at : at + len(tokens) - 1] = tokens[1:]
            if part.ends and self._bos is not None:
                line[1, here.stop - 1] = self._bos
            ended = line[0, here] == self._eos  # an EOS token has no successor in its own document
            line[1, here][ended] = IGNORED
            line[1, at : at + part.predicted] = IGNORED
            if self.planes == 3:
                line[2, here] = number + np.cumsum(ended) - ended
                number = int(line[2, here.stop - 1]) + 1
            at = here.stop
        if self.planes == 3:
            line[2, at:] = number  # padding is numbered as a separate document, so it attends only to itself

    def _count(self, part: DocumentPart) -> int:
        """Return the number of targets in a part; there is no target after an EOS token."""
        if self._split.eos is None:
            return max(0, part.length - part.predicted - (part.ends and self._bos is None))
        inner = self._split.read(part.start + part.predicted, part.start + part.length) == self._eos
        if part.ends and self._bos is None:
            inner[-1:] = True  # the last token has no target, whether or not it is EOS
        return len(inner) - int(np.count_nonzero(inner))

    def _row(self, sample: int) -> list[DocumentPart]:
        number = self._block(sample)
        return self._rows_of(number)[sample - self._firsts[number]]

    def _block(self, sample: int) -> int:
        """Return the block number of a sample, counting the rows of all earlier blocks if necessary."""
        while self._firsts[-1] <= sample:
            self._count_block()
            epoch, more = divmod(len(self._firsts) - 1, self._blocks)
            whole = not more and (epoch > 1 or self._already_read is None)
            if whole and self._firsts[-1] == self._firsts[-1 - self._blocks]:
                raise DataError("no document has a token to predict: every document is a single token; use data.sampling=shuffle")
        return bisect_right(self._firsts, sample) - 1

    def _count_block(self) -> None:
        """Count the rows of the next block; a million documents take about a second."""
        epoch, block = divmod(len(self._firsts) - 1, self._blocks)
        _, lengths, *_ = self._parts(epoch, block)
        self._firsts.append(self._firsts[-1] + (len(lengths) if self._alone else rows_filled(lengths, self.seq_len)))

    def _packed(self, number: int) -> list[list[DocumentPart]]:
        """Pack the documents of a block and return its rows in shuffled order."""
        epoch, block = divmod(number, self._blocks)
        parts = [DocumentPart(*part) for part in zip(*(column.tolist() for column in self._parts(epoch, block)), strict=True)]
        lengths = [self.seq_len if self._alone else part.length for part in parts]
        rows = [[parts[i] for i in row] for row in best_fit(lengths, self.seq_len)]
        order = permuted(np.arange(len(rows), dtype=np.uint64), len(rows), key=mix(self._seed, epoch, block * BLOCK, 1))
        return [rows[i] for i in order.tolist()]

    def _drawn(self, epoch: int, group: int) -> NDArray[np.int64]:
        """Return the document indices of a group of DRAWN blocks, in the epoch's order."""
        first, count = group * DRAWN * BLOCK, len(self._starts) - 1
        places = np.arange(first, min(first + DRAWN * BLOCK, count), dtype=np.uint64)
        return permuted(places, count, key=mix(self._seed, epoch)).astype(np.int64)

    def _parts(self, epoch: int, block: int) -> tuple[NDArray[Any], ...]:
        """Split a block's documents and return the parts with at least one target, as one array per field of DocumentPart."""
        at = block % DRAWN * BLOCK
        documents = self._documents_of(epoch, block // DRAWN)[at : at + BLOCK]
        if epoch == 0 and self._already_read is not None:
            documents = documents[~self._already_read[documents]]
        begins, stops = (np.asarray(self._starts[documents + last]).astype(np.int64) for last in (0, 1))
        repeats = np.zeros_like(begins) if self._repeats is None else self._repeats[documents].astype(np.int64)
        step = self.seq_len - self._overlap
        counts = 1 + (np.maximum(1, stops - begins - self._overlap) - 1) // step
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # index of a part in its document
        start, stop = np.repeat(begins, counts) + number * step, np.repeat(stops, counts)
        length = np.minimum(self.seq_len, stop - start)
        ends = start + length >= stop
        # Tokens shared with an earlier part or document are targets there, so they are not predicted or counted again here.
        before = np.repeat(begins + np.maximum(0, repeats - 1), counts) - start
        predicted = np.clip(np.where(number > 0, np.maximum(before, self._overlap), before), 0, length)
        worth = length - predicted - (ends & (self._bos is None)) > 0  # a one-token document without BOS has no target
        return start[worth], length[worth], ends[worth], predicted[worth]


def rows_filled(lengths: NDArray[np.int64], capacity: int) -> int:
    """Return the number of rows that `best_fit` would produce for these lengths, ten times as fast as `best_fit` itself."""
    shorter = np.sort(lengths[lengths < capacity])[::-1].tolist()
    rows = len(lengths) - len(shorter)
    room: list[int] = []  # free positions in each row that is not full, sorted
    for length in shorter:
        place = bisect_left(room, length)
        if place == len(room):
            rows += 1
            insort(room, capacity - length)
        elif left := room.pop(place) - length:
            insort(room, left)
    return rows


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack lengths into rows of `capacity` by best fit, the longest first; return the indices of the lengths in each row."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free positions, row) for each row that is not full, sorted
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[number]
        place = bisect_left(room, (length, 0))
        if place == len(room):
            rows.append([])
            left, row = capacity, len(rows) - 1
        else:
            left, row = room.pop(place)
        rows[row].append(number)
        if left > length:
            insort(room, (left - length, row))
    return rows


# Redrawn rows: an epoch concatenates the documents in a new order, cuts them into rows at a random offset and shuffles the rows.
# The concatenated documents are never materialised: tokens are copied from the files when a row is read.
# Memory holds only the positions at which the documents of one epoch end.

DOCUMENTS, ROWS, OFFSET = 0, 1, 2  # mixed into the seed so that the three draws are independent
PART = 1 << 20  # documents processed at a time, so that temporary arrays stay small


class RedrawnRows(ByNumber):
    """Rows of `seq_len` tokens from documents that are reshuffled each epoch; every token is an input once per epoch.

    Each epoch joins the documents into a ring, in which the first token follows the last, and cuts the ring into rows at a random
    offset. The last row of the ring is padded with positions without targets. Tokens that a document repeats from the previous
    document are skipped.
    """

    def __init__(self, split: Documents, seq_len: int, seed: int, documents: bool = False):
        self.seq_len, self.planes = seq_len, 3 if documents else 2
        self._split, self._seed = split, seed
        self._starts, self._repeats = split.document_starts(), split.document_repeats()
        self._documents = len(self._starts) - 1
        self.tokens = split.tokens - (0 if self._repeats is None else int(self._repeats.sum(dtype=np.int64)))
        self._rows = -(-self.tokens // seq_len)
        self._ring = lru_cache(maxsize=1)(self._draw)  # one entry is enough: rows are read epoch by epoch

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
                self._fill(batch, mine, rows[share.start + mine].astype(np.int64), epoch)
        empty = self._rows * self.seq_len - self.tokens  # padding positions in the last row of an epoch
        return len(samples) * self.seq_len - empty * int(np.count_nonzero(rows == self._rows - 1))

    def _fill(self, batch: Batch, lines: NDArray[np.int64], rows: NDArray[np.int64], epoch: int) -> None:
        """Copy rows of an epoch's ring into the batch: row `rows[i]` of the ring becomes row `lines[i]` of the batch."""
        ring_ends, offset = self._ring(epoch)
        counts = np.minimum(self.seq_len, self.tokens - rows * self.seq_len)
        begins = (offset + rows * self.seq_len) % self.tokens
        stops = begins + counts + 1  # position after the last target
        first = np.searchsorted(ring_ends, begins, side="right")
        # In a row that wraps around the ring, document indices keep increasing: with D documents, index D is document 0 again.
        last = np.searchsorted(ring_ends, (stops - 1) % self.tokens, side="right") + (stops > self.tokens) * self._documents
        sizes = last - first + 1
        places = np.repeat(first - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
        starts, lengths = self._chosen(places % self._documents, epoch)
        # The number of tokens of each row's first document that come before the row.
        skipped = begins - ring_ends[first] + lengths[np.cumsum(sizes) - sizes]
        window, at = np.empty(self.seq_len + 1, np.int32), 0
        for line, count, skip, size in zip(lines.tolist(), counts.tolist(), skipped.tolist(), sizes.tolist(), strict=True):
            row, filled, number = batch[line], 0, 0
            for start, length in zip(starts[at : at + size].tolist(), lengths[at : at + size].tolist(), strict=True):
                stop = min(filled + length - skip, count + 1)
                self._split.read(start + skip, start + skip + stop - filled, window[filled:stop])
                if self.planes == 3:
                    row[2, filled:stop] = number
                    number += stop > filled
                filled, skip = stop, 0
            row[0, :count], row[1, :count] = window[:count], window[1 : count + 1]
            row[0, count:], row[1, count:] = 0, IGNORED
            if self.planes == 3:
                row[2, count:] = number  # padding is numbered as a separate document, so it attends only to itself
            at += size

    def _draw(self, epoch: int) -> tuple[NDArray[np.int64], int]:
        """Return the end of each document in the ring, in the epoch's order, and the position at which the first row begins."""
        ends = np.empty(self._documents, np.int64)
        for first in range(0, self._documents, PART):
            places = np.arange(first, min(first + PART, self._documents))
            ends[places] = self._chosen(places, epoch)[1]
        return np.cumsum(ends, out=ends), mix(self._seed, epoch, OFFSET) % self.tokens

    def _chosen(self, places: NDArray[np.int64], epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the starts and lengths of the documents at the given positions of an epoch's order."""
        chosen = permuted(places.astype(np.uint64), self._documents, key=mix(self._seed, epoch, DOCUMENTS))
        starts, stops = (self._starts[chosen + np.uint64(last)].astype(np.int64) for last in (0, 1))
        if self._repeats is not None:
            starts += self._repeats[chosen]
        return starts, stops - starts
