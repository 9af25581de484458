"""A cache from words to their ids, so that each word of a text is encoded by the library only once.

A tokenizer may use the cache only if it defines where words begin and proves that no token spans two words. A word begins at the
start of a document, at a run of spaces, or at punctuation after an ASCII letter or digit. Words are looked up with numpy, a chunk
of text at a time (a Python dict is three times slower); only cache misses reach the library. The keys are the words themselves
and not hashes, so words never collide. The size is fixed: when the cache is full, it is cleared.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.unsignedinteger[Any]]
Numbers = NDArray[np.int64]
EncodeWords = Callable[[list[bytes], bool], Iterable[Sequence[int]]]  # called as (words, True if they start a document)

PORTION = 1 << 20  # bytes of text looked up at once
WORD_BYTES = 23  # longer words are rare and never cached
ROW_BITS = 20
MAX_WORDS = 3 << 18  # 75% load factor of the hash table
MAX_IDS = 1 << 22
SPACE, MARK, LETTER = 1, 2, 3
LETTERS = (string.ascii_letters + string.digits).encode()
FACTORS = [np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)]
MASKS = np.array([[(1 << 8 * min(max(size - at, 0), 8)) - 1 for at in (0, 8, 16)] for size in range(WORD_BYTES + 1)], "<u8")
OTHER_SPACES = "|".join(map(chr, [0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000]))
# In GPT-2's regex a run of white space begins a word: only the run's last character can join the text after the run, and the
# lookahead tests just the next character. Punctuation after a letter or digit also begins a word: no match contains such a pair,
# and the regex never looks behind. Texts with a non-ASCII space in a run of white space are encoded by the library.
GPT2_RULE = (b"\t\n\v\f\r ", string.punctuation.encode(), b"(?:%b)[\t-\r ]" % OTHER_SPACES.encode())
SIZE, START, COUNT = np.uint64(56), np.uint64(63), np.uint64(32)  # bit offsets of the fields in a key and in its value


class WordTable:
    """A cache of encoded words. `spaces` and `marks` are the ASCII characters that can begin words.

    `encode` calls the library for the few texts that cannot be encoded word by word, such as those that match `foreign`.
    """

    _words: int  # number of words in the table
    _used: int  # number of ids in the pool

    def __init__(
        self,
        encode_words: EncodeWords,
        encode: Callable[[str], Tokens],
        spaces: bytes,
        marks: bytes,
        foreign: bytes,
        dtype: np.dtype[np.unsignedinteger[Any]],
    ) -> None:
        self._encode_words, self._encode, self._foreign = encode_words, encode, re.compile(foreign)
        kinds = dict.fromkeys(LETTERS, LETTER) | dict.fromkeys(marks, MARK) | dict.fromkeys(spaces, SPACE)
        self._kinds = bytes(kinds.get(byte, 0) for byte in range(256))
        self._space = re.compile(b"(?<![%b])[%b]" % (re.escape(spaces), re.escape(spaces)))
        self._pool = np.empty(MAX_IDS, dtype)
        self._clear()

    def encode_all(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Encode UTF-8 texts and return the ids of each text."""
        by_library = np.array([not text.isascii() and self._foreign.search(text) is not None for text in texts], bool)
        by_words = [b"" if foreign else text for text, foreign in zip(texts, by_library.tolist(), strict=True)]
        joined = b"".join(by_words)
        starts = np.cumsum([0, *map(len, by_words)])
        bounds = np.zeros_like(starts)  # the number of ids before each text
        parts: list[Tokens] = [self._pool[:0]]
        begin = total = 0
        while begin < len(joined):
            cut = self._space.search(joined, begin + PORTION)
            end = cut.start() if cut else len(joined)
            first, last = np.searchsorted(starts, [begin, end])
            ids, ends, words = self._encode_portion(joined[begin:end], starts[first:last] - begin)
            bounds[first:last] = total + ends[words]
            # If a document's first word has no ids, the next word starts the document, so the library encodes the whole text.
            by_library[first:last] |= ends[words] == ends[words + 1]
            bounds[last:] = total = total + len(ids)
            parts.append(ids)
            begin = end
        ids = np.concatenate(parts)
        encoded = [ids[a:b] for a, b in pairwise(bounds.tolist())]
        for number in np.flatnonzero(by_library).tolist():
            encoded[number] = self._encode(texts[number].decode())
        return encoded

    def _encode_portion(self, text: bytes, starts: Numbers) -> tuple[Tokens, Numbers, Numbers]:
        """Return a chunk's ids, the number of ids before each word and in total, and the index of the first word of each text."""
        if self._words > MAX_WORDS or self._used > MAX_IDS:
            self._clear()
        kinds = np.frombuffer(text.translate(self._kinds), np.uint8)
        before, here = kinds[:-1], kinds[1:]
        is_begin = np.ones(len(text), bool)
        is_begin[1:] = ((here == SPACE) & (before != SPACE)) | ((here == MARK) & (before == LETTER))
        is_begin[starts] = True
        begin = np.flatnonzero(is_begin)
        end = np.append(begin[1:], len(text))
        words = np.searchsorted(begin, starts)
        at_start = np.zeros(len(begin), bool)
        at_start[words] = True

        sizes = np.minimum(end - begin, WORD_BYTES)
        windows = np.ndarray((len(text),), "V24", text + bytes(24), 0, (1,))  # overlapping 24-byte windows, one per byte
        keys = windows[begin].view("<u8").reshape(-1, 3)
        keys &= MASKS.take(sizes, 0)
        keys[:, 2] |= (sizes.astype(np.uint64) << SIZE) | (at_start.astype(np.uint64) << START)
        values, rows = self._look_up(keys)
        is_long = end - begin > WORD_BYTES
        values[is_long] = 0
        for is_kept in (True, False):
            missing = np.flatnonzero((values == 0) & (is_long != is_kept))
            spelled = [
                (text[a:b], start)
                for a, b, start in zip(begin[missing].tolist(), end[missing].tolist(), at_start[missing].tolist(), strict=True)
            ]
            new = self._learn(list(dict.fromkeys(spelled)), is_kept)
            values[missing] = np.fromiter(map(new.__getitem__, spelled), np.uint64, len(spelled))
            if is_kept:
                stored = set()
                for key, value, row in zip(keys[missing], values[missing].tolist(), rows[missing], strict=True):
                    if value not in stored:  # the text may repeat a missing word
                        while self._rows[row, 2]:  # row taken by another new word: linear probing
                            row = (row + 1) & ((1 << ROW_BITS) - 1)
                        self._rows[row] = (*key, value)
                        stored.add(value)
                self._words += len(new)

        counts = (values & np.uint64(0xFFFFFFFF)).astype(np.int64)
        ends = np.append(0, np.cumsum(counts))
        places = np.repeat((values >> COUNT).astype(np.int64) - ends[:-1], counts)
        places += np.arange(len(places))
        return self._pool.take(places), ends, words

    def _look_up(self, keys: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], Numbers]:
        """Return the value of each key (0 if missing) and the row of the hash table that holds the key or is free for it."""
        mixed = keys[:, 0] * FACTORS[0] ^ keys[:, 1] * FACTORS[1] ^ keys[:, 2] * FACTORS[2]
        slots = ((mixed ^ (mixed >> np.uint64(29))) * FACTORS[0] >> np.uint64(64 - ROW_BITS)).astype(np.int64)
        values = np.zeros(len(keys), np.uint64)
        left = np.arange(len(keys))
        while len(left):
            rows = self._rows.take(slots[left], 0)  # `take` is ten times faster here than indexing
            same = (rows[:, :3] == keys.take(left, 0)).all(1)
            values[left] = rows[:, 3] * same
            left = left[~same & (rows[:, 2] != 0)]
            slots[left] = (slots[left] + 1) & ((1 << ROW_BITS) - 1)
        return values, slots

    def _learn(self, words: list[tuple[bytes, bool]], is_kept: bool) -> dict[tuple[bytes, bool], int]:
        """Encode distinct words into the pool and return their values; unless `is_kept`, the next call overwrites their ids."""
        values, used = {}, self._used
        for at_start in (True, False):
            some = [word for word, start in words if start is at_start]
            encoded = list(self._encode_words(some, at_start)) if some else []
            for word, ids in zip(some, encoded, strict=True):
                values[word, at_start] = (used << int(COUNT)) | len(ids)
                used += len(ids)
            if used > len(self._pool):
                self._pool = np.concatenate([self._pool, np.empty(used + MAX_IDS // 4 - len(self._pool), self._pool.dtype)])
            count = sum(map(len, encoded))
            self._pool[used - count : used] = np.fromiter(chain.from_iterable(encoded), self._pool.dtype, count)
        if is_kept:
            self._used = used
        return values

    def _clear(self) -> None:
        self._rows = np.zeros((1 << ROW_BITS, 4), np.uint64)  # three columns for the key, one for offset and number of ids
        self._words, self._used = 0, 1  # the pool is filled from index 1, so a value of 0 marks a word that is not in the table
