"""Validation documents that are in the training data: whole, or run of words by run of words.

The hashes of validation are kept, train is read once and looked up in them, so memory grows with validation alone. A document
longer than a block is read in blocks of its own; only the few runs across their borders are not compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ingot.data.tokenizers import Tokenizer
from ingot.data.verify.folder import AuditSplit, Starts
from ingot.data.verify.words import Hashes, Places, shingles, word_hasher

BLOCK_TOKENS = 1 << 18
SLOTS = 8  # of the filter, at least, for every hash; a filter of one in four lets one in twenty of the others pass
NOWHERE = -1
Kind = Literal["tokens", "words", "runs"]


@dataclass(frozen=True)
class ComparedSplit:
    """A split to compare: its tokens, where its documents begin, and what they stand for."""

    split: AuditSplit
    starts: Starts
    tokenizer: Tokenizer

    def document(self, number: int) -> NDArray[Any]:
        """The tokens of one document."""
        return self.split.read(int(self.starts[number]), int(self.starts[number + 1]))


@dataclass(frozen=True)
class Match:
    """A validation document that is in train, and the train document that it is, or that has most of its runs of words.

    `kind`: tokens, the same; words, the same but for case, white space and punctuation; runs, `share` of its runs of words.
    """

    document: int
    train: int
    kind: Kind
    share: float


@dataclass(frozen=True)
class Overlap:
    """What a comparison came to."""

    documents: int
    runs: int
    runs_found: int
    matches: list[Match]

    @property
    def share(self) -> float:
        """The part of validation's runs of words that is in train."""
        return self.runs_found / self.runs if self.runs else 0.0


def find_overlap(
    val: ComparedSplit,
    train: ComparedSplit,
    run_words: int,
    least_share: float,
    tell: Callable[[int], None] = lambda tokens: None,
) -> Overlap:
    """Compares validation with train. A document with more than `least_share` of its runs of words in train is a match.

    `tell` hears of the tokens that were read: those of train once and those of validation twice.
    """
    held = _Held(val, run_words, tell)
    copies, source = held.search(train, tell)
    total, found = held.count(source, tell)
    shares = found / np.maximum(total, 1)
    same_ids = val.tokenizer.fingerprint() == train.tokenizer.fingerprint()
    matches = []
    for document in sorted({*copies, *np.flatnonzero(shares > least_share).tolist()}):
        share = float(shares[document])
        if document not in copies:
            matches.append(Match(document, held.mostly(document, source), "runs", share))
            continue
        equal = same_ids and np.array_equal(val.document(document), train.document(copies[document]))
        matches.append(Match(document, copies[document], "tokens" if equal else "words", share if total[document] else 1.0))
    return Overlap(len(total), int(total.sum()), int(found.sum()), matches)


class _Held:
    """What is kept of validation: a key for every document and the hashes of all runs of words."""

    def __init__(self, val: ComparedSplit, run_words: int, tell: Callable[[int], None]) -> None:
        self._val, self._run_words = val, run_words
        self._documents: dict[bytes, list[int]] = {}
        keys, runs = _Keys(val.tokenizer), []
        for read in _reads(val, run_words, tell):
            runs.append(read.runs)
            for number, key in keys.of(read):
                self._documents.setdefault(key, []).append(number)
        self._runs = RunSet(np.concatenate(runs) if runs else np.empty(0, np.uint64))

    def search(self, train: ComparedSplit, tell: Callable[[int], None]) -> tuple[dict[int, int], Places]:
        """The train document that each copied document is, and one for each run of words, or NOWHERE."""
        source = np.full(len(self._runs.hashes), NOWHERE, np.int64)
        copies: dict[int, int] = {}
        keys = _Keys(train.tokenizer)
        for read in _reads(train, self._run_words, tell):
            which, where = self._runs.find(read.runs)
            source[where] = read.documents(which)
            for number, key in keys.of(read):
                for document in self._documents.get(key, ()):
                    copies.setdefault(document, number)
        return copies, source

    def count(self, source: Places, tell: Callable[[int], None]) -> tuple[Places, Places]:
        """For every document its runs of words, and those that were found."""
        total, found = np.zeros((2, len(self._val.starts) - 1), np.int64)
        for read in _reads(self._val, self._run_words, tell):
            which, where = self._runs.find(read.runs)
            documents = read.documents(which)
            np.add.at(total, documents, 1)
            np.add.at(found, documents, source[where] != NOWHERE)
        return total, found

    def mostly(self, document: int, source: Places) -> int:
        """The train document that has most of a document's runs of words."""
        starts = self._val.starts[document : document + 2]
        reads = _reads(ComparedSplit(self._val.split, starts, self._val.tokenizer), self._run_words)
        sources = np.concatenate([source[self._runs.find(read.runs)[1]] for read in reads])
        numbers, counts = np.unique(sources[sources != NOWHERE], return_counts=True)
        return int(numbers[counts.argmax()])


