"""Rows of whole documents: which documents share a row, and what is predicted where one ends.

Documents are drawn in an order of their own for every epoch and fitted into rows a block at a time: the longest first, each into
the fullest row that still has room. The rows of a block are then shuffled, for rows in the order of their making would be batches
of one length. A document longer than a row is cut; every token is predicted once per epoch, and each is an input with its own
successor as target, whichever document lies after it in the row.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ingot.data.loading.order import ByNumber
from ingot.data.store.dataset import Documents
from ingot.errors import DataError
from ingot.runtime.batch import IGNORED, Batch
from ingot.runtime.seeds import mix, permuted

BLOCK = 1024  # documents that are fitted together: 98 to 99% of the places are then filled


class Piece(NamedTuple):
    """A stretch of one document that fits into a row."""

    start: int
    length: int
    ends: bool  # whether its document ends with it
    told: int = 0  # inputs at its start whose targets another piece has


@dataclass(frozen=True)
class Block:
    """Some rows of an epoch, each a list of pieces."""

    first: int  # the sample number of its first row
    epoch: int
    rows: list[list[Piece]]


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
        self._starts = np.asarray(split.document_starts()).astype(np.int64)
        self._repeats = split.document_repeats()
        self._blocks = self._plan()
        self._kept: list[Block] = []
        self._ends: list[int] = []  # the first samples of the epochs after the first, as far as they are planned
        self._lock = threading.Lock()  # the loop and the thread that reads ahead both ask

    def epoch(self, sample: int) -> int:
        with self._lock:
            return self._block(sample).epoch

    def available(self, samples: range, epochs: int) -> int:
        with self._lock:
            self._forget(samples.start)
            while samples.stop > self._planned and len(self._ends) < epochs:
                self._kept.append(next(self._blocks))
                self._forget(samples.start)
            stop = min(samples.stop, self._ends[epochs - 1]) if len(self._ends) >= epochs else samples.stop
            return max(0, stop - samples.start)

    def read(self, samples: range, share: range, batch: Batch) -> int:
        with self._lock:
            while samples.start >= self._planned:
                self._kept.append(next(self._blocks))
                self._forget(samples.start)
            self._forget(samples.start)
            rows = [self._row(sample) for sample in samples]
        for line, pieces in zip(batch, rows[share.start : share.stop], strict=True):
            self._fill(line, pieces)
        return sum(self._count(piece) for pieces in rows for piece in pieces)

    @property
    def _planned(self) -> int:
        """The first sample that is not planned."""
        return self._kept[-1].first + len(self._kept[-1].rows) if self._kept else 0

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
        block = self._block(sample)
        return block.rows[sample - block.first]

    def _block(self, sample: int) -> Block:
        """The block of a sample; one far ahead is reached by planning all before it: 10 to 20 s for a million documents."""
        if self._kept and sample < self._kept[0].first:
            self._begin_anew()
        while sample >= self._planned:
            self._kept.append(next(self._blocks))
        return next(block for block in reversed(self._kept) if sample >= block.first)

    def _forget(self, sample: int) -> None:
        """Drop the blocks before a sample, but not the last: it says where the plan stands, which goes back by beginning anew."""
        if self._kept and sample < self._kept[0].first:
            self._begin_anew()
        while len(self._kept) > 1 and sample >= self._kept[1].first:
            del self._kept[0]

    def _begin_anew(self) -> None:
        self._blocks, self._kept, self._ends = self._plan(), [], []

    def _plan(self) -> Iterator[Block]:
        """The blocks of epoch after epoch."""
        first, epoch, documents = 0, 0, len(self._starts) - 1
        while True:
            before = first
            for block in range(0, documents, BLOCK):
                places = np.arange(block, min(block + BLOCK, documents), dtype=np.uint64)
                chosen = permuted(places, documents, key=mix(self._seed, epoch)).astype(np.int64)
                if epoch == 0 and self._already_read is not None:
                    chosen = chosen[~self._already_read[chosen]]
                pieces = list(self._pieces(chosen))
                lengths = [self.seq_len if self._alone else piece.length for piece in pieces]
                rows = [[pieces[i] for i in row] for row in best_fit(lengths, self.seq_len)]
                order = permuted(np.arange(len(rows), dtype=np.uint64), len(rows), key=mix(self._seed, epoch, block, 1))
                first += len(rows)
                if block + BLOCK >= documents:
                    self._ends.append(first)
                yield Block(first - len(rows), epoch, [rows[i] for i in order.tolist()])
            if first == before and (epoch or self._already_read is None):
                raise DataError("no document has a token to predict: each is a single one; use data.sampling=shuffle")
            epoch += 1

    def _pieces(self, documents: NDArray[np.int64]) -> Iterator[Piece]:
        begins, stops = self._starts[documents].tolist(), self._starts[documents + 1].tolist()
        repeats = [0] * len(begins) if self._repeats is None else self._repeats[documents].tolist()
        for begin, stop, repeated in zip(begins, stops, repeats, strict=True):
            told = begin + max(0, repeated - 1)  # the last token that is not to be predicted, or that cannot be
            for start in range(begin, max(begin + 1, stop - self._overlap), self.seq_len - self._overlap):
                length = min(self.seq_len, stop - start)
                piece = Piece(start, length, start + length >= stop, min(length, max(0, told - start)))
                told = max(told, start + length)
                if self._targets(piece):  # a document of one token without a mark has nothing to predict
                    yield piece


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
