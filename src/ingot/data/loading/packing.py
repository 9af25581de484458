"""Document packing: which documents share a row, and what is predicted at the end of each.

Documents are reshuffled every epoch and packed into rows one block at a time by best fit: the longest first, each into the
fullest row that still has room. The rows of a block are then shuffled, because in packing order a batch would hold documents of
one length. A document longer than a row is cut. Every token is predicted once per epoch, and the target of a token is always its
successor in its own document, whichever document follows in the row.
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

BLOCK = 1024  # documents packed together, which fills 98 to 99% of the positions
DRAWN = 64  # blocks whose documents are drawn in one call, which is faster than one call per block


class Piece(NamedTuple):
    """A contiguous part of one document that fits into a row."""

    start: int
    length: int
    ends: bool  # True for the last piece of a document
    told: int = 0  # leading inputs whose targets are already predicted in another piece


class Pieces(NamedTuple):
    """A batch of pieces, stored as one array per field."""

    start: NDArray[np.int64]
    length: NDArray[np.int64]
    ends: NDArray[np.bool_]
    told: NDArray[np.int64]


class PackedRows(ByNumber):
    """Documents packed into rows of `seq_len` tokens, or one document per row with `alone`.

    `bos` is the id that begins every document. It is the target of a document's last token, so the model learns to predict that
    a document is over. Without such an id the last token has no target. If the split has an end mark, the mark itself is a target
    and everything after it belongs to another document. `overlap` is the number of tokens shared by consecutive pieces of a long
    document. `already_read` is a mask of the documents that the first epoch leaves out.
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
        self._starts, self._repeats = split.document_starts(), split.document_repeats()  # memory-mapped, so ranks share the pages
        self._blocks = max(1, -(-(len(self._starts) - 1) // BLOCK))  # blocks per epoch
        self._firsts = [0]  # first sample of each block counted so far
        self._kept: tuple[int, list[list[Piece]]] = (-1, [])  # the most recently used block and its rows
        self._drawn: tuple[tuple[int, int], NDArray[np.int64]] = (-1, -1), np.empty(0, np.int64)  # (epoch, group), documents
        self._lock = threading.Lock()  # shared by the training loop and the read-ahead thread

    def epoch(self, sample: int) -> int:
        with self._lock:
            return self._block(sample) // self._blocks

    def available(self, samples: range, epochs: int) -> int:
        with self._lock:
            while self._firsts[-1] < samples.stop and len(self._firsts) <= epochs * self._blocks:
                self._count_block()
            # The first sample after the last epoch, if it has been counted.
            ends = self._firsts[(end := epochs * self._blocks) : end + 1]
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
            # Unless the document ends with the piece, read one more token: the target of the last input.
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
            line[2, at:] = number  # padding attends only to itself

    def _after_marks(self, tokens: NDArray[Any]) -> NDArray[np.bool_]:
        """Return a mask of the tokens that end a document."""
        return tokens == self._split.eos if self._split.eos is not None else np.zeros(len(tokens), bool)

    def _targets(self, piece: Piece) -> int:
        """Return the maximum number of targets in a piece; every end mark inside it takes one away."""
        return max(0, piece.length - piece.told - (piece.ends and self._bos is None))

    def _count(self, piece: Piece) -> int:
        if self._split.eos is None:
            return self._targets(piece)
        tokens = self._split.read(piece.start + piece.told, piece.start + piece.length)
        inner = self._after_marks(tokens)
        if piece.ends and self._bos is None:
            inner[-1:] = True  # the last token has no target, whether or not it is a mark
        return len(tokens) - int(np.count_nonzero(inner))

    def _row(self, sample: int) -> list[Piece]:
        number = self._block(sample)
        if self._kept[0] != number:
            self._kept = number, self._rows(number)
        return self._kept[1][sample - self._firsts[number]]

    def _block(self, sample: int) -> int:
        """Return the block number of a sample, counting the rows of all earlier blocks if necessary."""
        while self._firsts[-1] <= sample:
            self._count_block()
            epoch, more = divmod(len(self._firsts) - 1, self._blocks)
            whole = not more and (epoch > 1 or self._already_read is None)
            if whole and self._firsts[-1] == self._firsts[-1 - self._blocks]:
                raise DataError("no document has a token to predict: each is a single one; use data.sampling=shuffle")
        return bisect_right(self._firsts, sample) - 1

    def _count_block(self) -> None:
        """Count the rows of the next block; a million documents take about a second."""
        epoch, block = divmod(len(self._firsts) - 1, self._blocks)
        lengths = self._pieces(epoch, block).length
        self._firsts.append(self._firsts[-1] + (len(lengths) if self._alone else rows_filled(lengths, self.seq_len)))

    def _rows(self, number: int) -> list[list[Piece]]:
        """Pack the documents of a block and return its rows in shuffled order."""
        epoch, block = divmod(number, self._blocks)
        pieces = [Piece(*piece) for piece in zip(*(column.tolist() for column in self._pieces(epoch, block)), strict=True)]
        lengths = [self.seq_len if self._alone else piece.length for piece in pieces]
        rows = [[pieces[i] for i in row] for row in best_fit(lengths, self.seq_len)]
        order = permuted(np.arange(len(rows), dtype=np.uint64), len(rows), key=mix(self._seed, epoch, block * BLOCK, 1))
        return [rows[i] for i in order.tolist()]

    def _documents(self, epoch: int, block: int) -> NDArray[np.int64]:
        """Return the document numbers of a block."""
        drawn, at = (epoch, block // DRAWN), block % DRAWN * BLOCK
        if self._drawn[0] != drawn:
            first, documents = drawn[1] * DRAWN * BLOCK, len(self._starts) - 1
            places = np.arange(first, min(first + DRAWN * BLOCK, documents), dtype=np.uint64)
            self._drawn = drawn, permuted(places, documents, key=mix(self._seed, epoch)).astype(np.int64)
        chosen = self._drawn[1][at : at + BLOCK]
        return chosen[~self._already_read[chosen]] if epoch == 0 and self._already_read is not None else chosen

    def _pieces(self, epoch: int, block: int) -> Pieces:
        """Return the pieces of a block's documents, in document order."""
        documents = self._documents(epoch, block)
        begins, stops = (np.asarray(self._starts[documents + last]).astype(np.int64) for last in (0, 1))
        repeats = np.zeros_like(begins) if self._repeats is None else self._repeats[documents].astype(np.int64)
        step = self.seq_len - self._overlap
        counts = 1 + (np.maximum(1, stops - begins - self._overlap) - 1) // step
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # index of a piece in its document
        start, stop = np.repeat(begins, counts) + number * step, np.repeat(stops, counts)
        length = np.minimum(self.seq_len, stop - start)
        ends = start + length >= stop
        # Tokens shared with an earlier piece or document were predicted there, so their targets are not counted again.
        before = np.repeat(begins + np.maximum(0, repeats - 1), counts) - start
        told = np.clip(np.where(number > 0, np.maximum(before, self._overlap), before), 0, length)
        worth = length - told - (ends & (self._bos is None)) > 0  # a one-token document without a mark has nothing to predict
        return Pieces(start[worth], length[worth], ends[worth], told[worth])


def rows_filled(lengths: NDArray[np.int64], capacity: int) -> int:
    """Return the number of rows that `best_fit` makes of these lengths, at a tenth of its cost."""
    shorter = np.sort(lengths[lengths < capacity])[::-1].tolist()
    rows = len(lengths) - len(shorter)
    room: list[int] = []  # free positions in each row that is not full, sorted
    for length in shorter:
        found = bisect_left(room, length)
        if found == len(room):
            rows += 1
            insort(room, capacity - length)
        elif left := room.pop(found) - length:
            insort(room, left)
    return rows


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Assign lengths to rows by best fit: the longest first, each to the fullest row with room. Return the indices per row."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free positions, row) for each row that is not full, sorted
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
