"""A table of words and their ids, so that each word of a text is encoded by the library only once.

A tokenizer may use it only if no token spans two words; it says where words begin, and has to prove it. A word begins with the
document, with a run of spaces, or with punctuation after an ASCII letter or digit. Words are looked up with numpy, a portion of
text at a time; only new ones reach the library. The table holds the words themselves and not hashes of them, so two words are
never confused. Its size is fixed: when it is full it is cleared.
"""

from __future__ import annotations

import logging
import re
import string
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

Tokens = NDArray[np.unsignedinteger[Any]]
IdType = np.dtype[np.unsignedinteger[Any]]
UINT16: IdType = np.dtype(np.uint16)
Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]
Flat = tuple[Tokens, Numbers]  # ids one after the other, and how many belong to each word
EncodeWords = Callable[[list[bytes], int], Flat]  # encodes words that all have one of the roles below

FIRST, INNER, LAST = range(3)  # roles: words that start a document, other words, other words that end with a space
PORTION = 1 << 20  # bytes of text looked up at once
WORD_BYTES = 23  # longer words are rare and are encoded by the library every time
ROW_BITS = 20
MAX_WORDS = 3 << 18  # three quarters of the rows
MAX_IDS = 1 << 22
SPACE, MARK, LETTER = 1, 2, 3
LETTERS = (string.ascii_letters + string.digits).encode()
FACTORS = [np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)]
MASKS = np.array([[(1 << 8 * min(max(size - at, 0), 8)) - 1 for at in (0, 8, 16)] for size in range(WORD_BYTES + 1)], "<u8")
OTHER_SPACES = "\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000"
OTHER_BYTES = [int.from_bytes(character.encode(), "big") for character in OTHER_SPACES]
OTHER_ENDS = np.isin(np.arange(256), [code & 0xFF for code in OTHER_BYTES])
NO_SPACE_BEFORE = b"".join(b"(?<!%b)" % re.escape(space.encode()) for space in " \t\n\v\f\r" + OTHER_SPACES)
SAMPLE = (
    "The cat's  hat, 12.5% of 3,000: \u201cquoted\u201d\u2014don't!\n\n\tNext line\xa0 here\r\n x_y=z; caf\xe9 \ufb01ne. ",
    "A\u030a <\u0338 \u6771\u4eac \U0001f600\u3000  b", "I'll (we've)... #1/$2*3=~5^6`7|{9}", "\x01 c\x00d \x1c\x85 e",
    " \n a", "\xa0 c", "",
)  # fmt: skip
SIZE, START, COUNT = np.uint64(56), np.uint64(63), np.uint64(32)  # bit offsets in a key, and in the value stored for it


def concatenate_ids(encoded: Sequence[Sequence[int] | Tokens], dtype: IdType = UINT16) -> Flat:
    """Return the result of an `EncodeWords` function from the ids of each word."""
    counts = np.fromiter(map(len, encoded), np.int64, len(encoded))
    return np.fromiter(chain.from_iterable(encoded), dtype, int(counts.sum())), counts


def checked_table(table: WordTable, encode: Callable[[str], Tokens]) -> WordTable | None:
    """Return the table if it encodes a varied sample as `encode` does, else None."""
    if all(map(np.array_equal, table.encode_all([text.encode() for text in SAMPLE], encode), map(encode, SAMPLE))):
        return table
    log.warning(
        "this tokenizer's words are not independent, although its file says so; the library encodes them, which is slower"
    )
    return None


class _Part(NamedTuple):
    """Part of a document, cut between words."""

    document: int
    text: bytes
    first: bool


class _Words(NamedTuple):
    """The words of a portion: their positions in its text, which of them start documents, and their keys in the table."""

    text: bytes
    begin: Numbers
    end: Numbers
    starts: Flags
    keys: NDArray[np.uint64]  # (words, 3)


