"""SentencePiece models, and golf's rule for counting their bytes.

The rule: control, unknown and unused ids have no bytes; a byte piece has one; any other piece has its UTF-8 bytes, except that a
leading U+2581 counts as one byte, or as none if the previous id is control, unknown or unused. Published scores use this rule, so
we follow it exactly: a second U+2581 in a piece counts as three bytes. The models normalise text and collapse white space, so the
sum is the size of the normalised text and not of the original. Capital marks (learn_vocabulary.py) have no bytes.

If no token spans two words, each word can be encoded on its own (word_table.py), which is 2.6 times faster with 1,024 ids and 3.8
times with 8,192, on 24 MB of web text. `word_starts` proves this from the model file, for BPE only: merges produce only pieces of
the vocabulary, so two characters that are adjacent in no piece are never merged, and the text can be split between them without
changing its ids. The normaliser replaces the longest matching key, so no key may extend across the start of a word; the library's
built-in rules have no such key. If the proof fails for a model, the library encodes whole texts.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.data.tokenizers.tokenizer_base import MARKS, SPACE, FileTokenizer, IdArray, Ids, NoSpacePiece, check_size, utf8
from ingot.data.tokenizers.word_table import LETTERS, WordTable
from ingot.errors import DataError

BPE = 2  # model_type in the trainer settings of a BPE model
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # types of pieces in a .model file
# The library's built-in normalisation rules. No key (replaced text) contains a space or newline together with other characters.
# A key begins with a letter, a digit, a control character or a character in JOINED; its later characters are never ASCII.
NORMALISERS, JOINED = (b"nfkc", b"nmt_nfkc", b"nfkc_cf", b"nmt_nfkc_cf"), set("<=>")


def word_starts(contents: bytes, model: Any) -> tuple[bytes, bytes] | None:
    """Return the white space and the punctuation that can begin words, or None if a token might span two words."""
    fields = list(message_fields(contents))
    trainer, normaliser = (dict(message_fields(b"".join(value for key, value in fields if key == part))) for part in (2, 3))
    folds, rules = normaliser.get(4, 1), normaliser.get(2, b"")  # folds: runs of spaces collapse to one space
    pieces = [dict(message_fields(value)) for key, value in fields if key == 1]
    texts = [piece[1].decode() for piece in pieces if piece.get(3) not in (UNKNOWN, CONTROL, BYTE)]
    symbols = "".join(piece[1].decode() for piece in pieces if piece.get(3) == USER_DEFINED)
    if trainer.get(3) != BPE or trainer.get(24) or not normaliser.get(5, 1):
        return None  # the model is not BPE, puts spaces at the end of words, or does not write them as U+2581
    if rules and (not folds or normaliser.get(1) not in NORMALISERS):  # rules may join words or produce runs of spaces
        return None
    if any(SPACE in (text[1:] if folds else text.lstrip(SPACE)) for text in texts) or set(symbols) & {SPACE, " ", "\n"}:
        return None
    spaces = [c for c in (" \n" if folds else " ") if model.normalize(f"a{c}b").endswith(f"a{SPACE}b")]
    inside = {after for text in texts for before, after in pairwise(text) if before.encode() in LETTERS}
    marks = {mark for mark in string.punctuation if not model.is_unknown(model.piece_to_id(mark))} - inside - JOINED
    return "".join(spaces).encode(), "".join(sorted(marks)).encode()


def message_fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a protobuf message: (field number, integer or bytes)."""
    return ((field, value) for field, value, _ in message_parts(message))


