"""Rows of whole documents: which documents share a row, and what is predicted where one ends.

Documents are drawn in an order of their own for every epoch and fitted into rows a block at a time: the longest first, each into
the fullest row that still has room. The rows of a block are then shuffled, for rows in the order of their making would be batches
of one length. A document longer than a row is cut; every token is predicted once per epoch, and each is an input with its own
successor as target, whichever document lies after it in the row.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ingot.data.loading.order import ByNumber
from ingot.data.store.documents import Documents
from ingot.errors import DataError
from ingot.runtime.seeds import mix, permuted
from ingot.runtime.tensors import IGNORED, Batch

BLOCK = 1024  # documents that are fitted together: 98 to 99% of the places are then filled
DRAWN = 64  # blocks whose documents are drawn at once, which is quicker than one by one


class Piece(NamedTuple):
    """A stretch of one document that fits into a row."""

    start: int
    length: int
    ends: bool  # whether its document ends with it
    told: int = 0  # inputs at its start whose targets another piece has


class Pieces(NamedTuple):
    """Pieces of some documents, as columns."""

    start: NDArray[np.int64]
    length: NDArray[np.int64]
    ends: NDArray[np.bool_]
    told: NDArray[np.int64]


class PackedRows(ByNumber):
    """Documents packed into rows of `seq_len` tokens, or with `alone` one in a row.

    `bos` is the id that begins every document: predicting it says that a document is over, so it is the target of a document's
    last token. Where documents have no such mark the last token has no target; where the split has an end mark it is a target
    itself, and whatever comes after it is another document. `overlap`: tokens that the pieces of a long document share.
    `already_read`: for each document, whether the first epoch leaves it out.
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
        self._already_read = already_read
        self._starts, self._repeats = split.document_starts(), split.document_repeats()  # on the disk: ranks share the pages
        self._blocks = max(1, -(-(len(self._starts) - 1) // BLOCK))  # of an epoch
        self._firsts = [0]  # the first sample of each block, as far as they are counted
        self._kept: tuple[int, list[list[Piece]]] = (-1, [])  # the block that was asked for last, and its rows
        self._drawn: tuple[tuple[int, int], NDArray[np.int64]] = (-1, -1), np.empty(0, np.int64)  # which, and their documents
        self._lock = threading.Lock()  # the loop and the thread that reads ahead both ask

    def epoch(self, sample: int) -> int:
        with self._lock:
            return self._block(sample) // self._blocks

    def available(self, samples: range, epochs: int) -> int:
        with self._lock:
            while self._firsts[-1] < samples.stop and len(self._firsts) <= epochs * self._blocks:
                self._count_block()
            ends = self._firsts[(end := epochs * self._blocks) : end + 1]  # the first sample after them, if that is known
            return max(0, min([samples.stop, *ends]) - samples.start)

    def read(self, samples: range, share: range, batch: Batch) -> int:
        with self._lock:
            rows = [self._row(sample) for sample in samples]
        for line, pieces in zip(batch, rows[share.start : share.stop], strict=True):
            self._fill(line, pieces)
        return sum(self._count(piece) for pieces in rows for piece in pieces)

    def _fill(self, line: Batch, pieces: list[Piece]) -> None:
        line[0], line[1], at, number = 0, IGNORED, 0, 0
        for piece in pieces:
            here = slice(at, at + piece.length)
            # One token more than the piece, unless its document ends: the target of the last.
            tokens = self._split.read(piece.start, piece.start + piece.length + (not piece.ends))
            line[0, here] = tokens[: piece.length]
            line[1, at : at + len(tokens) - 1] = tokens[1:]
            if piece.ends and self._bos is not None:
                line[1, here.stop - 1] = self._bos
            ended = self._after_marks(line[0, here])
            line[1, here][ended] = IGNORED
            line[1, at : at + piece.told] = IGNORED
            if self.planes == 3:
                line[2, here] = number + np.cumsum(ended) - ended
                number = int(line[2, here.stop - 1]) + 1
            at = here.stop
        if self.planes == 3:
            line[2, at:] = number  # padding sees itself alone

    def _after_marks(self, tokens: NDArray[Any]) -> NDArray[np.bool_]:
        """Which of some tokens end a document."""
        return tokens == self._split.eos if self._split.eos is not None else np.zeros(len(tokens), bool)

    def _targets(self, piece: Piece) -> int:
        """How many targets a piece has at most: an end mark inside it leaves one less."""
        return max(0, piece.length - piece.told - (piece.ends and self._bos is None))

    def _count(self, piece: Piece) -> int:
        if self._split.eos is None:
            return self._targets(piece)
        tokens = self._split.read(piece.start + piece.told, piece.start + piece.length)
        inner = self._after_marks(tokens)
        if piece.ends and self._bos is None:
            inner[-1:] = True  # it has no target, mark or not
        return len(tokens) - int(np.count_nonzero(inner))

    def _row(self, sample: int) -> list[Piece]:
        number = self._block(sample)
        if self._kept[0] != number:
            self._kept = number, self._rows(number)
        return self._kept[1][sample - self._firsts[number]]

    def _block(self, sample: int) -> int:
        """The number of a sample's block; one far ahead is reached by counting the rows of all before it."""
        while self._firsts[-1] <= sample:
            self._count_block()
            epoch, more = divmod(len(self._firsts) - 1, self._blocks)
            whole = not more and (epoch > 1 or self._already_read is None)
            if whole and self._firsts[-1] == self._firsts[-1 - self._blocks]:
                raise DataError("no document has a token to predict: each is a single one; use data.sampling=shuffle")
        return bisect_right(self._firsts, sample) - 1

    def _count_block(self) -> None:
        """Count the rows of the next block: a million documents take about a second."""
        epoch, block = divmod(len(self._firsts) - 1, self._blocks)
        lengths = self._pieces(epoch, block).length
        self._firsts.append(self._firsts[-1] + (len(lengths) if self._alone else rows_filled(lengths, self.seq_len)))

    def _rows(self, number: int) -> list[list[Piece]]:
        """The rows of a block."""
        epoch, block = divmod(number, self._blocks)
        pieces = [Piece(*piece) for piece in zip(*(column.tolist() for column in self._pieces(epoch, block)), strict=True)]
        lengths = [self.seq_len if self._alone else piece.length for piece in pieces]
        rows = [[pieces[i] for i in row] for row in best_fit(lengths, self.seq_len)]
        order = permuted(np.arange(len(rows), dtype=np.uint64), len(rows), key=mix(self._seed, epoch, block * BLOCK, 1))
        return [rows[i] for i in order.tolist()]

    def _documents(self, epoch: int, block: int) -> NDArray[np.int64]:
        """The documents of a block."""
        drawn, at = (epoch, block // DRAWN), block % DRAWN * BLOCK
        if self._drawn[0] != drawn:
            first, documents = drawn[1] * DRAWN * BLOCK, len(self._starts) - 1
            places = np.arange(first, min(first + DRAWN * BLOCK, documents), dtype=np.uint64)
            self._drawn = drawn, permuted(places, documents, key=mix(self._seed, epoch)).astype(np.int64)
        chosen = self._drawn[1][at : at + BLOCK]
        return chosen[~self._already_read[chosen]] if epoch == 0 and self._already_read is not None else chosen

    def _pieces(self, epoch: int, block: int) -> Pieces:
        """The pieces of a block's documents, one document after the other."""
        documents = self._documents(epoch, block)
        begins, stops = (np.asarray(self._starts[documents + last]).astype(np.int64) for last in (0, 1))
        repeats = np.zeros_like(begins) if self._repeats is None else self._repeats[documents].astype(np.int64)
        step = self.seq_len - self._overlap
        counts = 1 + (np.maximum(1, stops - begins - self._overlap) - 1) // step
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # of a piece in its document
        start, stop = np.repeat(begins, counts) + number * step, np.repeat(stops, counts)
        length = np.minimum(self.seq_len, stop - start)
        ends = start + length >= stop
        # The last token that is not to be predicted, or that cannot be: a piece before has predicted what both hold.
        before = np.repeat(begins + np.maximum(0, repeats - 1), counts) - start
        told = np.clip(np.where(number > 0, np.maximum(before, self._overlap), before), 0, length)
        worth = length - told - (ends & (self._bos is None)) > 0  # a document of one token without a mark has nothing to predict
        return Pieces(start[worth], length[worth], ends[worth], told[worth])


def rows_filled(lengths: NDArray[np.int64], capacity: int) -> int:
    """How many rows `best_fit` makes of these lengths, without saying which length lies where: a tenth of its work."""
    shorter = np.sort(lengths[lengths < capacity])[::-1].tolist()
    rows = len(lengths) - len(shorter)
    room: list[int] = []  # places left in the rows that are not full, in order
    for length in shorter:
        found = bisect_left(room, length)
        if found == len(room):
            rows += 1
            insort(room, capacity - length)
        elif left := room.pop(found) - length:
            insort(room, left)
    return rows


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Deal numbered lengths into rows: the longest first, each into the fullest row that has room for it."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (places left, row) of the rows that are not full, in order
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[number]
        found = bisect_left(room, (length, 0))
        if found == len(room):
            rows.append([])
            left, row = capacity, len(rows) - 1
        else:
            left, row = room.pop(found)
        rows[row].append(number)
        if left > length:
            insort(room, (left - length, row))
    return rows
