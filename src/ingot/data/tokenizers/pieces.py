"""Tokenizers whose ids stand for pieces of text that lie in a table.

A piece is kept as it reads inside a text, with the space in front of its word. Kinds that put such a space in front of every text
do not find it in the text, so it is not decoded, and not counted, where a document starts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ingot.data.tokenizers.base import Ids, Tokenizer, check_size, digest, pack

SPACE = "\u2581"  # how SentencePiece and its kin write a space
CAPITAL, CAPITALS = MARKS = "\ue000\ue001"  # the next letter is a capital, the next two are (capitals.py)


class PieceTokenizer(Tokenizer):
    """A table of pieces; None is a special id, which stands for no text and starts a document anew."""

    def _use(self, pieces: Sequence[bytes | None], spaced: Sequence[bool], *, adds_space: bool, counts_first_space: bool) -> None:
        """Take the table. `spaced`: the piece begins a word, with its space. `adds_space`: texts are encoded with one more in
        front. `counts_first_space`: the space of a document's first piece is text like any other."""
        check_size(len(pieces))
        self.vocab_size = len(pieces)
        self._pieces, self._adds_space, self._counts_first_space = pieces, adds_space, counts_first_space
        self._special = np.array([*(piece is None for piece in pieces), True])
        self._spaced = np.array([*spaced, False])

    def token_bytes(self) -> NDArray[np.int32]:
        return np.array([len(piece or b"") for piece in self._pieces], np.int32)

    def target_bytes(self, previous: Ids, targets: Ids) -> NDArray[np.int32]:
        rows = self._rows(targets)
        sizes = self._sizes.take(rows)
        if not self._counts_first_space:
            first = self._special.take(self._rows(previous))
            sizes[first] -= self._spaced.take(rows[first])
        return sizes

    def at_start_after(self, ids: Ids, at_start: bool) -> bool:
        pieces = (self._pieces[int(token)] for token in reversed(ids))
        last = next((piece for piece in pieces if piece != b""), b"")  # an unknown word stands for nothing and changes nothing
        return last is None or (at_start and not last)

    def decode_bytes(self, ids: Ids, at_start: bool = False) -> bytes:
        parts = []
        for token in self._checked(ids).tolist():
            piece = self._pieces[token]
            if piece is not None:
                parts.append(piece[1:] if at_start and self._adds_space and self._spaced[token] else piece)
            at_start = piece is None or (at_start and not piece)
        return b"".join(parts)


class FileTokenizer(PieceTokenizer):
    """A table of pieces that comes out of a file; the file goes along wherever the tokenizer goes."""

    contents: bytes

    @cached_property
    def packed(self) -> str:
        """The file as its spec holds it."""
        return pack(self.contents)

    def fingerprint(self) -> str:
        return digest({"kind": self.kind, "sha256": hashlib.sha256(self.contents).hexdigest(), "bos": self.bos})


def byte_alphabet() -> dict[str, int]:
    """The 256 characters that byte-level vocabularies write bytes with: printable ones as they are, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
