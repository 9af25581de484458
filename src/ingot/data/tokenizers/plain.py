"""Tokenizers without a learned vocabulary: bytes, characters, and plain numbers for ids that do not represent text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.data.tokenizers.tokenizer_base import NARROW, IdArray, Ids, Tokenizer, check_size, utf8
from ingot.errors import DataError

PURE_BYTE = "pure_byte"  # golf's name for the byte tokenizer
GOLF_IDS = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3, "byte_offset": 4, "byte_count": 256}


class ByteTokenizer(Tokenizer):
    """A tokenizer whose ids are UTF-8 bytes plus 4; ids 0 to 3 are pad, bos, eos and unk, as in golf's vocabularies."""

    kind = "byte"
    specials = 4
    vocab_size = specials + 256
    bos = 1
    eos = 2
    pad = 0
    instant = True

    def encode(self, text: str) -> IdArray:
        return np.frombuffer(utf8(text), np.uint8) + np.uint16(self.specials)

    def encode_batch(self, texts: Sequence[bytes]) -> tuple[IdArray, NDArray[np.int64]]:
        counts = 1 + np.fromiter(map(len, texts), np.int64, len(texts))
        ids = np.frombuffer(b"\0".join([b"", *texts]), np.uint8) + np.uint16(self.specials)
        ids[np.cumsum(counts) - counts] = self.bos
        return ids, counts

    def decode_bytes(self, ids: Ids, at_start: bool = False) -> bytes:
        array = self._checked(ids)
        return (array[array >= self.specials] - self.specials).astype(np.uint8).tobytes()

    def token_bytes(self) -> NDArray[np.int32]:
        return (np.arange(self.vocab_size) >= self.specials).astype(np.int32)


def byte_file() -> bytes:
    """Return the JSON file that describes the byte tokenizer to golf's scripts."""
    record = {"tokenizer_type": PURE_BYTE, "config": GOLF_IDS, "vocab_size": ByteTokenizer.vocab_size}
    return (json.dumps(record, indent=2, sort_keys=True) + "\n").encode()


def read_byte_file(contents: bytes) -> ByteTokenizer | None:
    """Return the byte tokenizer if `contents` is golf's JSON file for it, else None; raise DataError if the ids differ."""
    try:
        record = json.loads(contents) if PURE_BYTE.encode() in contents else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("tokenizer_type") != PURE_BYTE:
        return None
    expected = {"vocab_size": ByteTokenizer.vocab_size, **GOLF_IDS}
    ids = {**record, **record["config"]} if isinstance(record.get("config"), dict) else record
    if any(ids.get(name, value) != value for name, value in expected.items()):
        raise DataError("a byte tokenizer must have golf's ids: pad 0, bos 1, eos 2, unk 3 and the bytes from 4 on")
    return ByteTokenizer()


class CharTokenizer(Tokenizer):
    """A tokenizer with one id for each distinct character, in sorted order, as in nanoGPT; there are no special ids."""

    kind = "char"

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = "".join(sorted(set(characters)))
        self.vocab_size = len(self.characters)
        if self.vocab_size > NARROW:
            limit = f"the char tokenizer supports at most {NARROW:,}; use the byte tokenizer"
            raise DataError(f"the text has {self.vocab_size:,} distinct characters, but {limit}")
        self._codes = _code_points(self.characters)
        self._ids = np.full(0x110000, -1, np.int32)  # indexed by code point; -1: not in the vocabulary
        self._ids[self._codes] = np.arange(self.vocab_size)

    def encode(self, text: str) -> IdArray:
        ids = self._ids[_code_points(text)]
        if ids.size and ids.min() < 0:
            unknown = sorted(set(text) - set(self.characters))
            more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
            advice = "remove them, or prepare the data again with text that contains them or with the byte tokenizer"
            raise DataError(f"not in the char vocabulary: {', '.join(map(repr, unknown[:10]))}{more}", advice=advice)
        return ids.astype(self.dtype)

    def decode_bytes(self, ids: Ids, at_start: bool = False) -> bytes:
        return self._codes[self._checked(ids)].tobytes().decode("utf-32-le").encode()

    def token_bytes(self) -> NDArray[np.int32]:
        return np.array([len(character.encode()) for character in self.characters], np.int32)

    def spec(self) -> dict[str, Any]:
        return {"kind": self.kind, "characters": self.characters}


class NumberTokenizer(Tokenizer):
    """A tokenizer for ids that are not text (musical notes, chess moves, DNA bases); an id decodes to a space and its number."""

    kind = "number"
    lossless = False

    def __init__(self, vocab_size: int) -> None:
        check_size(vocab_size)
        self.vocab_size = vocab_size

    def encode(self, text: str) -> IdArray:
        numbers = text.split()
        if wrong := next((word for word in numbers if not word.isdecimal() or int(word) >= self.vocab_size), None):
            numbers_to = f"give numbers from 0 to {self.vocab_size - 1:,} separated by spaces"
            raise DataError(f"{wrong!r} is not an id; this data's ids do not represent text, so {numbers_to}")
        return np.array([int(word) for word in numbers], self.dtype)

    def decode_bytes(self, ids: Ids, at_start: bool = False) -> bytes:
        shown = "".join(f" {token}" for token in self._checked(ids))
        return (shown[1:] if at_start else shown).encode()

    def token_bytes(self) -> NDArray[np.int32]:
        return np.array([len(str(token)) + 1 for token in range(self.vocab_size)], np.int32)

    def spec(self) -> dict[str, Any]:
        return {"kind": self.kind, "vocab_size": self.vocab_size}


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
