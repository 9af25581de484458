"""The interface of all tokenizers and their base classes.

A tokenizer is defined by its spec: a JSON object that contains the tokenizer file, if there is one, and suffices to rebuild the
tokenizer anywhere. Tokenizers with equal fingerprints are the same; a fingerprint does not depend on how the file was compressed.
Ids have 16 bits, or 32 if the vocabulary is larger than 65,536.
"""

from __future__ import annotations

import base64
import codecs
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
VIEWED = (np.uint16, np.uint32, np.int32)  # id arrays with these dtypes are used without a copy
NARROW = 1 << 16  # the largest vocabulary size whose ids fit in 16 bits
MAX_VOCABULARY = 1 << 24  # far larger than any tokenizer's vocabulary
MAX_FILE_BYTES = 1 << 26  # twice the size of files with 262,144 ids; the limit keeps a damaged spec from exhausting memory
OUTSIDE = -1  # used as the previous token of a document's first token
PACKED = "xz"  # spec key that holds the compressed tokenizer file


class NoSpacePiece(DataError):
    """Raised if the vocabulary has no piece for a single space (U+2581), so that the bytes of a text would be miscounted."""


def digest(value: Any) -> str:
    """Return the sha256 of a JSON value, independent of key order and white space."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def id_type(vocab_size: int) -> IdType:
    """Return the dtype of token ids for a vocabulary of this size."""
    return np.dtype(np.uint16 if vocab_size <= NARROW else np.uint32)


class Tokenizer(ABC):
    """A tokenizer; subclasses define the ids and how to decode them to bytes.

    `bos` precedes every document of a prepared folder; other programs append `eos` to a document and pad rows with `pad`, if the
    vocabulary has these ids. `lossless`: decoding returns every text unchanged, and the byte counts of its ids sum to its size.
    `instant`: encoding is faster than sending the text to another process.
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
        """Return the dtype of this tokenizer's ids."""
        return id_type(self.vocab_size)

    @abstractmethod
    def encode(self, text: str) -> IdArray:
        """Return the ids of `text`, without `bos`."""

    @abstractmethod
    def decode_bytes(self, ids: Ids, at_start: bool = False) -> bytes:
        """Decode `ids` to UTF-8 bytes; special ids have no bytes. `at_start` is True if no text precedes the ids."""

    @abstractmethod
    def token_bytes(self) -> NDArray[np.int32]:
        """Return the number of UTF-8 bytes that each id contributes inside a text; 0 for special ids."""

    def spec(self) -> dict[str, Any]:
        """Return the JSON object from which `from_spec` rebuilds this tokenizer."""
        return {"kind": self.kind}

    def target_bytes(self, previous: Ids, targets: Ids) -> NDArray[np.int32]:
        """Return the number of bytes of each target, given the token before it; 0 for ids outside the vocabulary, such as -1."""
        return self._sizes.take(self._rows(targets))

    def encode_document(self, text: str) -> IdArray:
        """Return the ids of a whole document, with `bos` in front if there is one."""
        ids = self.encode(text)
        return ids if self.bos is None else np.concatenate([np.array([self.bos], self.dtype), ids])

    def encode_batch(self, texts: Sequence[bytes]) -> tuple[IdArray, NDArray[np.int64]]:
        """Encode whole UTF-8 documents, each with `bos` in front; return their concatenated ids and the number of ids of each."""
        encoded = list(self._encode_all(texts))
        counts = np.fromiter(map(len, encoded), np.int64, len(texts))
        bos = np.array([] if self.bos is None else [self.bos], self.dtype)
        return np.concatenate([bos[:0], *(part for ids in encoded for part in (bos, ids))]), counts + len(bos)

    def decode(self, ids: Ids) -> str:
        """Decode `ids` of one or more whole documents to text; invalid UTF-8 becomes U+FFFD."""
        return self.decode_bytes(ids, at_start=True).decode("utf-8", "replace")

    def is_special(self, token: int) -> bool:
        """Return True if an id represents no text at all."""
        return bool(self._sizes[self._rows([token])][0] == 0)

    def at_start_after(self, ids: Ids, at_start: bool) -> bool:
        """Return True if the id that follows `ids` starts a text; `at_start` says whether the first of `ids` does."""
        return self.is_special(int(ids[-1]))

    def unfinished(self, ids: Ids) -> int:
        """Return the number of trailing ids whose text depends on the next id."""
        return 0

    def fingerprint(self) -> str:
        """Return a hash of the tokenizer; tokenizers with equal hashes encode every text to the same ids."""
        return digest(self.spec())

    def _encode_all(self, texts: Sequence[bytes]) -> Iterable[IdArray]:
        return (self.encode(text.decode()) for text in texts)

    @cached_property
    def _sizes(self) -> NDArray[np.int32]:
        return np.append(self.token_bytes(), np.int32(0))  # the last entry is for ids outside the vocabulary

    def _rows(self, ids: Ids) -> NDArray[Any]:
        array = ids if isinstance(ids, np.ndarray) and ids.dtype in VIEWED else np.asarray(ids, np.int64)
        unsigned = array.view(f"u{array.itemsize}")  # a negative id becomes a large number
        return unsigned if self.vocab_size > np.iinfo(unsigned.dtype).max else np.minimum(unsigned, self.vocab_size)

    def _checked(self, ids: Ids) -> NDArray[np.int64]:
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
        if array.size and not 0 <= array.min() <= array.max() < self.vocab_size:
            wrong = next(int(i) for i in array if not 0 <= i < self.vocab_size)
            raise DataError(f"token {wrong} is outside the {self.kind} vocabulary of {self.vocab_size:,} ids")
        return array