class RunSet:
    """Hashes in order, behind a filter that few others pass: two places in it for every hash."""

    def __init__(self, hashes: Hashes) -> None:
        hashes.sort()
        self.hashes = hashes[np.append(True, hashes[1:] != hashes[:-1])] if len(hashes) else hashes
        bits = (SLOTS * len(self.hashes) + 1).bit_length()
        self._shift, self._mask = np.uint64(64 - bits), np.uint64((1 << bits) - 1)
        self._filter = np.zeros(1 << bits, bool)
        self._filter[self.hashes >> self._shift] = True
        self._filter[self.hashes & self._mask] = True

    def find(self, hashes: Hashes) -> tuple[Places, Places]:
        """Which of `hashes` are in the set, and where in it."""
        which = np.flatnonzero(self._filter[hashes >> self._shift])
        which = which[self._filter[hashes[which] & self._mask]] if len(self.hashes) else which[:0]
        where = np.minimum(np.searchsorted(self.hashes, hashes[which]), len(self.hashes) - 1)
        same = self.hashes[where] == hashes[which]
        return which[same], where[same]


class _Keys:
    """What makes documents equal: their words, or, of those without any, their tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._marks = int(tokenizer.bos is not None)
        self._begun: Any = None  # the key of a document of which a part is still to come

    def of(self, read: _Read) -> Iterator[tuple[int, bytes]]:
        """The documents that end in a block, with their keys; those without text have none."""
        words = [*read.firsts.tolist(), len(read.words)]
        tokens = [*read.block.starts.tolist(), len(read.block.ids)]
        for i in range(len(words) - 1):
            key = self._begun or hashlib.blake2b(digest_size=16)
            spelled, ids = read.words[words[i] : words[i + 1]], read.block.ids[tokens[i] : tokens[i + 1]]
            key.update((spelled if len(spelled) else ids).tobytes())
            ended = read.block.ends or i < len(words) - 2
            empty = self._begun is None and not len(spelled) and len(ids) <= self._marks
            self._begun = None if ended else key
            if ended and not empty:
                yield read.block.first + i, key.digest()


@dataclass(frozen=True)
class _Block:
    """Whole documents, or a part of one that is too long."""

    first: int  # document
    ids: NDArray[Any]
    starts: Places  # of its documents, in it
    ends: bool  # its last document


@dataclass(frozen=True)
class _Read:
    """What a block comes down to."""

    block: _Block
    words: Hashes
    firsts: Places  # the first word of every document
    runs: Hashes
    places: Places  # the first word of every run

    def documents(self, runs: Places) -> Places:
        """The documents of some runs."""
        return self.block.first + np.searchsorted(self.firsts, self.places[runs], "right") - 1


def _reads(side: ComparedSplit, run_words: int, tell: Callable[[int], None] = lambda tokens: None) -> Iterator[_Read]:
    """The blocks of a split in order."""
    hasher = word_hasher(side.tokenizer)
    for block in _blocks(side):
        words, firsts = hasher.words(block.ids, block.starts)
        yield _Read(block, words, firsts, *shingles(words, firsts, run_words))
        tell(len(block.ids))


def _blocks(side: ComparedSplit) -> Iterator[_Block]:
    starts, document = side.starts, 0
    while document < len(starts) - 1:
        begin = int(starts[document])
        last = max(document + 1, int(np.searchsorted(starts, begin + BLOCK_TOKENS, "right")) - 1)
        end = int(starts[last])
        for cut in range(begin, end, BLOCK_TOKENS) if end > begin else ():
            stop = min(cut + BLOCK_TOKENS, end)
            inside = starts[document:last] - begin if cut == begin else np.zeros(1, np.int64)
            yield _Block(document, side.split.read(cut, stop), inside, stop == end)
        document = last