def message_parts(message: bytes) -> Iterator[tuple[int, Any, bytes]]:
    """Yield the fields of a protobuf message as (field number, value, encoded bytes)."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while (begin := at) < len(message):
        key, wire = divmod(number(), 8)
        if wire == 0:
            value: Any = number()
        else:
            size = number() if wire == 2 else {1: 8, 5: 4}[wire]
            value = message[at : at + size]
            at += size
        yield key, value, message[begin:at]


# Some models encode capitals as a mark before lower-case letters (learn_vocabulary.py).
MARKED = re.compile(rb"\xee\x80(?:\x80( ?[a-z]?)|\x81( ?[a-z]{0,2}))")
# Characters that golf's normalisation collapses into one space, and those that it drops, including mark characters in the text.
SPACES = re.compile("[\t\n\f\r \xa0\u1680\u2000-\u200c\u200e\u200f\u2028\u2029\u202f\u205f\u2581\u3000\ufeff\ufffd]+")
DROPPED = re.compile("[\x01-\x08\x0b\x0e-\x1f\x7f\x8f\x9f\ue000\ue001]+")
UNFINISHED = re.compile(rb"\xee\x80(?:\x80 ?|\x81 ?[a-z]?)\Z")


def folded(text: str) -> str:
    """Collapse white space and drop control characters; the model itself does not collapse spaces before a capital mark."""
    return SPACES.sub(" ", DROPPED.sub("", text)).strip(" ")


class SentencePieceTokenizer(FileTokenizer):
    """A tokenizer read from a SentencePiece .model file; the sentencepiece library does the encoding."""

    kind = "sentencepiece"
    lossless = False

    def __init__(self, contents: bytes) -> None:
        import sentencepiece  # type: ignore[import-untyped]

        try:
            if not contents:
                raise RuntimeError
            model = sentencepiece.SentencePieceProcessor(model_proto=contents)
            check_size(model.vocab_size())
            marks = MARKS if MARKS[0] in model.normalize("A") else ""
            table = [_entry(model, token, marks) for token in range(model.vocab_size())]
        except (RuntimeError, ValueError, OSError):
            raise DataError("this is not a SentencePiece model, or it is damaged") from None
        pieces, spaced, sizes = zip(*table, strict=True)
        if not any(piece == b" " and starts for piece, starts, _ in table):
            raise NoSpacePiece(
                "the model has no piece for a single space (U+2581): a space would become three byte pieces and byte counts "
                "would be wrong; train a model on text that contains spaces"
            )
        if sum(piece is not None and piece.endswith(b" ") and not starts for piece, starts, _ in table) > sum(spaced):
            raise DataError("the model puts spaces after words (treat_whitespace_as_suffix), so byte counts would be wrong")
        self.contents, self._model, self._piece_sizes = contents, model, sizes
        self.marks_capitals = bool(marks)
        special = (model.bos_id(), model.eos_id(), model.pad_id())
        self.bos, self.eos, self.pad = (token if token >= 0 else None for token in special)
        adds_space = any(spaced[token] for token in model.encode("a")[:1])
        self._use(pieces, spaced, adds_space=adds_space, counts_first_space=False)

    def encode(self, text: str) -> IdArray:
        utf8(text)
        return np.array(self._model.encode(folded(text) if self.marks_capitals else text), self.dtype)

    def decode_bytes(self, ids: Ids, at_start: bool = False) -> bytes:
        if not self.marks_capitals:
            return super().decode_bytes(ids, at_start)
        ids = self._checked(ids)
        parts = np.split(ids, np.flatnonzero(self._special.take(ids)))  # a capital mark must not affect the next document
        starts = [at_start, *(True for _ in parts[1:])]
        decoded = (super(SentencePieceTokenizer, self).decode_bytes(*part) for part in zip(parts, starts, strict=True))
        # Replace marks and the letters after them by capitals; a mark without a letter is dropped.
        return b"".join(MARKED.sub(lambda match: (match[1] or match[2] or b"").upper(), part) for part in decoded)

    def unfinished(self, ids: Ids) -> int:
        if self.marks_capitals:
            for count in range(1, min(3, len(ids)) + 1):  # at most a mark, a space and a letter are pending
                if self.is_special(int(ids[-count])):
                    break
                if UNFINISHED.search(super().decode_bytes(ids[-count:])):
                    return count
        return 0

    def is_special(self, token: int) -> bool:
        return bool(self._special[self._rows([token])][0])  # a capital mark is not special, although it has no bytes

    def token_bytes(self) -> NDArray[np.int32]:
        return np.array(self._piece_sizes, np.int32)

    def _encode_all(self, texts: Sequence[bytes]) -> Iterable[IdArray]:
        return self._table.encode_all(texts) if self._table else super()._encode_all(texts)

    @cached_property
    def _table(self) -> WordTable | None:
        if (starts := word_starts(self.contents, self._model)) is None:
            return None
        # The normaliser does not treat U+2581 in a text as a space, but in a piece U+2581 stands for a space.
        return WordTable(self._encode_words, self.encode, *starts, foreign=SPACE.encode(), dtype=self.dtype)

    def _encode_words(self, words: list[bytes], at_start: bool) -> list[list[int]]:
        if at_start:
            return list(self._model.encode(words, num_threads=1))
        letter = len(self._model.encode("a"))
        return [ids[letter:] for ids in self._model.encode([b"a" + word for word in words], num_threads=1)]


def _entry(model: Any, token: int, marks: str) -> tuple[bytes | None, bool, int]:
    """Return an id's text (None if special), whether it begins with a space, and its byte count (golf's rule, no `marks`)."""
    if model.is_control(token) or model.is_unknown(token) or model.is_unused(token):
        return None, False, 0
    name = str(model.id_to_piece(token))
    if model.is_byte(token):
        return bytes([int(name[3:5], 16)]), False, 1
    spaced = name.startswith(SPACE)
    text = name.removeprefix(SPACE).translate(dict.fromkeys(map(ord, marks)))
    return name.replace(SPACE, " ").encode(), spaced, len(text.encode()) + spaced
