"""What every tokenizer can do.

A tokenizer is its spec: a JSON object that rebuilds it anywhere, with the file it was made from inside. Its fingerprint says
whether two are the same and never depends on how a file was compressed. Ids have 16 bits, those of a vocabulary above 65,536 have
32.
"""

from __future__ import annotations

import base64
import hashlib
import json
import lzma
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.errors import DataError

Ids = Sequence[int] | NDArray[Any]
IdArray = NDArray[np.unsignedinteger[Any]]
IdType = np.dtype[np.unsignedinteger[Any]]
VIEWED = (np.uint16, np.uint32, np.int32)  # number types whose ids need no copy
NARROW = 1 << 16  # the largest vocabulary whose ids have 16 bits
MAX_VOCABULARY = 1 << 24  # far more than any tokenizer has
MAX_FILE_BYTES = 1 << 26  # vocabularies of 262,144 ids take half of it; a spec cannot fill the memory
OUTSIDE = -1  # the token before a document: none
PACKED = "xz"  # the key of a spec that holds a file


class NoSpacePiece(DataError):
    """A vocabulary in which no piece is a single space (U+2581): the bytes of a text would be counted wrong."""


def digest(value: Any) -> str:
    """The sha256 of a JSON value, independent of key order and white space."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def id_type(vocab_size: int) -> IdType:
    """The number type of the ids of a vocabulary that large."""
    return np.dtype(np.uint16 if vocab_size <= NARROW else np.uint32)


class Tokenizer(ABC):
    """A kind says what its ids are and how bytes come back from them.

    `bos` stands in front of every document of a prepared folder; `eos` is what other programs put after one, `pad` what they fill
    rows with, where the vocabulary has such ids. `lossless`: for every text, decoding gives the text back and its ids stand for
    exactly its bytes. `instant`: a text is encoded before another process could have been handed it.
    """

    kind: str
    vocab_size: int
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    lossless: bool = True
    instant: bool = False

    @property
    def dtype(self) -> IdType:
        """The number type of its ids."""
        return id_type(self.vocab_size)

    @abstractmethod
    def encode(self, text: str) -> IdArray:
        """The ids of `text`, without a mark for the start of a document."""

    @abstractmethod
    def decode_bytes(self, ids: Ids, at_start: bool = False) -> bytes:
        """The UTF-8 bytes that `ids` stand for; special ids stand for none. `at_start`: no text comes before them."""

    @abstractmethod
    def token_bytes(self) -> NDArray[np.int32]:
        """For every id, how many UTF-8 bytes it stands for inside a text; 0 for special ids."""

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """The JSON object from which `from_spec` makes this tokenizer again."""

    def target_bytes(self, previous: Ids, targets: Ids) -> NDArray[np.int32]:
        """How many bytes each target stands for after the token before it; an id outside the vocabulary, -1 too, for none."""
        return self._sizes.take(self._rows(targets))

    def encode_document(self, text: str) -> IdArray:
        """The ids of a whole document, after the start mark where the kind has one."""
        return self._marked(self.encode(text))

    def encode_documents(self, texts: Sequence[str]) -> list[IdArray]:
        """`encode_document` of each text, many times faster."""
        ids, counts = self.encode_batch([utf8(text) for text in texts])
        ends = np.cumsum(counts).tolist()
        return [ids[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    def encode_batch(self, texts: Sequence[bytes]) -> tuple[IdArray, NDArray[np.int64]]:
        """The ids of whole documents, which are given in UTF-8, one after the other, and how many each has."""
        found = list(self._encode_all(texts))
        counts = np.fromiter(map(len, found), np.int64, len(texts))
        mark = np.array([] if self.bos is None else [self.bos], self.dtype)
        return np.concatenate([mark[:0], *(part for ids in found for part in (mark, ids))]), counts + len(mark)

    def decode(self, ids: Ids) -> str:
        """The text of `ids`, taken as a whole document or several; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids, at_start=True).decode("utf-8", "replace")

    def is_special(self, token: int) -> bool:
        """Whether an id stands for no text at all."""
        return bool(self._sizes[self._rows([token])][0] == 0)

    def at_start_after(self, ids: Ids, at_start: bool) -> bool:
        """Whether what follows these ids is the start of a text, as it was or was not before them."""
        return self.is_special(int(ids[-1]))

    def unfinished(self, ids: Ids) -> int:
        """How many of the last ids stand for a text that depends on the next one."""
        return 0

    def fingerprint(self) -> str:
        """Equal for tokenizers that give every text the same ids."""
        return digest(self.spec())

    def _encode_all(self, texts: Sequence[bytes]) -> Iterable[IdArray]:
        """`encode` of each text, which is given in UTF-8."""
        return (self.encode(text.decode()) for text in texts)

    def _marked(self, ids: IdArray) -> IdArray:
        return ids if self.bos is None else np.concatenate([np.array([self.bos], self.dtype), ids])

    @cached_property
    def _sizes(self) -> NDArray[np.int32]:
        return np.append(self.token_bytes(), np.int32(0))  # the last row is for ids outside the vocabulary

    def _rows(self, ids: Ids) -> NDArray[Any]:
        array = ids if isinstance(ids, np.ndarray) and ids.dtype in VIEWED else np.asarray(ids, np.int64)
        unsigned = array.view(f"u{array.itemsize}")  # a negative id becomes a large one
        return unsigned if self.vocab_size > np.iinfo(unsigned.dtype).max else np.minimum(unsigned, self.vocab_size)

    def _checked(self, ids: Ids) -> NDArray[np.int64]:
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
        if array.size and not 0 <= array.min() <= array.max() < self.vocab_size:
            wrong = next(int(i) for i in array if not 0 <= i < self.vocab_size)
            raise DataError(f"token {wrong} is outside the {self.kind} vocabulary of {self.vocab_size:,} ids")
        return array


def utf8(text: str) -> bytes:
    """The bytes of a text, or an error that names what UTF-8 cannot hold."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"character {error.start} of the text is half a surrogate pair, which UTF-8 cannot hold; remove it"
        ) from None


def check_size(vocab_size: int) -> None:
    """Refuse a vocabulary that a shard cannot hold."""
    if not 0 < vocab_size <= MAX_VOCABULARY:
        raise DataError(f"a vocabulary of {vocab_size:,} ids; it may have 1 to {MAX_VOCABULARY:,}")


def pack(contents: bytes) -> str:
    """A file as a line of text for a spec."""
    return base64.b64encode(lzma.compress(contents)).decode()


def unpack(spec: Mapping[str, Any]) -> bytes:
    """The file inside a spec."""
    try:
        unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=2 * MAX_FILE_BYTES)
        contents = unpacker.decompress(base64.b64decode(spec[PACKED], validate=True), MAX_FILE_BYTES)
        if not unpacker.eof or unpacker.unused_data:
            raise ValueError("the end is missing")
    except (KeyError, TypeError, ValueError, lzma.LZMAError) as error:
        raise DataError(f"damaged tokenizer: the file inside it cannot be unpacked ({error or type(error).__name__})") from None
    return contents
