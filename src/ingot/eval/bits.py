"""Bits per byte: how many bits the model needs for one byte of the original text.

Bytes are counted from the text each target stands for, never assumed: the start of a document costs bits and stands for none.
Every target of the split is scored once. Rows follow each other at a distance of `stride` tokens: with the row's own length they
do not overlap and a target sees half a row before it on average; with less, each row scores only its last `stride` targets,
which then see almost a whole row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ingot.data.dataset import Split
from ingot.errors import DataError

Int32 = NDArray[np.int32]
IGNORED = -1


@dataclass(frozen=True)
class Score:
    """A sum over targets, from which the two numbers follow."""

    nats: float
    tokens: int
    bytes: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


def chosen_rows(split: Split, stride: int, limit: int | None) -> NDArray[np.int64]:
    """The numbers of all rows, or of `limit` rows spread evenly over the split."""
    rows = -(-(split.tokens - 1) // stride)
    if rows <= 0:
        raise DataError("the validation split is empty; prepare the data with a larger --val-fraction or a --val-input")
    count = rows if limit is None else min(limit, rows)
    return np.arange(count, dtype=np.int64) * rows // count


def row_batches(split: Split, seq_len: int, stride: int, rows: NDArray[np.int64], size: int) -> Iterator[tuple[Int32, Int32]]:
    """Inputs and targets, `size` rows at a time; a target that belongs to another row, or lies behind the end, is -1."""
    for first in range(0, len(rows), size):
        part = rows[first : first + size]
        buffer = np.full((len(part), seq_len + 1), IGNORED, np.int32)
        targets = np.full((len(part), seq_len), IGNORED, np.int32)
        for line, target, row in zip(buffer, targets, part.tolist(), strict=True):
            start = max(0, (row + 1) * stride - seq_len)
            split.read(start, min(start + seq_len + 1, split.tokens), line)
            mine = slice(row * stride - start, row * stride - start + stride)  # the targets no other row scores
            target[mine] = line[1:][mine]
        yield np.maximum(buffer[:, :-1], 0), targets


def score(
    split: Split,
    token_bytes: NDArray[np.int32],
    seq_len: int,
    stride: int,
    rows: NDArray[np.int64],
    size: int,
    evaluate: Callable[[Int32, Int32], float],
) -> Score:
    """Sum the loss and the bytes of `rows`; `evaluate` gives the summed nats of a batch."""
    nats, tokens, size_in_bytes = 0.0, 0, 0
    for inputs, targets in row_batches(split, seq_len, stride, rows, size):
        nats += evaluate(inputs, targets)
        counted = targets[targets != IGNORED]
        tokens += counted.size
        size_in_bytes += int(token_bytes[counted].sum())
    return Score(nats, tokens, size_in_bytes)
