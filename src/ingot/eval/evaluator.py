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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ingot.config.schema import Config
from ingot.data.loading.rows import document_numbers
from ingot.data.store.dataset import Split
from ingot.data.tokenizers import Tokenizer
from ingot.errors import DataError
from ingot.runtime.batch import IGNORED, Batch

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


@dataclass(frozen=True)
class Evaluator:
    """How a split is scored: the length and distance of its rows, and what a byte is."""

    split: Split
    tokenizer: Tokenizer
    seq_len: int
    stride: int
    micro_batch: int
    document_mask: bool = False
    rule: Rule = "text"
    whole_rows: bool = False  # leave out a last row that the split does not fill

    @classmethod
    def of(cls, config: Config, split: Split, tokenizer: Tokenizer) -> Evaluator:
        """The evaluator that a config describes."""
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

    def batches(self, rows: NDArray[np.int64], at_least: int = 0) -> Iterator[Batch]:
        """Rows to evaluate, some at a time; a target that belongs to another row, or lies after the end, is -1.

        Where there are fewer than `at_least` batches, empty ones follow, whose targets are all -1.
        """
        planes = 3 if self.document_mask else 2
        for first in range(0, len(rows), self.micro_batch):
            part = rows[first : first + self.micro_batch].tolist()
            batch = np.full((len(part), planes, self.seq_len), IGNORED, np.int32)
            for line, row in zip(batch, part, strict=True):
                start = max(0, (row + 1) * self.stride - self.seq_len)
                window = self.split.read(start, min(start + self.seq_len + 1, self.split.tokens))
                line[0] = 0
                line[0, : len(window)] = window[: self.seq_len]
                mine = slice(row * self.stride - start, row * self.stride - start + self.stride)  # no other row scores these
                line[1, : len(window) - 1][mine] = window[1:][mine]
                if self.document_mask:
                    line[2] = document_numbers(self.split, start, self.seq_len)
            yield batch
        for _ in range(-(-len(rows) // self.micro_batch), at_least):
            empty = np.zeros((1, planes, self.seq_len), np.int32)
            empty[:, 1] = IGNORED
            yield empty

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
        nats, tokens, size, done = 0.0, 0, 0, 0
        progress(0, len(rows))
        for number, batch in enumerate(self.batches(rows, at_least)):
            if stop(number):
                break
            nats += evaluate(batch)
            counted = batch[:, 1] != IGNORED
            done += len(batch) if counted.any() else 0
            progress(done, len(rows))
            tokens += int(np.count_nonzero(counted))
            size += int(self.tokenizer.target_bytes(batch[:, 0][counted], batch[:, 1][counted]).sum())
        return self.total(nats, tokens, size, done)

    def total(self, nats: float, tokens: int, piece_bytes: int, rows: int) -> Score:
        """A score from sums, which ranks may have shared."""
        known = self.split.piece_bytes
        text_bytes = piece_bytes * self.split.bytes / known if known else float(piece_bytes)
        return Score(nats, tokens, piece_bytes, text_bytes, self.rule, rows, self.count(None))
