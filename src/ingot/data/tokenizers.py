"""Text to token ids and back, and how many bytes of text each id stands for.

A tokenizer is its spec: a small JSON object that rebuilds it anywhere and whose fingerprint says whether two are the same. Ids
are uint16, because shards store them so.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.errors import DataError

Ids = Sequence[int] | NDArray[Any]
MAX_VOCABULARY = 1 << 16


def digest(value: Any) -> str:
    """The sha256 of a JSON value, independent of key order and white space."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Tokenizer(ABC):
    """What every tokenizer can do; a new kind says what its ids are and how bytes come back from them."""

    kind: str
    vocab_size: int
    bos: int | None = None

    @abstractmethod
    def encode(self, text: str) -> NDArray[np.uint16]:
        """The ids of `text`, without a mark for the start of a document."""

    @abstractmethod
    def decode_bytes(self, ids: Ids) -> bytes:
        """The UTF-8 bytes that `ids` stand for; special ids stand for none."""

    @abstractmethod
    def token_bytes(self) -> NDArray[np.int32]:
        """For every id, how many UTF-8 bytes of the original text it stands for; 0 for special ids."""

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """The JSON object from which `from_spec` makes this tokenizer again."""

    def encode_document(self, text: str) -> NDArray[np.uint16]:
        """The ids of a whole document, behind the start mark where the kind has one."""
        ids = self.encode(text)
        return ids if self.bos is None else np.concatenate([np.array([self.bos], np.uint16), ids])

    def decode(self, ids: Ids) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def fingerprint(self) -> str:
        """Equal for tokenizers that give every text the same ids."""
        return digest(self.spec())

    def _checked(self, ids: Ids) -> NDArray[np.int64]:
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
        if array.size and not 0 <= array.min() <= array.max() < self.vocab_size:
            wrong = next(int(i) for i in array if not 0 <= i < self.vocab_size)
            raise DataError(f"token {wrong} is outside the {self.kind} vocabulary of {self.vocab_size:,} ids")
        return array


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes behind four special ids, as in the SentencePiece vocabularies: pad 0, bos 1, eos 2, unk 3."""

    kind = "byte"
    specials = 4
    vocab_size = specials + 256
    bos = 1

    def encode(self, text: str) -> NDArray[np.uint16]:
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"character {error.start} of the text is half a surrogate pair, which UTF-8 cannot hold; remove it"
            ) from None
        return np.frombuffer(data, np.uint8).astype(np.uint16) + np.uint16(self.specials)

    def decode_bytes(self, ids: Ids) -> bytes:
        array = self._checked(ids)
        return (array[array >= self.specials] - self.specials).astype(np.uint8).tobytes()

    def token_bytes(self) -> NDArray[np.int32]:
        return (np.arange(self.vocab_size) >= self.specials).astype(np.int32)

    def spec(self) -> dict[str, Any]:
        return {"kind": self.kind}


class CharTokenizer(Tokenizer):
    """The characters of a text in sorted order, id = position, as nanoGPT has it; no special ids."""

    kind = "char"

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = "".join(sorted(set(characters)))
        self.vocab_size = len(self.characters)
        if self.vocab_size > MAX_VOCABULARY:
            raise DataError(
                f"the text has {self.vocab_size:,} distinct characters and the char tokenizer takes at most {MAX_VOCABULARY:,}; "
                "use the byte tokenizer"
            )
        self._codes = _code_points(self.characters)
        self._ids = np.full(0x110000, -1, np.int32)  # every code point there is; -1: not in the vocabulary
        self._ids[self._codes] = np.arange(self.vocab_size)

    def encode(self, text: str) -> NDArray[np.uint16]:
        ids = self._ids[_code_points(text)]
        if ids.size and ids.min() < 0:
            unknown = sorted(set(text) - set(self.characters))
            more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
            raise DataError(
                f"not in the char vocabulary: {', '.join(map(repr, unknown[:10]))}{more}; "
                f"it has the {self.vocab_size} characters of the text it was prepared from: "
                "remove these, or prepare the data again with text that holds them or with the byte tokenizer"
            )
        return ids.astype(np.uint16)

    def decode_bytes(self, ids: Ids) -> bytes:
        return self._codes[self._checked(ids)].tobytes().decode("utf-32-le").encode()

    def token_bytes(self) -> NDArray[np.int32]:
        return np.array([len(character.encode()) for character in self.characters], np.int32)

    def spec(self) -> dict[str, Any]:
        return {"kind": self.kind, "characters": self.characters}


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


KINDS = ("byte", "char")


def from_spec(spec: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that gave `spec`."""
    kind, characters = spec.get("kind"), spec.get("characters")
    if kind == "byte":
        return ByteTokenizer()
    if kind != "char":
        raise DataError(f"unknown tokenizer kind {kind!r}; this version of ingot knows {', '.join(KINDS)}")
    if not isinstance(characters, str) or not characters or any(0xD800 <= ord(c) < 0xE000 for c in characters):
        raise DataError("damaged tokenizer: a char tokenizer needs its characters")
    return CharTokenizer(characters)


class StreamDecoder:
    """Text of ids that arrive a few at a time; the bytes of an unfinished character are held back until it is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Ids) -> str:
        """The text that `ids` complete."""
        return self._decoder.decode(self._tokenizer.decode_bytes(ids))

    def finish(self) -> str:
        """What was still held back; the decoder is then ready for another text."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
