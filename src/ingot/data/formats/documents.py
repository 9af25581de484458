"""What token formats share: documents cut out of a stream, and a stream written into files.

A document is a list of arrays, one after the other, without the marks that a format puts around it: views of mapped files, so
that even a document larger than the memory passes through. Where a format has no index, the marks say where documents begin.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from ingot.data.store.shards import CHUNK_TOKENS, ShardWriter, TokenStream
from ingot.data.tokenizers import Tokenizer
from ingot.data.tokenizers.tokenizer_base import NARROW, OUTSIDE, IdArray, id_type
from ingot.errors import DataError
from ingot.runtime.files import open_to_read

Ids = IdArray
Document = list[Ids]


@dataclass(frozen=True)
class Marks:
    """The id in front of a document and the id after it; formats use one of them."""

    bos: int | None = None
    eos: int | None = None


def marks_of(tokenizer: Tokenizer) -> Marks:
    """The ids that stand in front of documents and after them; one stands for both where a vocabulary has one."""
    bos, eos = tokenizer.bos, tokenizer.eos
    return Marks(eos if bos is None else bos, bos if eos is None else eos)


def ends_of(tokenizer: Tokenizer) -> list[int]:
    """The ids after which a text is over: the start mark of the next document, as prepared folders have it, and the end mark."""
    return [mark for mark in dict.fromkeys((tokenizer.bos, tokenizer.eos)) if mark is not None]


class TokenSource(ABC):
    """Token data in one format. `tokenizer` is what the data itself says, `about` what was found, in words."""

    format: str
    path: Path
    about: str
    tokenizer: Tokenizer | None = None
    tokens: dict[str, int]  # of each split, as stored
    wide: bool = False  # whether its ids have 32 bits

    @abstractmethod
    def documents(self, split: str, marks: Marks) -> Iterator[Document]:
        """The documents of a split in order."""

    def buckets(self, split: str, marks: Marks) -> Iterator[tuple[str | None, Iterator[Document]]]:
        """The documents of a split by bucket, in order; one without a name where there are no buckets."""
        yield None, self.documents(split, marks)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:  # noqa: B027 (most formats say nothing)
        """Refuse a tokenizer that the data itself says is not its own."""


def cut(stream: TokenStream, marks: Marks, ends_first: bool) -> Iterator[Document]:
    """Documents out of a stream without an index, in which a mark stands in front of each or after each.

    Marks are after documents if the last token is one and the first is not; where both are, `ends_first` decides. Without any
    mark the stream is one document. Tokens in front of the first mark in front are a document too.
    """
    if not stream.tokens:
        return
    first, last = stream.token(0), stream.token(stream.tokens - 1)
    after = last == marks.eos and (ends_first or first != marks.bos)
    mark = marks.eos if after else marks.bos
    start, begun = 0, after
    for position in stream.positions(mark) if mark is not None else ():
        if begun or position > start:
            yield stream.slice(start, position)
        start, begun = position + 1, True
    if start < stream.tokens or (begun and not after):
        yield stream.slice(start, stream.tokens)


def read_file(path: Path, limit: int = -1) -> tuple[bytes, int]:
    """The first bytes of a file, or all of them, and its size."""
    try:
        with open_to_read(path) as file:
            return file.read(limit), os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise DataError(f"missing file {path}; copy the folder whole") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


class ByteCounter:
    """How many bytes of text tokens stand for, counted along a document."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self._tokenizer, self._name, self._previous = tokenizer, name, OUTSIDE

    def begin(self) -> None:
        """A document starts."""
        self._previous = OUTSIDE

    def check(self, ids: Ids) -> Ids:
        """The same tokens, if all are in the vocabulary."""
        if (largest := int(ids.max(initial=0))) >= self._tokenizer.vocab_size:
            vocabulary = f"the {self._tokenizer.kind} vocabulary of {self._tokenizer.vocab_size:,} ids"
            raise DataError(f"{self._name} holds token {largest:,}, outside {vocabulary}; give the tokenizer it was made with")
        return ids

    def count(self, ids: Ids) -> NDArray[np.int32]:
        """The bytes of each of the next tokens."""
        wide = self.check(ids).astype(np.int32)
        sizes = self._tokenizer.target_bytes(np.append(np.int32(self._previous), wide[:-1]), wide)
        self._previous = int(wide[-1]) if len(wide) else self._previous
        return sizes