def utf8(text: str) -> bytes:
    """Encode `text` as UTF-8; if it contains a lone surrogate, raise an error that gives the position."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"character {error.start} of the text is an unpaired surrogate; remove it") from None


def check_size(vocab_size: int) -> None:
    """Raise DataError unless a vocabulary has 1 to MAX_VOCABULARY ids."""
    if not 0 < vocab_size <= MAX_VOCABULARY:
        raise DataError(f"the vocabulary has {vocab_size:,} ids; it must have 1 to {MAX_VOCABULARY:,}")


def unpack(spec: Mapping[str, Any]) -> bytes:
    """Unpack the tokenizer file contained in a spec; raise DataError if it is damaged."""
    try:
        unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=2 * MAX_FILE_BYTES)
        contents = unpacker.decompress(base64.b64decode(spec[PACKED], validate=True), MAX_FILE_BYTES)
        if not unpacker.eof or unpacker.unused_data:
            raise ValueError("the end is missing")
    except (KeyError, TypeError, ValueError, lzma.LZMAError) as error:
        raise DataError(f"damaged tokenizer: the file inside it cannot be unpacked ({error or type(error).__name__})") from None
    return contents


class StreamDecoder:
    """Decodes ids that arrive a few at a time; incomplete text, such as part of a character, is buffered until it is complete.

    With `at_start` no text precedes the first id, so the space that SentencePiece adds before the first word is dropped.
    """

    def __init__(self, tokenizer: Tokenizer, at_start: bool = False) -> None:
        self._tokenizer, self._at_start = tokenizer, at_start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: list[int] = []

    def push(self, ids: Ids) -> str:
        """Decode the next ids and return the new text that they complete."""
        pending = [*self._held, *map(int, ids)]
        complete = len(pending) - self._tokenizer.unfinished(pending)
        self._held = pending[complete:]
        return self._decoder.decode(self._bytes(pending[:complete]))

    def finish(self) -> str:
        """Return the text that is still buffered, with U+FFFD for an incomplete character, and empty the buffer."""
        rest = self._decoder.decode(self._bytes(self._held), final=True)
        self._held = []
        self._decoder.reset()
        return rest

    def _bytes(self, ids: list[int]) -> bytes:
        data = self._tokenizer.decode_bytes(ids, self._at_start)
        self._at_start = self._tokenizer.at_start_after(ids, self._at_start) if ids else self._at_start
        return data


SPACE = "\u2581"  # the space character in SentencePiece and similar vocabularies
CAPITAL, CAPITALS = MARKS = "\ue000\ue001"  # capital marks: the first capitalises the next letter, the second the next two


class PieceTokenizer(Tokenizer):
    """A tokenizer with a table of each id's bytes (None for special ids); the text after a special id starts a new document."""

    def _use(self, pieces: Sequence[bytes | None], spaced: Sequence[bool], *, adds_space: bool, counts_first_space: bool) -> None:
        """Set the piece table; `spaced` is True for pieces that begin with a word's leading space. With `adds_space`, a space is
        prepended to texts before encoding; with `counts_first_space`, a document's leading space counts as text."""
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
        last = next((piece for piece in pieces if piece != b""), b"")  # unknown words have no text, so they are skipped
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
    """A PieceTokenizer that is read from a file; its spec contains the file."""

    contents: bytes

    @cached_property
    def _packed(self) -> str:
        return base64.b64encode(lzma.compress(self.contents)).decode()

    def spec(self) -> dict[str, Any]:
        return {"kind": self.kind, PACKED: self._packed}

    def fingerprint(self) -> str:
        return digest({"kind": self.kind, "sha256": hashlib.sha256(self.contents).hexdigest(), "bos": self.bos})


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in byte-level vocabularies; characters from U+0100 on stand for unprintable bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + position): byte for position, byte in enumerate(others)}
