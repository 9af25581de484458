"""Bits per byte: how many bits the model needs for one byte of the original text.

Two counts of bytes are kept. `pieces` adds up what the tokenizer's pieces stand for, target by target, as golf does. `text` is
the UTF-8 size of the original text, which preparation recorded: a tokenizer that folds white space or normalises stands for fewer
bytes than it was given, and counting its pieces makes it look worse than it is. For a part of a split the text is estimated by
the ratio of the two over the whole, which is exact for the whole and for every tokenizer that loses nothing.

Every target of the split is scored once. Rows follow each other at a distance of `stride` tokens: with the row's own length they
do not overlap and a target sees half a row before it on average; with less, each row scores only its last `stride` targets,
which then see almost a whole row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ingot.config.schema import Config
from ingot.data.loading.packing import PackedRows
from ingot.data.loading.rows import document_numbers
from ingot.data.store.dataset import Dataset, Documents
from ingot.data.tokenizers import Tokenizer
from ingot.errors import DataError
from ingot.runtime.tensors import IGNORED, Batch

Rule = Literal["text", "pieces"]


@dataclass(frozen=True)
class Score:
    """A sum over targets, from which the numbers follow."""

    nats: float
    tokens: int
    piece_bytes: int
    text_bytes: float
    rule: Rule = "text"
    rows: int = 0  # that were scored
    rows_of: int = 0  # that the split has
    stride: int | None = None  # of a sliding score: tokens from one row to the next, where rows overlap
    buckets: dict[str, Score] = field(default_factory=dict)  # of which it is the sum, where the split has buckets

    @property
    def sums(self) -> list[float]:
        """What ranks add up and `Evaluator.total` makes a score of."""
        if self.buckets:
            return [number for score in self.buckets.values() for number in score.sums]
        return [self.nats, self.tokens, self.piece_bytes, self.rows]

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def bytes(self) -> int:
        """The bytes that `bits_per_byte` divides by."""
        return round(self._by(self.rule))

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self._by(self.rule)

    @property
    def other(self) -> dict[str, float]:
        """The bits per byte by the other count, under its name; empty where both counts are one."""
        rule: Rule = "pieces" if self.rule == "text" else "text"
        return {} if self.piece_bytes == self.text_bytes else {f"val_bpb_{rule}": self.nats / math.log(2) / self._by(rule)}

    def _by(self, rule: Rule) -> float:
        return self.text_bytes if rule == "text" else self.piece_bytes


def bucket_record(score: Score) -> dict[str, float]:
    """What metrics.jsonl says of a bucket; a bucket of which no row was scored has no loss."""
    known: dict[str, float] = {"tokens": score.tokens, "bytes": score.bytes}
    return {"val_loss": score.loss, "val_bpb": score.bits_per_byte, **known} if score.tokens and score.bytes else known


@dataclass(frozen=True)
class Evaluator:
    """How a split is scored: the length and distance of its rows, and what a byte is."""

    split: Documents
    tokenizer: Tokenizer
    seq_len: int
    stride: int
    micro_batch: int
    document_mask: bool = False
    rule: Rule = "text"
    whole_rows: bool = False  # leave out a last row that the split does not fill

    @classmethod
    def of(cls, config: Config, split: Documents, tokenizer: Tokenizer) -> Evaluator:
        """The evaluator of windows that a config describes."""
        data, e = config.data, config.evaluation
        return cls(split, tokenizer, data.seq_len, config.stride, e.micro_batch, data.document_mask, e.bytes, e.whole_rows)

    def rows(self, limit: int | None = None) -> NDArray[np.int64]:
        """The numbers of all rows, or of `limit` rows spread evenly over the split."""
        count, rows = self.count(limit), self.count(None)
        return np.arange(count, dtype=np.int64) * rows // count

    def count(self, limit: int | None) -> int:
        """How many rows `limit` is: at most all that the split has."""
        targets = self.split.tokens - 1
        rows = targets // self.stride if self.whole_rows else -(-targets // self.stride)
        if rows <= 0:
            if targets > 0:
                raise DataError(f"the validation split of {targets + 1:,} tokens does not fill a row of {self.seq_len:,}")
            raise DataError("the validation split is empty; prepare the data with a larger --val-fraction or a --val-input")
        return rows if limit is None else min(limit, rows)

    def batches(self, rows: NDArray[np.int64]) -> Iterator[Batch]:
        """Rows to evaluate, some at a time; a target that belongs to another row, or lies after the end, is -1."""
        return (batch for _, batch in self.named_batches(rows))

    def named_batches(self, rows: NDArray[np.int64]) -> Iterator[tuple[str, Batch]]:
        """The same, each batch with the name of the bucket that its rows are from; empty where there is none."""
        planes = 3 if self.document_mask else 2
        for first in range(0, len(rows), self.micro_batch):
            part = rows[first : first + self.micro_batch].tolist()
            batch = np.full((len(part), planes, self.seq_len), IGNORED, np.int32)
            for line, row in zip(batch, part, strict=True):
                self._fill(line, row)
            yield "", batch

    def calls(self, rows: NDArray[np.int64]) -> int:
        """How many batches some rows are."""
        return -(-len(rows) // self.micro_batch)

    def _fill(self, line: Batch, row: int) -> None:
        start = max(0, (row + 1) * self.stride - self.seq_len)
        window = self.split.read(start, min(start + self.seq_len + 1, self.split.tokens))
        line[0] = 0
        line[0, : len(window)] = window[: self.seq_len]
        mine = slice(row * self.stride - start, row * self.stride - start + self.stride)  # no other row scores these
        line[1, : len(window) - 1][mine] = window[1:][mine]
        if self.document_mask:
            line[2] = document_numbers(self.split, start, self.seq_len)

    def _padded(self, rows: NDArray[np.int64], at_least: int) -> Iterator[tuple[str, Batch]]:
        """The batches of some rows, and where they are fewer than `at_least` empty ones, whose targets are all -1."""
        yield from self.named_batches(rows)
        empty = np.zeros((1, 3 if self.document_mask else 2, self.seq_len), np.int32)
        empty[:, 1] = IGNORED
        for _ in range(self.calls(rows), at_least):
            yield "", empty

    def score(
        self,
        rows: NDArray[np.int64],
        evaluate: Callable[[Batch], float],
        stop: Callable[[int], bool] = lambda batch: False,
        progress: Callable[[int, int], None] = lambda done, total: None,
        at_least: int = 0,
    ) -> Score:
        """Sum the loss and the bytes of `rows`, or of those before the batch at which `stop` says so.

        `evaluate` gives the summed nats of a batch. It is called `at_least` so often, as the ranks that have more rows call it.
        """
        sums: dict[str, list[float]] = {name: [0.0, 0, 0, 0] for name in self.names}
        done = 0
        progress(0, len(rows))
        for number, (name, batch) in enumerate(self._padded(rows, at_least)):
            if stop(number):
                break
            nats, counted = evaluate(batch), batch[:, 1] != IGNORED
            if not counted.any():
                continue
            size = int(self.tokenizer.target_bytes(batch[:, 0][counted], batch[:, 1][counted]).sum())
            found = (nats, int(np.count_nonzero(counted)), size, len(batch))
            sums[name] = [a + b for a, b in zip(sums[name], found, strict=True)]
            done += len(batch)
            progress(done, len(rows))
        return self.total([number for one in sums.values() for number in one])

    @property
    def sliding(self) -> int | None:
        """Tokens from one row to the next where rows overlap; None where they do not."""
        return self.stride if self.stride < self.seq_len else None

    @property
    def names(self) -> tuple[str, ...]:
        """The parts of the split that are scored apart."""
        return ("",)

    def total(self, sums: Sequence[float]) -> Score:
        """A score from sums, which ranks may have shared."""
        nats, tokens, piece_bytes, rows = sums[0], *map(int, sums[1:])
        known = self.split.piece_bytes
        text_bytes = piece_bytes * self.split.bytes / known if known else float(piece_bytes)
        return Score(nats, tokens, piece_bytes, text_bytes, self.rule, rows, self.count(None), self.sliding)


def evaluator_of(config: Config, dataset: Dataset, split: str) -> Evaluator:
    """What scores a split of some data as a config says: bucket by bucket where it has buckets."""
    if not dataset.buckets(split):
        return Evaluator.of(config, dataset.split(split), dataset.tokenizer)

    return bucket_evaluator(config, dataset, split)


# Buckets that are scored each by itself and in all, by rows that are made as training makes them.

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
