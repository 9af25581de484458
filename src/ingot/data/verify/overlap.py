"""Find validation documents that are in the training data, whole or by their runs of words.

The hashes of validation are kept in memory and train is read once and looked up in them, so memory grows with validation alone. A
document longer than a block is read in several; only the few runs across their borders are not compared.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ingot.data.store.dataset import Split
from ingot.data.tokenizers import Tokenizer
from ingot.data.verify.counting import OnTokens, Starts

Hashes = NDArray[np.uint64]
Places = NDArray[np.int64]
BETWEEN = 0  # replaces every byte that is not part of a word
SINGLE = 0xE3  # first UTF-8 byte of U+3000 and above, where each character counts as a word
QUOTES = 0xE2  # followed by 0x80 or 0x81: U+2000 to U+207F, which are spaces, dashes and quotes
MAX_WORD_BYTES = 64  # a longer run of letters counts as several words
FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplication modulo 2**64 is invertible
ASCII = bytes(ord(chr(b).lower()) if chr(b).isalnum() else BETWEEN for b in range(0x80)) + bytes(range(0x80, 0x100))
MASKS = np.array([(1 << 8 * size) - 1 for size in range(9)], np.uint64)


class WordHasher:
    """Hashes the words of a tokenizer's tokens: the text of any tokenizer in a form that compares fast."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = [_spelled(tokenizer.decode_bytes([token])) for token in range(tokenizer.vocab_size)]
        self._separator = len(pieces)  # an extra id that replaces ids outside the vocabulary
        self._marked = tokenizer.bos is not None
        self._sizes = np.array([*map(len, pieces), 1], np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._letters = np.frombuffer(b"".join([*pieces, bytes([BETWEEN])]), np.uint8)

    def words(self, ids: NDArray[Any], starts: Places) -> tuple[Hashes, Places]:
        """Return the hash of each word, and the words before each document; `starts` says where documents begin in `ids`."""
        rows = np.minimum(ids.astype(np.int64), self._separator)
        if not self._marked:  # else a word would continue from one document into the next
            rows, starts = np.insert(rows, starts, self._separator), starts + np.arange(len(starts))
        letters, ends = self._spell(rows)
        _fold(letters)
        inside = letters != BETWEEN
        begins = np.flatnonzero(inside[1:] > inside[:-1]) + 1
        lengths = np.flatnonzero(inside[1:] < inside[:-1]) + 1 - begins
        begins, lengths = _cut(begins, lengths)
        return _hash(letters, begins, lengths), np.searchsorted(begins, 1 + np.append(0, ends)[starts])

    def _spell(self, rows: Places) -> tuple[NDArray[np.uint8], Places]:
        """Return the letters of the tokens with one zero before and eight after them, and where each token ends."""
        sizes = self._sizes[rows]
        ends = np.cumsum(sizes)
        source = np.repeat(self._starts[rows] - (ends - sizes), sizes)
        source += np.arange(len(source))
        letters = np.zeros(1 + len(source) + 8, np.uint8)
        letters[1:-8] = self._letters.take(source)
        return letters, ends


@lru_cache(maxsize=2)
def word_hasher(tokenizer: Tokenizer) -> WordHasher:
    """Return the word hasher of a tokenizer, cached: a large vocabulary takes half a second."""
    return WordHasher(tokenizer)


def shingles(words: Hashes, firsts: Places, count: int) -> tuple[Hashes, Places]:
    """Return the hash of each run of `count` words inside one document, and its first word; `firsts`: those of the documents."""
    hashes = _runs(words, count)
    inside = np.ones(len(hashes), bool)
    crossing = (firsts[1:, None] - np.arange(1, count)).ravel()
    inside[crossing[(crossing >= 0) & (crossing < len(hashes))]] = False
    places = np.flatnonzero(inside)
    return hashes[places], places


def _runs(words: Hashes, count: int) -> Hashes:
    """Return a polynomial hash of each run of `count` words, composed from runs half as long."""
    if count == 1 or len(words) < count:
        return words[: max(0, len(words) - count + 1)]
    half = count // 2
    parts = _runs(words, half)
    pairs = parts[:-half] * np.uint64(pow(int(FACTOR), half, 1 << 64)) + parts[half:]
    return pairs[: len(words) - count + 1] * FACTOR + words[count - 1 :] if count % 2 else pairs


def _spelled(piece: bytes) -> bytes:
    """Return a token's bytes with zeros for what is not in a word, and before characters that count as words."""
    piece = piece.translate(ASCII) or bytes([BETWEEN])
    if max(piece) < SINGLE:
        return piece
    return b"".join(bytes([BETWEEN, byte] if byte >= SINGLE else [byte]) for byte in piece)


@cache
def _pairs() -> NDArray[np.uint8]:
    """Build the table that maps two bytes to two bytes: U+0080 to U+07FF in lower case, zeros if not in a word."""
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
    """Lower the case of two-byte characters and blank the punctuation among two- and three-byte ones, in place."""
    places = np.flatnonzero(letters >= 0xC2)
    places = places[places < len(letters) - 8]
    double = places[letters[places] < 0xE0]
    folded = _pairs()[letters[double], letters[double + 1]]
    letters[double], letters[double + 1] = folded[:, 0], folded[:, 1]
    quotes = places[letters[places] == QUOTES]
    quotes = quotes[letters[quotes + 1] & 0xFE == 0x80]
    letters[quotes[:, None] + np.arange(3)] = BETWEEN


def _cut(begins: Places, lengths: Places) -> tuple[Places, Places]:
    """Split runs of letters that are too long into several words."""
    if not (lengths > MAX_WORD_BYTES).any():
        return begins, lengths
    parts = -(-lengths // MAX_WORD_BYTES)
    offsets = MAX_WORD_BYTES * (np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts))
    return np.repeat(begins, parts) + offsets, np.minimum(np.repeat(lengths, parts) - offsets, MAX_WORD_BYTES)


def _hash(letters: NDArray[np.uint8], begins: Places, lengths: Places) -> Hashes:
    """Hash each word, eight bytes at a time."""
    eights: Hashes = np.ndarray(len(letters) - 7, "<u8", letters.data, strides=(1,))  # an 8-byte window at every byte offset
    hashes = _mix(eights[begins] & MASKS[np.minimum(lengths, 8)])
    left = np.flatnonzero(lengths > 8)
    while len(left):
        begins, lengths = begins[lengths > 8] + 8, lengths[lengths > 8] - 8
        hashes[left] = _mix(hashes[left] ^ (eights[begins] & MASKS[np.minimum(lengths, 8)]))
        left = left[lengths > 8]
    return hashes


def _mix(numbers: Hashes) -> Hashes:
    """Scramble each number."""
    numbers = numbers * FACTOR
    return numbers ^ (numbers >> np.uint64(32))


BLOCK_TOKENS = 1 << 18
SLOTS = 8  # filter slots per hash, at least; each hash sets two, so about one in twenty other hashes passes
NOWHERE = -1
Kind = Literal["tokens", "words", "runs"]


@dataclass(frozen=True)
class ComparedSplit:
    """A split to compare: its tokens, where its documents begin, and its tokenizer."""

    split: Split
    starts: Starts
    tokenizer: Tokenizer

    def document(self, number: int) -> NDArray[Any]:
        """Return the tokens of one document."""
        return self.split.read(int(self.starts[number]), int(self.starts[number + 1]))


@dataclass(frozen=True)
class Match:
    """A validation document that is in train, and the train document that equals it or has most of its runs of words.

    `kind`: tokens are equal; words are (all but case, white space and punctuation); or a `share` of the runs of words is.
    """

    document: int
    train: int
    kind: Kind
    share: float


@dataclass(frozen=True)
class Overlap:
    """The result of a comparison."""

    documents: int
    runs: int
    runs_found: int
    matches: list[Match]

    @property
    def share(self) -> float:
        """The share of validation's runs of words that is in train."""
        return self.runs_found / self.runs if self.runs else 0.0


def find_overlap(
    val: ComparedSplit,
    train: ComparedSplit,
    run_words: int,
    least_share: float,
    on_tokens: OnTokens = lambda tokens: None,
) -> Overlap:
    """Compare validation with train. A document with more than `least_share` of its runs of words in train is a match.

    `on_tokens` is called for the tokens that were read: those of train once and those of validation twice.
    """
    held = _HeldHashes(val, run_words, on_tokens)
    copies, source = held.search(train, on_tokens)
    total, found = held.count(source, on_tokens)
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


class _HeldHashes:
    """The hashes of validation: a key for every document and all runs of words."""

    def __init__(self, val: ComparedSplit, run_words: int, on_tokens: OnTokens) -> None:
        self._val, self._run_words = val, run_words
        self._documents: dict[bytes, list[int]] = {}
        keys, runs = _Keys(val.tokenizer), []
        for read in _reads(val, run_words, on_tokens):
            runs.append(read.runs)
            for number, key in keys.of(read):
                self._documents.setdefault(key, []).append(number)
        self._runs = RunSet(np.concatenate(runs) if runs else np.empty(0, np.uint64))

    def search(self, train: ComparedSplit, on_tokens: OnTokens) -> tuple[dict[int, int], Places]:
        """Return the train document that each copied document equals, and one for each run of words, or NOWHERE."""
        source = np.full(len(self._runs.hashes), NOWHERE, np.int64)
        copies: dict[int, int] = {}
        keys = _Keys(train.tokenizer)
        for read in _reads(train, self._run_words, on_tokens):
            which, where = self._runs.find(read.runs)
            source[where] = read.documents(which)
            for number, key in keys.of(read):
                for document in self._documents.get(key, ()):
                    copies.setdefault(document, number)
        return copies, source

    def count(self, source: Places, on_tokens: OnTokens) -> tuple[Places, Places]:
        """Return for every document the number of its runs of words, and of those that are in train."""
        total, found = np.zeros((2, len(self._val.starts) - 1), np.int64)
        for read in _reads(self._val, self._run_words, on_tokens):
            which, where = self._runs.find(read.runs)
            documents = read.documents(which)
            np.add.at(total, documents, 1)
            np.add.at(found, documents, source[where] != NOWHERE)
        return total, found

    def mostly(self, document: int, source: Places) -> int:
        """Return the train document that has most of a document's runs of words."""
        starts = self._val.starts[document : document + 2]
        reads = _reads(ComparedSplit(self._val.split, starts, self._val.tokenizer), self._run_words)
        sources = np.concatenate([source[self._runs.find(read.runs)[1]] for read in reads])
        numbers, counts = np.unique(sources[sources != NOWHERE], return_counts=True)
        return int(numbers[counts.argmax()])


class RunSet:
    """Sorted hashes behind a Bloom filter with two bits per hash, which few other hashes pass."""

    def __init__(self, hashes: Hashes) -> None:
        hashes.sort()
        self.hashes = hashes[np.append(True, hashes[1:] != hashes[:-1])] if len(hashes) else hashes
        bits = (SLOTS * len(self.hashes) + 1).bit_length()
        self._shift, self._mask = np.uint64(64 - bits), np.uint64((1 << bits) - 1)
        self._filter = np.zeros(1 << bits, bool)
        self._filter[self.hashes >> self._shift] = True
        self._filter[self.hashes & self._mask] = True

    def find(self, hashes: Hashes) -> tuple[Places, Places]:
        """Return which of `hashes` are in the set, and their positions in it."""
        which = np.flatnonzero(self._filter[hashes >> self._shift])
        which = which[self._filter[hashes[which] & self._mask]] if len(self.hashes) else which[:0]
        where = np.minimum(np.searchsorted(self.hashes, hashes[which]), len(self.hashes) - 1)
        same = self.hashes[where] == hashes[which]
        return which[same], where[same]


class _Keys:
    """Computes document keys: a hash of the words or, in documents without words, of the tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._marks = int(tokenizer.bos is not None)
        self._begun: Any = None  # the key of a document that continues in the next block

    def of(self, read: _HashedBlock) -> Iterator[tuple[int, bytes]]:
        """Yield the documents that end in a block, with their keys; documents without text have none."""
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
    """Whole documents, or a part of a document that is too long."""

    first: int  # number of the first document
    ids: NDArray[Any]
    starts: Places  # where documents begin in the block
    ends: bool  # whether the last document ends in the block


@dataclass(frozen=True)
class _HashedBlock:
    """The words and runs of words of a block."""

    block: _Block
    words: Hashes
    firsts: Places  # the first word of every document
    runs: Hashes
    places: Places  # the first word of every run

    def documents(self, runs: Places) -> Places:
        """Return the documents of some runs."""
        return self.block.first + np.searchsorted(self.firsts, self.places[runs], "right") - 1


def _reads(side: ComparedSplit, run_words: int, on_tokens: OnTokens = lambda tokens: None) -> Iterator[_HashedBlock]:
    """Yield the hashed blocks of a split in order."""
    hasher = word_hasher(side.tokenizer)
    for block in _blocks(side):
        words, firsts = hasher.words(block.ids, block.starts)
        yield _HashedBlock(block, words, firsts, *shingles(words, firsts, run_words))
        on_tokens(len(block.ids))


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
