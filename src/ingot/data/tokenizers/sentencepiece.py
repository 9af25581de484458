"""SentencePiece models, and the rule by which golf counts their bytes.

The rule: control, unknown and unused ids stand for nothing; a byte piece for one byte; any other piece for the UTF-8 bytes after
its first U+2581, and one more for that U+2581, unless one of those ids stands before it. Scores are compared by it, so it is kept
to the letter: a second U+2581 in a piece counts its own three bytes. The models normalise text and fold white space, so the sum
is that of the normalised text and not of the original. Marks for capitals (capitals.py) stand for no bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.data.tokenizers.base import CAPITAL, MARKS, PACKED, SPACE, FileTokenizer, IdArray, Ids, NoSpacePiece, check_size, utf8
from ingot.data.tokenizers.word_starts import word_starts
from ingot.data.tokenizers.word_table import FIRST, Flat, WordTable, flat, trusted
from ingot.errors import DataError

# Marks that stand for capitals in the pieces of some SentencePiece models (capitals.py), and the letters that they mean.

MARKED = re.compile(rb"\xee\x80(?:\x80( ?[a-z]?)|\x81( ?[a-z]{0,2}))")
# What golf's rules fold into one space, and what they drop, with marks of the text itself.
SPACES = re.compile("[\t\n\f\r \xa0\u1680\u2000-\u200c\u200e\u200f\u2028\u2029\u202f\u205f\u2581\u3000\ufeff\ufffd]+")
DROPPED = re.compile("[\x01-\x08\x0b\x0e-\x1f\x7f\x8f\x9f\ue000\ue001]+")
UNFINISHED = re.compile(rb"\xee\x80(?:\x80 ?|\x81 ?[a-z]?)\Z")


def folded(text: str) -> str:
    """A text with single spaces, as SentencePiece makes it by itself, but for those in front of a mark."""
    return SPACES.sub(" ", DROPPED.sub("", text)).strip(" ")


def unmarked(data: bytes) -> bytes:
    """A text with its capitals; a mark that no letter follows stands for nothing."""
    return MARKED.sub(lambda found: (found[1] or found[2] or b"").upper(), data)


class SentencePieceTokenizer(FileTokenizer):
    """The tokenizer of a .model file."""

    kind = "sentencepiece"
    lossless = False

    def __init__(self, contents: bytes) -> None:
        import sentencepiece  # type: ignore[import-untyped]

        try:
            if not contents:
                raise RuntimeError
            model = sentencepiece.SentencePieceProcessor(model_proto=contents)
            check_size(model.vocab_size())
            marks = MARKS if CAPITAL in model.normalize("A") else ""
            table = [_entry(model, token, marks) for token in range(model.vocab_size())]
        except (RuntimeError, ValueError, OSError):
            raise DataError("this is not a SentencePiece model, or it is damaged") from None
        pieces, spaced, sizes = zip(*table, strict=True)
        if not any(piece == b" " and starts for piece, starts, _ in table):
            raise NoSpacePiece(
                "the model has no piece for a single space (U+2581): a space would become three byte pieces and the bytes of a "
                "text would be counted wrong; train one on text with spaces in it"
            )
        if sum(piece is not None and piece.endswith(b" ") and not starts for piece, starts, _ in table) > sum(spaced):
            raise DataError("the model has spaces after words (treat_whitespace_as_suffix): their bytes would be counted wrong")
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
        parts = np.split(ids := self._checked(ids), np.flatnonzero(self._special.take(ids)))  # a mark is for its own document
        starts = [at_start, *(True for _ in parts[1:])]
        return b"".join(
            unmarked(super(SentencePieceTokenizer, self).decode_bytes(*part)) for part in zip(parts, starts, strict=True)
        )

    def unfinished(self, ids: Ids) -> int:
        if self.marks_capitals:
            for count in range(1, min(3, len(ids)) + 1):  # a mark, a space, a letter
                if self.is_special(int(ids[-count])):
                    break
                if UNFINISHED.search(super().decode_bytes(ids[-count:])):
                    return count
        return 0

    def is_special(self, token: int) -> bool:
        return bool(self._special[self._rows([token])][0])  # a mark for capitals is none, although it stands for no bytes

    def token_bytes(self) -> NDArray[np.int32]:
        return np.array(self._piece_sizes, np.int32)

    def spec(self) -> dict[str, Any]:
        return {"kind": self.kind, PACKED: self.packed}

    def _encode_all(self, texts: Sequence[bytes]) -> Iterable[IdArray]:
        return self._table.encode_all(texts, self.encode) if self._table else super()._encode_all(texts)

    @cached_property
    def _table(self) -> WordTable | None:
        if (starts := word_starts(self.contents, self._model)) is None:
            return None
        # A U+2581 of the text itself is not a space to the normaliser, but is one in the pieces.
        return trusted(WordTable(self._encode_words, *starts, foreign=SPACE.encode(), dtype=self.dtype), self.encode)

    def _encode_words(self, words: list[bytes], role: int) -> Flat:
        if role == FIRST:
            return flat(self._model.encode(words, num_threads=1), self.dtype)
        letter = len(self._model.encode("a"))
        return flat([ids[letter:] for ids in self._model.encode([b"a" + word for word in words], num_threads=1)], self.dtype)


def _entry(model: Any, token: int, marks: str) -> tuple[bytes | None, bool, int]:
    """The text of a piece, whether it begins with a space, and its bytes by the rule, without `marks`."""
    if model.is_control(token) or model.is_unknown(token) or model.is_unused(token):
        return None, False, 0
    name = str(model.id_to_piece(token))
    if model.is_byte(token):
        return bytes([int(name[3:5], 16)]), False, 1
    spaced = name.startswith(SPACE)
    text = name.removeprefix(SPACE).translate(dict.fromkeys(map(ord, marks)))
    return name.replace(SPACE, " ").encode(), spaced, len(text.encode()) + spaced
