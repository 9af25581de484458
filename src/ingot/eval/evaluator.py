"""Bits per byte: how many bits the model needs for one byte of the original text.

Bytes are counted in two ways. `pieces` sums the byte lengths of the target tokens, as the golf baseline does. `text` is the UTF-8
size of the original text, recorded during preparation: the tokens of a tokenizer that normalises text or merges white space
decode to fewer bytes than the original, so `pieces` would give more bits per byte. For a part of a split, `text` is estimated as
`pieces` times the ratio of the two in the whole split, which is exact for the whole split and for lossless tokenizers.

Every target of the split is scored exactly once. Rows start `stride` tokens apart. If the stride equals the row length, rows do
not overlap and a target has half a row of context on average; with a smaller stride, each row scores only its last `stride`
targets, which then have almost a full row of context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, repeat
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
    """Loss and bytes, summed over the scored targets, and the metrics computed from the sums."""

    nats: float
    tokens: int
    piece_bytes: int
    text_bytes: float
    rule: Rule = "text"
    rows: int = 0  # number of scored rows
    rows_of: int = 0  # number of rows in the split
    stride: int | None = None  # tokens between the starts of consecutive rows, if rows overlap
    buckets: dict[str, Score] = field(default_factory=dict)  # scores by bucket, if the split has buckets

    @property
    def sums(self) -> list[float]:
        """Return the numbers to sum over ranks; `Evaluator.total` builds a score from the sums."""
        if self.buckets:
            return [number for score in self.buckets.values() for number in score.sums]
        return [self.nats, self.tokens, self.piece_bytes, self.rows]

    @property
    def loss(self) -> float:
        """Return the mean loss in nats per token."""
        return self.nats / self.tokens

    @property
    def bytes(self) -> int:
        """Return the number of bytes that `bits_per_byte` divides by."""
        return round(self._by(self.rule))

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self._by(self.rule)

    @property
    def other(self) -> dict[str, float]:
        """Return {metric name: bits per byte} for the byte count that `rule` does not select; {} if both counts are equal."""
        rule: Rule = "pieces" if self.rule == "text" else "text"
        return {} if self.piece_bytes == self.text_bytes else {f"val_bpb_{rule}": self.nats / math.log(2) / self._by(rule)}

    def _by(self, rule: Rule) -> float:
        return self.text_bytes if rule == "text" else self.piece_bytes


def bucket_record(score: Score) -> dict[str, float]:
    """Return a bucket's entry for metrics.jsonl, without a loss if no row of the bucket was scored."""
    counts: dict[str, float] = {"tokens": score.tokens, "bytes": score.bytes}
    return {"val_loss": score.loss, "val_bpb": score.bits_per_byte, **counts} if score.tokens and score.bytes else counts


