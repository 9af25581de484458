"""What every tokenizer can do.

A tokenizer is its spec: a JSON object that rebuilds it anywhere, with the file it was made from inside. Its fingerprint says
whether two are the same and never depends on how a file was compressed. Ids have 16 bits, those of a vocabulary above 65,536 have
32.
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


# Tokenizers whose ids stand for pieces of text that lie in a table.

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


# Text that arrives token by token.


class StreamDecoder:
    """Text of ids that arrive a few at a time; what is unfinished, such as a part of a character, is held back until it is whole.

    `at_start`: no text comes before the first id, so that a space which only marks its word is not shown.
    """

    def __init__(self, tokenizer: Tokenizer, at_start: bool = False) -> None:
        self._tokenizer, self._at_start = tokenizer, at_start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: list[int] = []

    def push(self, ids: Ids) -> str:
        """The text that `ids` complete."""
        known = [*self._held, *map(int, ids)]
        whole = len(known) - self._tokenizer.unfinished(known)
        self._held = known[whole:]
        return self._decoder.decode(self._bytes(known[:whole]))

    def finish(self) -> str:
        """What was still held back; the decoder is then ready for another text."""
        rest = self._decoder.decode(self._bytes(self._held), final=True)
        self._held = []
        self._decoder.reset()
        return rest

    def _bytes(self, ids: list[int]) -> bytes:
        data = self._tokenizer.decode_bytes(ids, self._at_start)
        self._at_start = self._tokenizer.at_start_after(ids, self._at_start) if ids else self._at_start
        return data
