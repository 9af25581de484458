"""What a row holds: a stretch of the token stream, its targets and, with a document mask, the document of each token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ingot.config.data_section import DataSection
from ingot.data.loading.already_read import Mask, read_already_read
from ingot.data.loading.mixture import LimitedRows, mixed_rows
from ingot.data.loading.order import ByNumber, Order, Places, Random, Sequential, Shuffle
from ingot.data.loading.packing import PackedRows
from ingot.data.loading.redraw import RedrawnRows
from ingot.data.store.dataset import Dataset, Documents
from ingot.errors import DataError, Setting
from ingot.runtime.batch import Batch


class Rows(Protocol):
    """An endless numbered sequence of rows."""

    @property
    def planes(self) -> int: ...

    @property
    def seq_len(self) -> int: ...

    def at(self, phase: int, places: Places) -> Rows:
        """The same rows for a run that is in this phase and has read so much of each bucket."""

    def after(self, samples: range) -> tuple[int, Places]:
        """The next sample after these, and how many rows of each bucket have been read then; {} where there is no mix.

        At the end of the data there may be fewer samples than were asked for.
        """

    def read(self, samples: range, share: range, batch: Batch) -> int:
        """Write those of the samples whose places are in `share`, and say how many targets all of them have.

        Raises DataExhausted where there are no such rows.
        """

    def epoch(self, sample: int) -> int:
        """How many times the data had been read completely before this sample."""


class FiniteRows(Rows, Protocol):
    """Rows of which it is known where an epoch ends."""

    def available(self, samples: range, epochs: int) -> int:
        """How many of some samples, from their first on, lie within so many epochs."""


def read_pieces(source: Rows, samples: range, share: range, batch: Batch) -> int:
    """Read rows as the batch is long: those of the source, or each cut into pieces that follow each other in the batch.

    A token keeps its target, be it in the next piece, and the number of its document; the targets of all samples are counted.
    """
    length = batch.shape[-1]
    if length == source.seq_len:
        return source.read(samples, share, batch)
    pieces = source.seq_len // length
    whole = np.empty((len(share), source.planes, source.seq_len), np.int32)
    targets = source.read(samples, share, whole)
    # (rows, pieces, planes, length), as the pieces lie in the batch
    batch.reshape(len(share), pieces, source.planes, length)[:] = whole.reshape(
        len(share), source.planes, pieces, length
    ).swapaxes(1, 2)
    return targets


@dataclass(frozen=True)
class Windows(ByNumber):
    """Rows that are stretches of the stream, wherever documents begin."""

    split: Documents
    order: Order
    seq_len: int
    documents: bool = False

    @property
    def planes(self) -> int:
        return 3 if self.documents else 2

    def epoch(self, sample: int) -> int:
        return self.order.epoch(sample)

    def available(self, samples: range, epochs: int) -> int:
        rows = self.order.rows_in(epochs)
        return len(samples) if rows is None else max(0, min(samples.stop, rows) - samples.start)

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


def document_numbers(split: Documents, start: int, length: int) -> NDArray[np.int32]:
    """For every token of a window, how many documents have begun in it so far; after the end of the stream comes its start."""
    starts = split.document_starts()
    numbers = np.zeros(length, np.int32)
    done = 0
    while done < length:
        here = min(length - done, split.tokens - start)
        # Of the index's own type: else numpy makes a float64 of every number in it, for every row.
        first, last = np.searchsorted(starts, np.array([start, start + here], np.uint64))
        numbers[np.asarray(starts[first:last]).astype(np.int64) - start + done] = 1
        done, start = done + here, 0
    return np.cumsum(numbers, dtype=np.int32)


def make_rows(settings: DataSection, rows_per_step: int, dataset: Dataset) -> Rows:
    """The rows a run trains on."""
    already_read = read_already_read(settings.already_read, dataset) if settings.already_read is not None else {}
    make = partial(_rows, settings, rows_per_step, dataset.tokenizer.bos)
    if settings.mix or settings.phases:
        return mixed_rows(settings, dataset, lambda name, bucket, seed: make(bucket, seed, already_read.get(name)))
    whole = np.concatenate(list(already_read.values())) if already_read else None
    rows = make(dataset.split("train"), settings.seed, whole)
    return rows if settings.epochs is None else LimitedRows(rows, settings.epochs)


def _rows(
    settings: DataSection, rows_per_step: int, bos: int | None, split: Documents, seed: int, already_read: Mask | None
) -> FiniteRows:
    """The rows of a split or of one bucket."""
    seq_len = settings.seq_len
    if settings.sampling in ("pack", "document"):
        alone = settings.sampling == "document"
        bos = bos if split.eos is None else None
        return PackedRows(split, seq_len, seed, bos, settings.document_mask, settings.overlap, alone, already_read)
    if settings.document_mask:
        split.document_starts()  # refuses a damaged index now, not in the thread that reads ahead
    redrawn = RedrawnRows(split, seq_len, seed, settings.document_mask) if settings.sampling == "redraw" else None
    tokens = split.tokens if redrawn is None else redrawn.tokens
    if tokens <= seq_len:
        raise DataError(
            f"the text has {tokens:,} tokens and a row needs {{0}} + 1 = {seq_len + 1:,}",
            Setting("data.seq_len"),
            advice="use more text or shorter rows",
        )
    if redrawn is not None:
        return redrawn
    order: Order
    match settings.sampling:
        case "random":
            order = Random(tokens, seq_len, seed)
        case "stream":
            order = Sequential(tokens, seq_len, rows_per_step, settings.spans)
        case _:
            order = Shuffle(tokens, seq_len, seed)
    return Windows(split, order, seq_len, settings.document_mask)
