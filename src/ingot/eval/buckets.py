"""Buckets that are scored each by itself and in all, by rows that are made as training makes them.

With data.sampling=pack or document validation rows are whole documents too, in an order that no setting changes: every target of
the split is still scored once. The whole split is the sum of its buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ingot.config.schema import Config
from ingot.data.loading.packing import PackedRows
from ingot.data.store.dataset import Dataset, Documents
from ingot.eval.evaluator import Evaluator, Score
from ingot.runtime.batch import IGNORED, Batch

MANY = 2**62  # rows: more than any split has


@dataclass(frozen=True)
class PackedEvaluator(Evaluator):
    """A split whose rows are documents."""

    packed: PackedRows = field(kw_only=True)
    sliding = None  # a stride has no part in it

    def count(self, limit: int | None) -> int:
        return self._all if limit is None else min(limit, self._all)

    @cached_property
    def _all(self) -> int:
        return self.packed.available(range(MANY), 1)  # which plans all of them

    def _fill(self, line: Batch, row: int) -> None:
        self.packed.read(range(row, row + 1), range(1), line[None])


@dataclass(frozen=True)
class WindowEvaluator(Evaluator):
    """Windows of a bucket. What a document repeats of the one before it was scored there, and is not scored a second time."""

    @cached_property
    def _repeats(self) -> NDArray[np.uint16] | None:
        return self.split.document_repeats()  # which looks at all of them

    def _fill(self, line: Batch, row: int) -> None:
        super()._fill(line, row)
        if (repeats := self._repeats) is None:
            return
        starts, target = self.split.document_starts(), max(0, (row + 1) * self.stride - self.seq_len) + 1  # the first of the row
        first, last = np.searchsorted(starts, np.array([target, target + self.seq_len], np.uint64))
        for document in range(max(0, int(first) - 1), min(int(last), len(repeats))):
            begin = int(starts[document]) - target
            line[1, max(0, begin) : max(0, begin + int(repeats[document]))] = IGNORED


@dataclass(frozen=True)
class BucketEvaluator(Evaluator):
    """A split of buckets, whose rows follow each other bucket by bucket."""

    parts: Mapping[str, Evaluator] = field(kw_only=True)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.parts)

    def count(self, limit: int | None) -> int:
        rows = sum(part.count(None) for part in self.parts.values()) if self.parts else super().count(None)
        return rows if limit is None else min(limit, rows)

    def calls(self, rows: NDArray[np.int64]) -> int:
        return sum(part.calls(some) for (_, part), some in self._dealt(rows))

    def named_batches(self, rows: NDArray[np.int64]) -> Iterator[tuple[str, Batch]]:
        for (name, part), some in self._dealt(rows):
            yield from ((name, batch) for batch in part.batches(some))

    def total(self, sums: Sequence[float]) -> Score:
        of_each = np.reshape(np.array(sums, float), (-1, 4)).tolist()
        found = [part.total(numbers) for part, numbers in zip(self.parts.values(), of_each, strict=True)]
        return Score(
            nats=sum(score.nats for score in found),
            tokens=sum(score.tokens for score in found),
            piece_bytes=sum(score.piece_bytes for score in found),
            text_bytes=sum(score.text_bytes for score in found),
            rule=self.rule,
            rows=sum(score.rows for score in found),
            rows_of=sum(score.rows_of for score in found),
            stride=found[0].stride,
            buckets=dict(zip(self.parts, found, strict=True)),
        )

    def _dealt(self, rows: NDArray[np.int64]) -> Iterator[tuple[tuple[str, Evaluator], NDArray[np.int64]]]:
        """Each bucket with those of the rows that are its own, by their numbers in it."""
        first = 0
        for named in self.parts.items():
            stop = first + named[1].count(None)
            yield named, rows[(rows >= first) & (rows < stop)] - first
            first = stop


def bucket_evaluator(config: Config, dataset: Dataset, split: str) -> BucketEvaluator:
    """What scores the buckets of a split as a config says; rows of the training split are windows, whatever it trains on."""
    whole = Evaluator.of(config, dataset.split(split), dataset.tokenizer)
    packed = config.data.sampling in ("pack", "document") and split == "val"
    parts = {
        name: _packed(config, bucket, whole) if packed else WindowEvaluator(**{**vars(whole), "split": bucket})
        for name, bucket in dataset.buckets(split).items()
        if bucket.tokens > 1  # of the others nothing can be scored
    }
    return BucketEvaluator(**vars(whole), parts=parts)


def _packed(config: Config, bucket: Documents, whole: Evaluator) -> Evaluator:
    data, bos = config.data, whole.tokenizer.bos if bucket.eos is None else None
    packed = PackedRows(bucket, data.seq_len, 0, bos, data.document_mask, data.overlap, data.sampling == "document")
    return PackedEvaluator(**{**vars(whole), "split": bucket}, packed=packed)
