"""Training rows: inputs, targets and, with a document mask, the document number of each token."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ingot.config.schema import DataSection
from ingot.data.loading.order import ByNumber, DataExhausted, Order, Places, Random, Sequential, Shuffle
from ingot.data.loading.packing import PackedRows, RedrawnRows
from ingot.data.store.dataset import Dataset, Documents
from ingot.errors import DataError, Setting
from ingot.runtime.files import read_json, user_path, write_atomically
from ingot.runtime.seeds import mix, scramble
from ingot.runtime.tensors import IGNORED, Batch

# Rows with an epoch limit, and rows drawn from buckets by weight.

DRAWS = 2  # mixed into the seed so that bucket draws are independent of the order inside a bucket


class LimitedRows(ByNumber):
    """The rows of `epochs` epochs; if fewer rows are left than the last step needs, the step is padded with empty rows."""

    def __init__(self, source: FiniteRows, epochs: int) -> None:
        self.source, self.epochs, self.planes, self.seq_len = source, epochs, source.planes, source.seq_len

    def after(self, samples: range) -> tuple[int, Places]:
        return samples.start + self.source.available(samples, self.epochs), {}

    def epoch(self, sample: int) -> int:
        return self.source.epoch(sample)

    def read(self, samples: range, share: range, batch: Batch) -> int:
        has = self.source.available(samples, self.epochs)
        if not has:
            raise DataExhausted
        mine = range(min(share.start, has), min(share.stop, has))
        padding = batch[len(mine) :]
        padding[:], padding[:, 1] = 0, IGNORED
        return self.source.read(samples[:has], mine, batch[: len(mine)])


@dataclass(frozen=True)
class MixedRows:
    """Rows drawn from several buckets by weight. If `epochs` is None, every bucket repeats forever.

    With `halt`, drawing from an exhausted bucket raises DataExhausted. Otherwise the remaining buckets share its weight,
    and once all are exhausted, the rest of the step is padded with empty rows.
    """

    sources: Mapping[str, FiniteRows]
    mixes: tuple[Mapping[str, float], ...]  # bucket weights of each phase
    seed: int
    epochs: int | None = None
    halt: bool = False
    phase: int = 0
    places: Places = field(default_factory=dict)  # number of rows read from each bucket before the first requested sample

    @property
    def planes(self) -> int:
        return next(iter(self.sources.values())).planes

    @property
    def seq_len(self) -> int:
        return next(iter(self.sources.values())).seq_len

    def at(self, phase: int, places: Places) -> MixedRows:
        """Return a copy that continues in this phase after `places[name]` rows have been read from each bucket `name`."""
        return replace(self, phase=phase, places=places)

    def after(self, samples: range) -> tuple[int, Places]:
        drawn = self._draw(samples)
        places = {name: self.places.get(name, 0) + int(np.count_nonzero(drawn == i)) for i, name in enumerate(self.sources)}
        return samples.start + len(drawn), {**self.places, **places}  # a bucket outside the mix keeps its position

    def epoch(self, sample: int) -> int:
        """Return the number of complete passes over the least-read bucket of the mix, from `places`; `sample` is ignored."""
        weights = self.mixes[self.phase]
        return min(source.epoch(self.places.get(name, 0)) for name, source in self.sources.items() if weights.get(name))

    def read(self, samples: range, share: range, batch: Batch) -> int:
        drawn, targets = self._draw(samples), 0
        batch[:], batch[:, 1] = 0, IGNORED
        for number, (name, source) in enumerate(self.sources.items()):
            rows = np.flatnonzero(drawn == number)
            mine = range(*np.searchsorted(rows, [share.start, share.stop]).tolist())
            part = np.empty((len(mine), *batch.shape[1:]), np.int32)
            targets += source.read(self._range(name, len(rows)), mine, part)
            batch[rows[mine.start : mine.stop] - share.start] = part
        return targets

    def _draw(self, samples: range) -> NDArray[np.int64]:
        """Return the bucket index of each sample; samples past the end of the data are left out."""
        weights, names = self.mixes[self.phase], list(self.sources)
        alive = {  # exhausted buckets are left out of the draw
            number: weights[name]
            for number, (name, source) in enumerate(self.sources.items())
            if weights.get(name) and (self.halt or self.epochs is None or source.available(self._range(name, 1), self.epochs))
        }
        numbers = np.arange(samples.start, samples.stop, dtype=np.uint64)
        draws = (scramble(numbers ^ np.uint64(mix(self.seed, DRAWS))) >> np.uint64(11)) * 2.0**-53  # uniform in [0, 1)
        drawn = np.empty(0, np.int64)
        while len(drawn) < len(samples) and alive:
            ends = np.cumsum(list(alive.values()))
            chosen = np.searchsorted(ends / ends[-1], draws[len(drawn) :], side="right")
            more = np.concatenate([drawn, np.array(list(alive))[chosen]])
            if self.epochs is None:
                return more
            lacking = []  # the first row that cannot be supplied, and the index, of each bucket that runs out
            for number in alive:
                name, rows = names[number], np.flatnonzero(more == number)
                if (has := self.sources[name].available(self._range(name, len(rows)), self.epochs)) < len(rows):
                    lacking.append((int(rows[has]), number))
            if not lacking:
                return more
            row, bucket = min(lacking)
            if self.halt:
                raise DataExhausted(names[bucket])
            del alive[bucket]
            drawn = more[:row]
        if not len(drawn):
            raise DataExhausted
        return drawn

    def _range(self, name: str, rows: int) -> range:
        return range(self.places.get(name, 0), self.places.get(name, 0) + rows)


# For runs continued from another program: the first epoch skips the documents that the other program has already read.

FORMAT, VERSION = "ingot-already-read", 1
Mask = NDArray[np.bool_]  # one entry per document of a bucket: True if already read


def write_already_read(path: Path, masks: Mapping[str, Mask]) -> None:
    """Write the masks of the documents already read from each bucket to a JSON file."""
    buckets = {}
    for name, mask in masks.items():
        read = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2).tolist()
        buckets[name] = {"documents": len(mask), "read": read}
    write_atomically(path, json.dumps({"format": FORMAT, "version": VERSION, "buckets": buckets}))


def read_already_read(path: str, dataset: Dataset) -> dict[str, Mask]:
    """Read a file written by `write_already_read`, and return a mask of the documents already read for each training bucket."""
    setting, masks = Setting("data.already_read", path), {}
    try:
        record = read_json(user_path(path))
        if (record["format"], record["version"]) != (FORMAT, VERSION):
            raise ValueError(FORMAT)
        for name, bucket in dataset.buckets("train").items():
            documents = len(bucket.document_starts()) - 1
            read = record["buckets"].get(name, {"documents": documents, "read": []})
            if (listed := read["documents"]) != documents:
                problem = f"{{0}} lists {listed:,} documents in the bucket {name}, but {dataset.folder} has {documents:,}"
                raise DataError(problem, setting, advice="this record was written for other data; use the data it describes")
            masks[name] = np.zeros(documents, np.bool_)
            for first, stop in read["read"]:
                if not 0 <= first <= stop <= documents:
                    raise ValueError(first, stop)
                masks[name][first:stop] = True
    except OSError as error:
        raise DataError(f"{{0}} cannot be read: {error.strerror}", setting) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError("{0} is not a record of the documents already read, or it is damaged", setting) from None
    return masks


class Rows(Protocol):
    """A numbered sequence of training rows, finite or endless."""

    @property
    def planes(self) -> int: ...

    @property
    def seq_len(self) -> int: ...

    def at(self, phase: int, places: Places) -> Rows:
        """Return rows that continue in this phase after `places[name]` rows have been read from each bucket `name`."""

    def after(self, samples: range) -> tuple[int, Places]:
        """Return the sample number after `samples`, and how many rows of each bucket have been read by then ({} without a mix).

        If the data runs out, only the samples that are still available count.
        """

    def read(self, samples: range, share: range, batch: Batch) -> int:
        """Write this rank's rows, `samples[share.start : share.stop]`, to the batch; return the number of targets in `samples`.

        Raises DataExhausted if no rows are left.
        """

    def epoch(self, sample: int) -> int:
        """Return the number of complete passes over the data before this sample."""


class FiniteRows(Rows, Protocol):
    """Rows that know how many samples are available in a given number of epochs."""

    def available(self, samples: range, epochs: int) -> int:
        """Return how many of `samples` are within the first `epochs` epochs."""


@dataclass(frozen=True)
class WindowRows(ByNumber):
    """Rows that are windows of the token stream, regardless of document boundaries."""

    split: Documents
    order: Order
    seq_len: int
    planes: int = 2  # 3 if rows include the document number of each token

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
            if self.planes == 3:
                row[2] = document_numbers(self.split, start, self.seq_len)
        return len(samples) * self.seq_len

    def _read(self, start: int, out: NDArray[np.int32]) -> None:
        stop = min(start + len(out), self.split.tokens)
        self.split.read(start, stop, out)
        if stop - start < len(out):
            self._read(0, out[stop - start :])


def document_numbers(split: Documents, start: int, length: int) -> NDArray[np.int32]:
    """Number the documents within a window and return each token's document number; the stream wraps around at its end."""
    starts = split.document_starts()
    numbers = np.zeros(length, np.int32)
    done = 0
    while done < length:
        here = min(length - done, split.tokens - start)
        # Search with the index's dtype: otherwise numpy converts the whole index to float64 for every row.
        first, last = np.searchsorted(starts, np.array([start, start + here], np.uint64))
        numbers[np.asarray(starts[first:last]).astype(np.int64) - start + done] = 1
        done, start = done + here, 0
    return np.cumsum(numbers, dtype=np.int32)


