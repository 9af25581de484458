"""One pass over a split: how often each id occurs, where start marks stand, and the bytes that the tokens stand for.

A token stands for the bytes that the tokenizer's table says, except after a special id or where a document starts. Only those
places are asked for one by one, so the pass costs little more than counting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.data.store.index import open_index
from ingot.data.tokenizers import Tokenizer
from ingot.data.tokenizers.base import NARROW, OUTSIDE
from ingot.data.verify.folder import AuditSplit, Starts

CHUNK_TOKENS = 1 << 20


@dataclass(frozen=True)
class Counts:
    """What a pass came to; `ids` has a count for every id of the vocabulary, some outside it, and last all above those."""

    ids: NDArray[np.int64]
    largest: int
    marks: NDArray[np.int64]
    piece_bytes: int


class AuditBucket:
    """One bucket of a split, which begins where the buckets before it end."""

    def __init__(self, split: AuditSplit, starts: Starts, number: int) -> None:
        before, record = split.buckets[:number], split.buckets[number]
        self.name, self.folder, self.tokens = f"{split.name}/{record.name}", split.folder, record.tokens
        self.bytes = record.bytes if split.record else None
        self._split, self._first = split, sum(bucket.tokens for bucket in before)
        first = sum(bucket.documents for bucket in before)
        self.starts: Starts = starts[first : first + record.documents + 1] - self._first

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens start..stop of the bucket."""
        return self._split.read(self._first + start, self._first + stop)


def count_tokens(
    split: AuditSplit | AuditBucket,
    tokenizer: Tokenizer,
    starts: Starts | None = None,
    tell: Callable[[int], None] = lambda tokens: None,
) -> Counts:
    """Reads a split. `starts` is where documents begin, if more than their marks says so; `tell` hears of the tokens read."""
    slots = max(NARROW, tokenizer.vocab_size) + 1
    sizes = np.zeros(slots, np.int64)
    sizes[: tokenizer.vocab_size] = tokenizer.token_bytes()
    special = np.append(sizes == 0, True)  # the last row is for OUTSIDE
    ids, largest = np.zeros(slots, np.int64), 0
    marks, extra, previous = [np.empty(0, np.int64)], 0, OUTSIDE
    for begin in range(0, split.tokens, CHUNK_TOKENS):
        found = split.read(begin, min(begin + CHUNK_TOKENS, split.tokens))
        largest = max(largest, int(found.max()))
        part = np.minimum(found, slots - 1)
        ids += np.bincount(part, minlength=slots)
        if tokenizer.bos is not None:
            marks.append(np.flatnonzero(part == tokenizer.bos) + begin)
        before = np.empty(len(part), np.int64)
        before[0], before[1:] = previous, part[:-1]
        if starts is not None:
            first, last = np.searchsorted(starts, [begin, begin + len(part)])
            before[starts[first:last] - begin] = OUTSIDE
        places = np.flatnonzero(special[before])
        extra += int((tokenizer.target_bytes(before[places], part[places]) - sizes[part[places]]).sum())
        previous = int(part[-1])
        tell(len(part))
    return Counts(ids, largest, np.concatenate(marks), int(ids @ sizes) + extra)


def count_documents(
    split: AuditSplit | AuditBucket, tokenizer: Tokenizer, index: Starts | None, tell: Callable[[int], None]
) -> tuple[Counts, Starts]:
    """Reads a split; documents begin where its index says, or else at their marks."""
    counts = count_tokens(split, tokenizer, index, tell)
    return counts, starts_by_marks(split, counts.marks) if index is None else index


def starts_by_marks(split: AuditSplit | AuditBucket, marks: NDArray[np.int64]) -> Starts:
    """Where documents begin if each has a mark in front; what comes before the first mark is a document too."""
    before = [0] if split.tokens and (not len(marks) or marks[0]) else []
    return np.concatenate([np.array(before, np.int64), marks, np.array([split.tokens], np.int64)])


def read_index(split: AuditSplit) -> Starts | str | None:
    """Where documents begin by the document index, or what is wrong with it; None where nothing says it."""
    if split.record is None:
        return split.starts
    record = split.record
    try:
        index = open_index(split.folder / record.document_index, record.documents, record.tokens, record.document_index_sha256)
    except ValueError as problem:
        return str(problem)
    return np.asarray(index).astype(np.int64)
