"""Validation documents that are in the training data: whole, or run of words by run of words.

The hashes of validation are kept, train is read once and looked up in them, so memory grows with validation alone. A document
longer than a block is read in blocks of its own; only the few runs across their borders are not compared.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ingot.data.tokenizers import Tokenizer
from ingot.data.verify.folder import AuditSplit, Starts

# Tokens to words to numbers: the text of any tokenizer in a form that can be compared fast.

Hashes = NDArray[np.uint64]
Places = NDArray[np.int64]
BETWEEN = 0  # the byte that stands for whatever is not in a word
APART = 0xE3  # first UTF-8 byte of U+3000 and above
QUOTES = 0xE2  # with 0x80 or 0x81 after it: U+2000 to U+207F, which are spaces, dashes and quotes
LONGEST = 64  # bytes of a word; a longer run of letters is several
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying by it loses nothing
ASCII = bytes(ord(chr(b).lower()) if chr(b).isalnum() else BETWEEN for b in range(0x80)) + bytes(range(0x80, 0x100))
MASKS = np.array([(1 << 8 * size) - 1 for size in range(9)], np.uint64)


class WordHasher:
    """The words of a tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = [_spelled(tokenizer.decode_bytes([token])) for token in range(tokenizer.vocab_size)]
        self._separator = len(pieces)  # an id of its own, which ids outside the vocabulary become
        self._marked = tokenizer.bos is not None
        self._sizes = np.array([*map(len, pieces), 1], np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._letters = np.frombuffer(b"".join([*pieces, bytes([BETWEEN])]), np.uint8)

    def words(self, ids: NDArray[Any], starts: Places) -> tuple[Hashes, Places]:
        """The hash of each word, and how many words come before each document; `starts` is where documents begin in `ids`."""
        rows = np.minimum(ids.astype(np.int64), self._separator)
        if not self._marked:  # or a word would run on from one document into the next
            rows, starts = np.insert(rows, starts, self._separator), starts + np.arange(len(starts))
        letters, ends = self._spell(rows)
        _fold(letters)
        inside = letters != BETWEEN
        begins = np.flatnonzero(inside[1:] > inside[:-1]) + 1
        lengths = np.flatnonzero(inside[1:] < inside[:-1]) + 1 - begins
        begins, lengths = _cut(begins, lengths)
        return _hash(letters, begins, lengths), np.searchsorted(begins, 1 + np.append(0, ends)[starts])

    def _spell(self, rows: Places) -> tuple[NDArray[np.uint8], Places]:
        """The letters of the tokens after one zero and in front of eight, and where each token ends without the one."""
        sizes = self._sizes[rows]
        ends = np.cumsum(sizes)
        source = np.repeat(self._starts[rows] - (ends - sizes), sizes)
        source += np.arange(len(source))
        letters = np.zeros(1 + len(source) + 8, np.uint8)
        letters[1:-8] = self._letters.take(source)
        return letters, ends


@lru_cache(maxsize=2)
def word_hasher(tokenizer: Tokenizer) -> WordHasher:
    """The speller of a tokenizer; it is asked for again and again, and a large vocabulary takes half a second."""
    return WordHasher(tokenizer)


def shingles(words: Hashes, firsts: Places, count: int) -> tuple[Hashes, Places]:
    """The hash of each run of `count` words inside one document, and its first word; `firsts` are those of the documents."""
    hashes = _runs(words, count)
    inside = np.ones(len(hashes), bool)
    crossing = (firsts[1:, None] - np.arange(1, count)).ravel()
    inside[crossing[(crossing >= 0) & (crossing < len(hashes))]] = False
    places = np.flatnonzero(inside)
    return hashes[places], places


def _runs(words: Hashes, count: int) -> Hashes:
    """A polynomial of each run of `count` words, put together from those of runs half as long."""
    if count == 1 or len(words) < count:
        return words[: max(0, len(words) - count + 1)]
    half = count // 2
    parts = _runs(words, half)
    pairs = parts[:-half] * np.uint64(pow(int(FACTOR), half, 1 << 64)) + parts[half:]
    return pairs[: len(words) - count + 1] * FACTOR + words[count - 1 :] if count % 2 else pairs


def _spelled(piece: bytes) -> bytes:
    """A piece with zeros for what is not in a word, and in front of characters that are words of their own."""
    piece = piece.translate(ASCII) or bytes([BETWEEN])
    if max(piece) < APART:
        return piece
    return b"".join(bytes([BETWEEN, byte] if byte >= APART else [byte]) for byte in piece)


@cache
def _pairs() -> NDArray[np.uint8]:
    """For every two bytes the two that take their place: U+0080 to U+07FF without case, zeros if not in a word."""
    table = np.stack(np.meshgrid(np.arange(256), np.arange(256), indexing="ij"), -1).astype(np.uint8)
    for code in range(0x80, 0x800):
        character = chr(code)
        first, second = character.encode()
        lower = character.lower().encode()
        if unicodedata.category(character)[0] in "ZPSC":
            table[first, second] = BETWEEN
        elif len(lower) == 2:
            table[first, second] = list(lower)
    return table


def _fold(letters: NDArray[np.uint8]) -> None:
    """Takes away the case of characters of two bytes and the punctuation among those of two and three, in place."""
    places = np.flatnonzero(letters >= 0xC2)
    places = places[places < len(letters) - 8]
    double = places[letters[places] < 0xE0]
    folded = _pairs()[letters[double], letters[double + 1]]
    letters[double], letters[double + 1] = folded[:, 0], folded[:, 1]
    quotes = places[letters[places] == QUOTES]
    quotes = quotes[letters[quotes + 1] & 0xFE == 0x80]
    letters[quotes[:, None] + np.arange(3)] = BETWEEN


def _cut(begins: Places, lengths: Places) -> tuple[Places, Places]:
    """Runs of letters that are too long as several words."""
    if not (lengths > LONGEST).any():
        return begins, lengths
    parts = -(-lengths // LONGEST)
    offsets = LONGEST * (np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts))
    return np.repeat(begins, parts) + offsets, np.minimum(np.repeat(lengths, parts) - offsets, LONGEST)


def _hash(letters: NDArray[np.uint8], begins: Places, lengths: Places) -> Hashes:
    """A number for each word, made of its bytes eight at a time."""
    eights: Hashes = np.ndarray(len(letters) - 7, "<u8", letters.data, strides=(1,))  # at every byte, it and seven more
    hashes = _mix(eights[begins] & MASKS[np.minimum(lengths, 8)])
    left = np.flatnonzero(lengths > 8)
    while len(left):
        begins, lengths = begins[lengths > 8] + 8, lengths[lengths > 8] - 8
        hashes[left] = _mix(hashes[left] ^ (eights[begins] & MASKS[np.minimum(lengths, 8)]))
        left = left[lengths > 8]
    return hashes


def _mix(numbers: Hashes) -> Hashes:
    """Another number for each, with no pattern left."""
    numbers = numbers * FACTOR
    return numbers ^ (numbers >> np.uint64(32))


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