def make_rows(settings: DataSection, rows_per_step: int, dataset: Dataset) -> Rows:
    """Build the rows that a run trains on."""
    already_read = read_already_read(settings.already_read, dataset) if settings.already_read is not None else {}
    if not settings.mix and not settings.phases:
        whole = np.concatenate(list(already_read.values())) if already_read else None
        rows = _rows(settings, rows_per_step, dataset.tokenizer.bos, dataset.split("train"), settings.seed, whole)
        return rows if settings.epochs is None else LimitedRows(rows, settings.epochs)
    mixes = [phase.mix for phase in settings.phases] or [settings.mix]
    buckets = dataset.buckets("train")
    if unknown := sorted({name for weights in mixes for name in weights} - buckets.keys()):
        problem = f"{{0}} names the bucket {unknown[0]}; the buckets of {dataset.folder} are {', '.join(buckets) or 'none'}"
        raise DataError(problem, Setting("data.phases" if settings.phases else "data.mix"))
    sources = {}
    for name, bucket in buckets.items():
        if any(weights.get(name) for weights in mixes):
            # The seed depends on the bucket's name, so that adding a bucket does not change the order within the other buckets.
            seed = mix(settings.seed, int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))
            sources[name] = _rows(settings, rows_per_step, dataset.tokenizer.bos, bucket, seed, already_read.get(name))
    return MixedRows(sources, tuple(mixes), settings.seed, settings.epochs, settings.exhausted == "halt")


