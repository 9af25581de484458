"""Rows drawn from buckets by weight.

A row's bucket follows from the seed and the row's number, never from a rank, and a bucket gives its own rows one after the other.
How many each has given so far is part of a run's position: a mix may change between two steps, and every bucket goes on where it
stood.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ingot.config.data_section import DataSection
from ingot.data.loading.order import DataExhausted, Places
from ingot.data.store.dataset import Dataset, Documents
from ingot.errors import DataError, Setting
from ingot.runtime.batch import IGNORED, Batch
from ingot.runtime.seeds import mix, scramble

if TYPE_CHECKING:
    from ingot.data.loading.rows import FiniteRows

DRAWS = 2  # what the seed is mixed with, so that draws have nothing to do with the order inside a bucket


@dataclass(frozen=True)
class LimitedRows:
    """The rows of so many epochs; what is left of a step after them is empty rows, so that the last ones are trained on too."""

    source: FiniteRows
    epochs: int

    @property
    def planes(self) -> int:
        return self.source.planes

    @property
    def seq_len(self) -> int:
        return self.source.seq_len

    def at(self, phase: int, places: Places) -> LimitedRows:
        return self

    def after(self, samples: range) -> tuple[int, Places]:
        return samples.start + self.source.available(samples, self.epochs), {}

    def epoch(self, sample: int) -> int:
        return self.source.epoch(sample)

    def read(self, samples: range, share: range, batch: Batch) -> int:
        has = self.source.available(samples, self.epochs)
        if not has:
            raise DataExhausted
        mine = range(min(share.start, has), min(share.stop, has))
        _empty(batch[len(mine) :])
        return self.source.read(samples[:has], mine, batch[: len(mine)])


def _empty(batch: Batch) -> None:
    """Make rows that predict nothing."""
    batch[:], batch[:, 1] = 0, IGNORED


@dataclass(frozen=True)
class MixedRows:
    """The rows of some buckets, from a position on. Without an end of epochs every bucket begins again and again.

    `halt`: where a bucket is over that a row would come from, the step cannot be read. Else the others share its weight, and what
    is left of a step after the end of all is empty rows.
    """

    sources: Mapping[str, FiniteRows]
    mixes: tuple[Mapping[str, float], ...]  # of each phase
    seed: int
    epochs: int | None = None
    halt: bool = False
    phase: int = 0
    places: Places = field(default_factory=dict)  # before the first sample that is asked for

    @property
    def planes(self) -> int:
        return next(iter(self.sources.values())).planes

    @property
    def seq_len(self) -> int:
        return next(iter(self.sources.values())).seq_len

    def at(self, phase: int, places: Places) -> MixedRows:
        """The same rows for a run that is in this phase and has read so much of each bucket."""
        return replace(self, phase=phase, places=places)

    def after(self, samples: range) -> tuple[int, Places]:
        drawn = self._draw(samples)
        places = {name: self._place(name) + int(np.count_nonzero(drawn == i)) for i, name in enumerate(self.sources)}
        return samples.start + len(drawn), {**self.places, **places}  # a bucket that is left out keeps its place

    def epoch(self, sample: int) -> int:
        """How often all buckets of the mix had been read completely."""
        weights = self.mixes[self.phase]
        return min(source.epoch(self._place(name)) for name, source in self.sources.items() if weights.get(name))

    def read(self, samples: range, share: range, batch: Batch) -> int:
        drawn, targets = self._draw(samples), 0
        _empty(batch)
        for number, (name, source) in enumerate(self.sources.items()):
            rows = np.flatnonzero(drawn == number)
            mine = range(*np.searchsorted(rows, [share.start, share.stop]).tolist())
            part = np.empty((len(mine), *batch.shape[1:]), np.int32)
            targets += source.read(self._range(name, len(rows)), mine, part)
            batch[rows[mine.start : mine.stop] - share.start] = part
        return targets

    def _draw(self, samples: range) -> NDArray[np.int64]:
        """The number of each sample's bucket; the samples after the end of the data are left out."""
        weights = self.mixes[self.phase]
        left = [name for name in self.sources if weights.get(name) and (self.halt or self._has_rows(name))]
        alive = {number: weights[name] for number, name in enumerate(self.sources) if name in left}
        numbers = np.arange(samples.start, samples.stop, dtype=np.uint64)
        draws = (scramble(numbers ^ np.uint64(mix(self.seed, DRAWS))) >> np.uint64(11)) * 2.0**-53  # in [0, 1)
        drawn = np.empty(0, np.int64)
        while len(drawn) < len(samples) and alive:
            ends = np.cumsum(list(alive.values()))
            chosen = np.searchsorted(ends / ends[-1], draws[len(drawn) :], side="right")
            more = np.concatenate([drawn, np.array(list(alive))[chosen]])
            lacking = self._first_lacking(more, alive)
            if lacking is None:
                return more
            bucket, row = lacking
            if self.halt:
                raise DataExhausted(list(self.sources)[bucket])
            del alive[bucket]
            drawn = more[:row]
        if not len(drawn):
            raise DataExhausted
        return drawn

    def _first_lacking(self, drawn: NDArray[np.int64], alive: Mapping[int, float]) -> tuple[int, int] | None:
        """The first row that its bucket does not have, after that bucket's number; None where all have theirs."""
        if self.epochs is None:
            return None
        found = []
        for number, (name, source) in enumerate(self.sources.items()):
            rows = np.flatnonzero(drawn == number)
            if number in alive and (has := source.available(self._range(name, len(rows)), self.epochs)) < len(rows):
                found.append((int(rows[has]), number))
        return (min(found)[1], min(found)[0]) if found else None

    def _has_rows(self, name: str) -> bool:
        """Whether a bucket has another row; without one it takes no part: a draw that falls on it says nothing of the others."""
        return self.epochs is None or self.sources[name].available(self._range(name, 1), self.epochs) > 0

    def _range(self, name: str, rows: int) -> range:
        return range(self._place(name), self._place(name) + rows)

    def _place(self, name: str) -> int:
        return self.places.get(name, 0)


def mixed_rows(settings: DataSection, dataset: Dataset, make: Callable[[str, Documents, int], FiniteRows]) -> MixedRows:
    """The rows of a run with a mix or with phases; `make` makes those of a bucket by its name, with a seed of its own."""
    mixes = [phase.mix for phase in settings.phases] or [settings.mix]
    buckets = dataset.buckets("train")
    setting = "data.phases" if settings.phases else "data.mix"
    for name in sorted({name for weights in mixes for name in weights} - buckets.keys()):
        raise _unknown(name, list(buckets), setting, dataset)
    sources = {
        name: make(name, bucket, mix(settings.seed, _number(name)))
        for name, bucket in buckets.items()
        if any(weights.get(name) for weights in mixes)
    }
    return MixedRows(sources, tuple(mixes), settings.seed, settings.epochs, settings.exhausted == "halt")


def _unknown(name: str, buckets: list[str], setting: str, dataset: Dataset) -> DataError:
    if not buckets:
        return DataError(f"{{0}} names the bucket {name} and {dataset.folder} has no buckets", Setting(setting))
    close = get_close_matches(name, buckets, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(buckets)}"
    return DataError(f"{{0}} names the bucket {name}, which {dataset.folder} does not have; {hint}", Setting(setting))


def _number(name: str) -> int:
    """A number that a bucket's order is drawn by: the same whatever other buckets there are."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
