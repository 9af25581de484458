"""Tokens to words to numbers: the text of any tokenizer in a form that can be compared fast.

A word is a run of letters and digits without case; white space and punctuation between words do not count. Characters from U+3000
on, whose scripts have no spaces, are words of their own. A word becomes a 64-bit hash, the same whatever tokenizer it came from.
Everything is numpy over blocks of tokens, because decoding billions of tokens one by one takes hours.
"""

from __future__ import annotations

import unicodedata
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.data.tokenizers import Tokenizer

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