@dataclass(frozen=True)
class Evaluator:
    """Scores a split in rows of `seq_len` tokens that start `stride` tokens apart."""

    split: Documents
    tokenizer: Tokenizer
    seq_len: int
    stride: int
    micro_batch: int
    document_mask: bool = False
    rule: Rule = "text"
    whole_rows: bool = False  # drop the last row if it is incomplete
    buckets: Mapping[str, Evaluator] = field(default_factory=dict)  # row numbers continue from bucket to bucket

    @property
    def parts(self) -> Mapping[str, Evaluator]:
        """Return the evaluators whose rows are scored, by bucket name; without buckets, this evaluator under the name ""."""
        return self.buckets or {"": self}

    def rows(self, limit: int | None = None) -> NDArray[np.int64]:
        """Return the indices of all rows, or of `limit` rows spread evenly over the split."""
        count, rows = self.count(limit), self.count(None)
        return np.arange(count, dtype=np.int64) * rows // count

    def count(self, limit: int | None) -> int:
        """Return the number of rows to score: `limit`, or all rows of the split if `limit` is None or larger."""
        return self._all if limit is None else min(limit, self._all)

    @cached_property
    def _all(self) -> int:
        if self.buckets:
            return sum(bucket.count(None) for bucket in self.buckets.values())
        targets = self.split.tokens - 1
        rows = targets // self.stride if self.whole_rows else -(-targets // self.stride)
        if rows <= 0:
            empty = "is empty; prepare the data with a larger --val-fraction or a --val-input"
            short = f"of {targets + 1:,} tokens does not fill a row of {self.seq_len:,} tokens"
            raise DataError(f"the validation split {short if targets > 0 else empty}")
        return rows

    def batches(self, rows: NDArray[np.int64]) -> Iterator[Batch]:
        """Yield the rows in micro-batches; a target is -1 if another row scores it or it lies past the end of the split."""
        return (batch for _, batch in self.named_batches(rows))

    def named_batches(self, rows: NDArray[np.int64]) -> Iterator[tuple[str, Batch]]:
        """Yield (bucket name, batch); the name is empty if the split has no buckets."""
        planes = 3 if self.document_mask else 2
        for name, part, own in self._dealt(rows):
            for first in range(0, len(own), self.micro_batch):
                numbers = own[first : first + self.micro_batch].tolist()
                batch = np.full((len(numbers), planes, self.seq_len), IGNORED, np.int32)
                for line, row in zip(batch, numbers, strict=True):
                    part._fill(line, row)
                yield name, batch

    def calls(self, rows: NDArray[np.int64]) -> int:
        """Return the number of batches that `batches` yields for these rows."""
        return sum(-(-len(own) // self.micro_batch) for _, _, own in self._dealt(rows))

    def _dealt(self, rows: NDArray[np.int64]) -> Iterator[tuple[str, Evaluator, NDArray[np.int64]]]:
        """Yield the name and evaluator of every part with the `rows` that it contains, as row indices within the part."""
        first = 0
        for name, part in self.parts.items():
            stop = first + part.count(None)
            yield name, part, rows[(rows >= first) & (rows < stop)] - first
            first = stop

    def _fill(self, line: Batch, row: int) -> None:
        start = max(0, (row + 1) * self.stride - self.seq_len)
        window = self.split.read(start, min(start + self.seq_len + 1, self.split.tokens))
        line[0] = 0
        line[0, : len(window)] = window[: self.seq_len]
        mine = slice(row * self.stride - start, row * self.stride - start + self.stride)  # the targets that only this row scores
        line[1, : len(window) - 1][mine] = window[1:][mine]
        if self.document_mask:
            line[2] = document_numbers(self.split, start, self.seq_len)

    def score(
        self,
        rows: NDArray[np.int64],
        evaluate: Callable[[Batch], float],
        stop: Callable[[int], bool] = lambda batch: False,
        progress: Callable[[int, int], None] = lambda done, total: None,
        at_least: int = 0,
    ) -> Score:
        """Sum the loss and the bytes of `rows`; end early if `stop`, called with the batch number, returns True.

        `evaluate` returns a batch's summed loss in nats. It is called at least `at_least` times (at the end with empty batches),
        so that all ranks can call it equally often.
        """
        sums = {name: np.zeros(4) for name in self.parts}
        done = 0
        progress(0, len(rows))
        empty = np.zeros((1, 3 if self.document_mask else 2, self.seq_len), np.int32)
        empty[:, 1] = IGNORED
        padding = repeat(("", empty), max(0, at_least - self.calls(rows)))
        for number, (name, batch) in enumerate(chain(self.named_batches(rows), padding)):
            if stop(number):
                break
            nats, counted = evaluate(batch), batch[:, 1] != IGNORED
            if not counted.any():
                continue
            size = int(self.tokenizer.target_bytes(batch[:, 0][counted], batch[:, 1][counted]).sum())
            sums[name] += np.array([nats, np.count_nonzero(counted), size, len(batch)])
            done += len(batch)
            progress(done, len(rows))
        return self.total(np.concatenate([*sums.values()]).tolist())

    def total(self, sums: Sequence[float]) -> Score:
        """Build a score from `Score.sums`, possibly summed over all ranks."""
        if self.buckets:
            return self._total_of_buckets(np.reshape(np.array(sums, float), (-1, 4)).tolist())
        nats, tokens, piece_bytes, rows = sums[0], *map(int, sums[1:])
        split_bytes = self.split.piece_bytes
        text_bytes = piece_bytes * self.split.bytes / split_bytes if split_bytes else float(piece_bytes)
        sliding = self.stride if self.stride < self.seq_len else None
        return Score(nats, tokens, piece_bytes, text_bytes, self.rule, rows, self.count(None), sliding)

    def _total_of_buckets(self, sums: Sequence[Sequence[float]]) -> Score:
        scores = {name: bucket.total(numbers) for (name, bucket), numbers in zip(self.buckets.items(), sums, strict=True)}
        summed = ("nats", "tokens", "piece_bytes", "text_bytes", "rows", "rows_of")
        totals = {name: sum(getattr(score, name) for score in scores.values()) for name in summed}
        return Score(**totals, rule=self.rule, stride=next(iter(scores.values())).stride, buckets=scores)


def evaluator_of(config: Config, dataset: Dataset, split: str) -> Evaluator:
    """Build the evaluator that the config specifies for a split; if the split has buckets, each is scored separately."""
    data, e = config.data, config.evaluation
    text, tokenizer = dataset.split(split), dataset.tokenizer
    whole = Evaluator(text, tokenizer, data.seq_len, config.stride, e.micro_batch, data.document_mask, e.bytes, e.whole_rows)
    buckets: dict[str, Evaluator] = {}
    for name, bucket in dataset.buckets(split).items():
        if bucket.tokens <= 1:
            continue  # a single token has no target
        fields = {**vars(whole), "split": bucket}
        if data.sampling in ("pack", "document") and split == "val":  # the training split is always scored in windows
            bos = tokenizer.bos if bucket.eos is None else None
            packed = PackedRows(bucket, data.seq_len, 0, bos, data.document_mask, data.overlap, data.sampling == "document")
            buckets[name] = PackedEvaluator(**{**fields, "stride": data.seq_len}, packed=packed)  # packed rows never overlap
        else:
            buckets[name] = WindowEvaluator(**fields)
    return replace(whole, buckets=buckets)


# Splits with buckets: each bucket gets its own score and counts towards the total; rows are built as in training.

ALL_ROWS = 2**62  # more rows than any split has


@dataclass(frozen=True)
class PackedEvaluator(Evaluator):
    """Scores a bucket in rows of packed documents, built as in training."""

    packed: PackedRows = field(kw_only=True)

    @cached_property
    def _all(self) -> int:
        return self.packed.available(range(ALL_ROWS), 1)

    def _fill(self, line: Batch, row: int) -> None:
        self.packed.read(range(row, row + 1), range(1), line[None])


@dataclass(frozen=True)
class WindowEvaluator(Evaluator):
    """Scores a bucket in windows. Text that a document repeats from the previous document is scored only once."""

    @cached_property
    def _repeats(self) -> NDArray[np.uint16] | None:
        return self.split.document_repeats()

    def _fill(self, line: Batch, row: int) -> None:
        super()._fill(line, row)
        if (repeats := self._repeats) is None:
            return
        starts = self.split.document_starts()
        target = max(0, (row + 1) * self.stride - self.seq_len) + 1  # position of the row's first target in the split
        first, last = np.searchsorted(starts, np.array([target, target + self.seq_len], np.uint64))
        for document in range(max(0, int(first) - 1), min(int(last), len(repeats))):
            begin = int(starts[document]) - target
            line[1, max(0, begin) : max(0, begin + int(repeats[document]))] = IGNORED