class WordTable:
    """A cache of encoded words. `spaces` and `marks` are the ASCII characters that begin words.

    `other_spaces`: runs of spaces may contain non-ASCII spaces. `foreign`: a text that contains this is encoded by the library.
    """

    _words: int  # number of words in the table
    _used: int  # number of ids in the pool

    def __init__(
        self,
        encode: EncodeWords,
        spaces: bytes,
        marks: bytes,
        *,
        other_spaces: bool = False,
        foreign: bytes | None = None,
        dtype: IdType = UINT16,
    ) -> None:
        self._encode, self._other_spaces, self._foreign = encode, other_spaces, foreign
        kinds = dict.fromkeys(LETTERS, LETTER) | dict.fromkeys(marks, MARK) | dict.fromkeys(spaces, SPACE)
        self._kinds = bytes(kinds.get(byte, 0) for byte in range(256))
        self._word = re.compile(NO_SPACE_BEFORE + b"[" + re.escape(spaces) + b"]")
        self._pool = np.empty(MAX_IDS, dtype)
        self._clear()

    def encode_all(self, texts: Sequence[bytes], encode: Callable[[str], Tokens]) -> list[Tokens]:
        """Return the ids of UTF-8 texts; `encode` is used for the few that cannot be encoded word by word."""
        whole = [self._foreign is not None and self._foreign in text for text in texts]
        by_words = self._encode_documents([b"" if foreign else text for text, foreign in zip(texts, whole, strict=True)])
        return [
            encode(text.decode()) if foreign or ids is None else ids
            for text, foreign, ids in zip(texts, whole, by_words, strict=True)
        ]

    def _encode_documents(self, documents: Sequence[bytes]) -> list[Tokens | None]:
        """Return the ids of UTF-8 texts; None for a text whose first word has no ids, so that another word starts it."""
        encoded: list[list[Tokens | None]] = [[] for _ in documents]
        for group in self._groups(documents):
            for part, ids in zip(group, self._encode_parts(group), strict=True):
                encoded[part.document].append(ids)
        return [_joined(parts) for parts in encoded]

    def _groups(self, documents: Sequence[bytes]) -> Iterator[list[_Part]]:
        group: list[_Part] = []
        size = begin = 0
        for number, document in enumerate(documents):
            while begin < len(document):
                cut = self._word.search(document, begin + PORTION) if len(document) - begin > PORTION else None
                end = cut.start() if cut else len(document)
                group.append(_Part(number, document[begin:end], begin == 0))
                size, begin = size + end - begin, end
                if size >= PORTION:
                    yield group
                    group, size = [], 0
            begin = 0
        if group:
            yield group

    def _encode_parts(self, parts: list[_Part]) -> list[Tokens | None]:
        if self._words > MAX_WORDS or self._used > MAX_IDS:
            self._clear()
        begins = np.cumsum([0] + [len(part.text) for part in parts])
        words = self._split(b"".join(part.text for part in parts), begins[:-1], np.array([part.first for part in parts]))
        places, slots = self._look_up(words.keys)
        places[words.end - words.begin > WORD_BYTES] = 0
        self._learn(words, places, slots)

        counts = (places & np.uint64(0xFFFFFFFF)).astype(np.int64)
        ends = np.cumsum(counts)
        ids = np.repeat((places >> COUNT).astype(np.int64) + counts - ends, counts)
        ids += np.arange(len(ids))  # now indices into the pool
        bounds = np.searchsorted(words.begin, begins)
        cuts = np.append(0, ends)[bounds].tolist()
        void = words.starts[bounds[:-1]] & (counts[bounds[:-1]] == 0)
        tokens = self._pool.take(ids)
        return [None if nothing else tokens[a:b] for nothing, a, b in zip(void.tolist(), cuts[:-1], cuts[1:], strict=True)]

    def _split(self, text: bytes, parts: Numbers, firsts: Flags) -> _Words:
        kinds = np.frombuffer(text.translate(self._kinds), np.uint8)
        before, here = kinds[:-1], kinds[1:]
        cut = np.empty(len(text), bool)
        cut[1:] = ((here == SPACE) & (before != SPACE)) | ((here == MARK) & (before == LETTER))
        cut[parts] = True
        begin = np.flatnonzero(cut)
        if self._other_spaces and not text.isascii():  # a run of spaces begins one word, and may begin with a non-ASCII space
            inside = begin[1:][_after_other_space(np.frombuffer(text, np.uint8), begin[1:])]
            begin = np.setdiff1d(begin, np.setdiff1d(inside, parts), assume_unique=True) if len(inside) else begin
        end = np.append(begin[1:], len(text))
        starts = np.zeros(len(begin), bool)
        starts[np.searchsorted(begin, parts)] = firsts
        sizes = np.minimum(end - begin, WORD_BYTES)
        windows = np.ndarray((len(text),), "V24", text + bytes(24), 0, (1,))  # a view of 24 bytes from every byte on
        keys = windows[begin].view("<u8").reshape(-1, 3)
        keys &= MASKS.take(sizes, 0)
        keys[:, 2] |= (sizes.astype(np.uint64) << SIZE) | (starts.astype(np.uint64) << START)
        return _Words(text, begin, end, starts, keys)

    def _look_up(self, keys: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], Numbers]:
        """Return the value stored for each key, 0 if there is none, and the row where the key is or belongs."""
        mixed = keys[:, 0] * FACTORS[0] ^ keys[:, 1] * FACTORS[1] ^ keys[:, 2] * FACTORS[2]
        slots = ((mixed ^ (mixed >> np.uint64(29))) * FACTORS[0] >> np.uint64(64 - ROW_BITS)).astype(np.int64)
        rows = self._rows.take(slots, 0)  # `take` is ten times faster here than indexing
        same = _same(rows, keys)
        places = rows[:, 3] * same
        left = np.flatnonzero(~same & (rows[:, 2] != 0))
        while len(left):
            slots[left] = next_slots = (slots.take(left) + 1) & ((1 << ROW_BITS) - 1)
            rows = self._rows.take(next_slots, 0)
            same = _same(rows, keys.take(left, 0))
            places[left] = rows[:, 3] * same
            left = left[~same & (rows[:, 2] != 0)]
        return places, slots

    def _learn(self, words: _Words, places: NDArray[np.uint64], slots: Numbers) -> None:
        """Encode the words that are not in the table, and store those that are not too long."""
        missing = np.flatnonzero(places == 0)
        long = (words.end - words.begin)[missing] > WORD_BYTES
        kept, rest = missing[~long], missing[long]
        rows, new = self._claim(words.keys.take(kept, 0), slots.take(kept))
        try:
            self._rows[rows[new], 3], self._used = self._encode_words(words, kept[new], self._used)
            self._words += len(new)
            # The ids of long words lie after the stored ones and are overwritten next time.
            places[rest], _ = self._encode_words(words, rest, self._used)
        except BaseException:
            self._clear()  # rows have been claimed and not filled
            raise
        places[kept] = self._rows[rows, 3]

    def _claim(self, keys: NDArray[np.uint64], slots: Numbers) -> tuple[Numbers, Numbers]:
        """Return a row for each key, the same for equal keys, and the indices of the keys that took a free row."""
        first = np.zeros(len(keys), bool)
        left = np.arange(len(keys))
        while len(left):
            at, mine, number = slots.take(left), keys.take(left, 0), left.astype(np.uint64)
            free = self._rows[at, 2] == 0
            self._rows[at[free], 3] = number[free]  # if several keys want one row, the last gets it
            won = free & (self._rows[at, 3] == number)
            self._rows[at[won], :3] = mine[won]
            first[left[won]] = True
            left = left[~_same(self._rows.take(at, 0), mine)]
            slots[left] = (slots.take(left) + 1) & ((1 << ROW_BITS) - 1)
        return slots, np.flatnonzero(first)

    def _encode_words(self, words: _Words, which: Numbers, used: int) -> tuple[NDArray[np.uint64], int]:
        """Encode some words into the pool from `used` on; return where the ids of each are, and the new end."""
        begin, end = words.begin.take(which), words.end.take(which)
        text = np.frombuffer(words.text, np.uint8)
        spaced = text.take(end - 1) <= ord(" ")
        spaced[_after_other_space(text, end)] = True
        roles = np.where(words.starts.take(which), FIRST, np.where(spaced, LAST, INNER))
        places = np.empty(len(which), np.uint64)
        for role in (FIRST, INNER, LAST):
            some = np.flatnonzero(roles == role)
            if len(some):
                pairs = zip(begin[some].tolist(), end[some].tolist(), strict=True)
                ids, counts = self._encode([words.text[a:b] for a, b in pairs], role)
                places[some] = ((used + np.cumsum(counts) - counts).astype(np.uint64) << COUNT) | counts.astype(np.uint64)
                self._store(ids, used)
                used += len(ids)
        return places, used

    def _store(self, ids: Tokens, at: int) -> None:
        if at + len(ids) > len(self._pool):
            self._pool = np.concatenate([self._pool[:at], np.empty(len(ids) + MAX_IDS // 4, self._pool.dtype)])
        self._pool[at : at + len(ids)] = ids

    def _clear(self) -> None:
        self._rows = np.zeros((1 << ROW_BITS, 4), np.uint64)  # three for the key, one for the position and number of its ids
        self._words, self._used = 0, 1  # the pool is filled from 1, so that 0 in a row means empty


def _same(rows: NDArray[np.uint64], keys: NDArray[np.uint64]) -> Flags:
    return (rows[:, 0] == keys[:, 0]) & (rows[:, 1] == keys[:, 1]) & (rows[:, 2] == keys[:, 2])


def _after_other_space(text: NDArray[np.uint8], positions: Numbers) -> Numbers:
    """Return the indices of the positions right after a non-ASCII space."""
    candidates = np.flatnonzero(OTHER_ENDS.take(text.take(positions - 1)))
    last, middle, first = (text.take(positions[candidates] - back, mode="wrap").astype(np.int32) for back in (1, 2, 3))
    return candidates[np.isin(middle << 8 | last, OTHER_BYTES) | np.isin(first << 16 | middle << 8 | last, OTHER_BYTES)]


def _joined(parts: list[Tokens | None]) -> Tokens | None:
    whole = [part for part in parts if part is not None]
    if len(whole) < len(parts):
        return None
    return whole[0] if len(whole) == 1 else np.concatenate([np.empty(0, np.uint16), *whole])