@dataclass
class FileCounts:
    """A file that was written; `documents` counts those that begin in it."""

    path: Path
    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    sha256: str = ""


class PlainWriter:
    """Tokens in a file without a header."""

    def __init__(self, path: Path, files: ExitStack, dtype: str = "<u2") -> None:
        self.path, self.tokens, self._dtype = path, 0, dtype
        self._file: BinaryIO = files.enter_context(path.open("xb"))

    def append(self, tokens: Ids) -> None:
        """Adds tokens at the end."""
        if self._dtype == "<u2" and (largest := int(tokens.max(initial=0))) >= NARROW:
            raise DataError(f"token {largest:,} does not fit {self.path.name}, whose ids have 16 bits; choose another format")
        self._file.write(tokens.astype(self._dtype, copy=False).tobytes())
        self.tokens += len(tokens)

    def close(self) -> str:
        """Brings the file to the disk; it has no use for a sha256."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return ""


class TokenWriter(ABC):
    """One split of the output."""

    documents = 0

    def __init__(self, marks: Marks, counter: ByteCounter | None) -> None:
        self.files: list[FileCounts] = []
        self.marks, self.counter = marks, counter

    @property
    def tokens(self) -> int:
        """The tokens written, marks and repetitions included."""
        return sum(file.tokens for file in self.files)

    @property
    def bytes(self) -> int | None:
        """The bytes of text they stand for, where a tokenizer tells."""
        return sum(file.bytes for file in self.files) if self.counter else None

    def begin_bucket(self, name: str) -> None:  # noqa: B027 (most formats have none)
        """The documents that follow are of this bucket."""

    @abstractmethod
    def add(self, document: Document) -> None:
        """Adds a document."""

    @abstractmethod
    def close(self) -> None:
        """Brings the last file to the disk."""


class StreamWriter(TokenWriter):
    """A stream in files of at most `limit` tokens; a document may run on from one file into the next."""

    def __init__(
        self, marks: Marks, counter: ByteCounter | None, limit: int, open_file: Callable[[int], ShardWriter | PlainWriter]
    ) -> None:
        super().__init__(marks, counter)
        self._limit, self._open = limit, open_file
        self._file: ShardWriter | PlainWriter | None = None

    def add(self, document: Document) -> None:
        if self.counter:
            self.counter.begin()
        begins = 1
        for part in with_marks(document, self.marks):
            sizes = self.counter.count(part) if self.counter else None
            while len(part):
                if self._file is None:
                    self._file = self._open(len(self.files))
                    self.files.append(FileCounts(self._file.path))
                here = part[: self._limit - self._file.tokens]
                self._file.append(here)
                self._note(begins, len(here), sizes)
                part, sizes, begins = part[len(here) :], sizes if sizes is None else sizes[len(here) :], 0
                if self._file.tokens == self._limit:
                    self.close()
        self.documents += not begins

    def close(self) -> None:
        if self._file is not None:
            self.files[-1].sha256 = self._file.close()
            self._file = None

    def _note(self, begins: int, tokens: int, sizes: NDArray[np.int32] | None) -> None:
        file = self.files[-1]
        file.documents += begins
        file.tokens += tokens
        file.bytes += 0 if sizes is None else int(sizes[:tokens].sum())


def with_marks(document: Document, marks: Marks) -> Document:
    """A document between its marks; small parts become one, which is faster than one by one."""
    before, after = ([] if mark is None else [one_token(mark)] for mark in (marks.bos, marks.eos))
    parts = [*before, *document, *after]
    return [np.concatenate(parts)] if len(parts) > 1 and sum(map(len, parts)) <= CHUNK_TOKENS else parts


def one_token(token: int) -> Ids:
    """An array of one id."""
    return np.array([token], id_type(token + 1))