def _rows(
    settings: DataSection, rows_per_step: int, bos: int | None, split: Documents, seed: int, already_read: Mask | None
) -> FiniteRows:
    """Build the rows of a split or of one bucket."""
    seq_len = settings.seq_len
    if settings.sampling in ("pack", "document"):
        alone = settings.sampling == "document"
        bos = bos if split.eos is None else None
        return PackedRows(split, seq_len, seed, bos, settings.document_mask, settings.overlap, alone, already_read)
    if settings.document_mask:
        split.document_starts()  # a damaged index raises here, not in the read-ahead thread
    redrawn = RedrawnRows(split, seq_len, seed, settings.document_mask) if settings.sampling == "redraw" else None
    tokens = split.tokens if redrawn is None else redrawn.tokens
    if tokens <= seq_len:
        problem = f"the text has {tokens:,} tokens but a row needs {{0}} + 1 = {seq_len + 1:,}"
        raise DataError(problem, Setting("data.seq_len"), advice="use more text or shorter rows")
    if redrawn is not None:
        return redrawn
    order: Order = Random(tokens, seq_len, seed) if settings.sampling == "random" else Shuffle(tokens, seq_len, seed)
    if settings.sampling == "stream":
        order = Sequential(tokens, seq_len, rows_per_step, settings.spans)
    return WindowRows(split, order, seq_len, 3 if settings.document_mask else 2)
