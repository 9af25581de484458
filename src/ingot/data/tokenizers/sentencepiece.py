"""SentencePiece models, and the rule by which golf counts their bytes.

The rule: control, unknown and unused ids stand for nothing; a byte piece for one byte; any other piece for the UTF-8 bytes after
its first U+2581, and one more for that U+2581, unless one of those ids stands before it. Scores are compared by it, so it is kept
to the letter: a second U+2581 in a piece counts its own three bytes. The models normalise text and fold white space, so the sum
is that of the normalised text and not of the original. Marks for capitals (capitals.py) stand for no bytes.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.data.tokenizers.tokenizer_base import (
    CAPITAL,
    MARKS,
    PACKED,
    SPACE,
    FileTokenizer,
    IdArray,
    Ids,
    NoSpacePiece,
    check_size,
    utf8,
)
from ingot.data.tokenizers.word_table import FIRST, Flat, WordTable, flat, trusted
from ingot.errors import DataError

# Where words begin for a SentencePiece model, if no token of it can reach from one word into the next.

BPE = 2
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6  # kinds of pieces
LETTERS = string.ascii_letters + string.digits
Nodes = NDArray[np.int64]


def word_starts(contents: bytes, model: Any) -> tuple[bytes, bytes] | None:
    """The spaces that begin words, and the marks that do after a letter or digit; None if nothing can be proved."""
    fields = list(message_fields(contents))
    trainer, normaliser = (dict(message_fields(b"".join(value for key, value in fields if key == part))) for part in (2, 3))
    folds, rules = normaliser.get(4, 1), normaliser.get(2, b"")  # runs of spaces become one; the compiled keys
    pieces = [dict(message_fields(value)) for key, value in fields if key == 1]
    texts = [piece[1].decode() for piece in pieces if piece.get(3) not in (UNKNOWN, CONTROL, BYTE)]
    symbols = "".join(piece[1].decode() for piece in pieces if piece.get(3) == USER_DEFINED)
    if trainer.get(3) != BPE or trainer.get(24) or not normaliser.get(5, 1):  # spaces after words, or not as U+2581
        return None
    if rules and not folds:  # rules may make runs of spaces
        return None
    if any(SPACE in (text[1:] if folds else text.lstrip(SPACE)) for text in texts) or set(symbols) & {SPACE, " ", "\n"}:
        return None
    keys = _Keys(rules)
    if not keys.are_provable:
        return None
    spaces = [c for c in " \n"[: 2 if folds else 1] if model.normalize(f"a{c}b").endswith(f"a{SPACE}b") and not keys.go_on(c)]
    return ("".join(spaces).encode(), _marks(texts, keys, model)) if " " in spaces else None


def _marks(texts: list[str], keys: _Keys, model: Any) -> bytes:
    if any(model.normalize(letter).removeprefix(SPACE) not in set(LETTERS) for letter in LETTERS):
        return b""
    joined = {text[i] for text in texts for i in range(1, len(text)) if text[i - 1] in LETTERS}
    known = {mark for mark in string.punctuation if not model.is_unknown(model.piece_to_id(mark))}
    return "".join(mark for mark in string.punctuation if mark in known - joined and not keys.begin(mark)).encode()


class _Keys:
    """The keys of a normaliser: a trie of bytes in a double array, as the library `darts-clone` lays it out."""

    def __init__(self, rules: bytes) -> None:
        size = int.from_bytes(rules[:4], "little")
        self._units = np.frombuffer(rules[4 : 4 + size], "<u4").astype(np.int64)
        roots = np.arange(min(1, len(self._units)))
        self._first = self._children(roots)
        after, found = np.zeros(len(self._units), bool), self._first
        while len(found):
            after[found] = True
            found = self._children(found)
            found = np.unique(found[~after[found]])
        inner = self._labels(self._children(np.flatnonzero(after)))  # all bytes of keys but the first
        # ASCII stands in front of a key or nowhere.
        self.are_provable = not (inner < 0x80).any() and SPACE.encode() not in rules[4 + size :]

    def begin(self, character: str) -> bool:
        """Whether a key begins with an ASCII character."""
        return ord(character) in self._labels(self._first)

    def go_on(self, character: str) -> bool:
        """Whether a key begins with an ASCII character and has more after it."""
        return len(self._children(self._first[self._labels(self._first) == ord(character)])) > 0

    def _labels(self, nodes: Nodes) -> Nodes:
        return self._units[nodes] & 0x800000FF

    def _children(self, nodes: Nodes) -> Nodes:
        units = self._units[nodes]
        bases = nodes ^ ((units >> 10) << ((units & 512) >> 6))
        found = [nodes[:0]]
        for byte in range(1, 256):  # one at a time, or it takes hundreds of megabytes
            children = bases ^ byte
            children = children[children < len(self._units)]
            found.append(children[self._labels(children) == byte])
        return np.concatenate(found)


def message_fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: numbers, and bytes for everything else."""
    return ((field, value) for field, value, _ in message_parts(message))


def message_parts(message: bytes) -> Iterator[tuple[int, Any, bytes]]:
    """The fields of a protobuf message, each with the bytes that it takes there."""
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
