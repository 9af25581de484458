"""Where words begin for a SentencePiece model, if no token of it can reach from one word into the next.

It is proved from the model's file, and for BPE alone: merging makes pieces of the vocabulary, so what stands side by side in no
piece is never merged, and either side is encoded as if the other were not there. The normaliser must hold to it too: it rewrites
text by the longest of its keys that fits, so no key may go on where a word begins. Whatever is not proved is left to the library.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.data.tokenizers.base import SPACE

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
