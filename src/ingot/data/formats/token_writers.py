"""Writers of converted data: each takes the documents of a split, puts its format's marks around them and fills files."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from ingot.data.store.dataset import SplitRecord
from ingot.data.store.documents import Document, Marks
from ingot.data.store.shards import CHUNK_TOKENS, ShardWriter
from ingot.data.store.writer import SplitWriter
from ingot.data.tokenizers import Tokenizer
from ingot.data.tokenizers.tokenizer_base import NARROW, OUTSIDE, IdArray, id_type
from ingot.errors import DataError


class ByteCounter:
    """Counts how many bytes of text the tokens of a document stand for."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self._tokenizer, self._name, self._previous = tokenizer, name, OUTSIDE

    def begin(self) -> None:
        """Start a document."""
        self._previous = OUTSIDE

    def check(self, ids: IdArray) -> IdArray:
        """Return the tokens unchanged if all of them are in the vocabulary."""
        if (largest := int(ids.max(initial=0))) >= self._tokenizer.vocab_size:
            vocabulary = f"the {self._tokenizer.kind} vocabulary of {self._tokenizer.vocab_size:,} ids"
            raise DataError(f"{self._name} holds token {largest:,}, outside {vocabulary}; give the tokenizer it was made with")
        return ids

    def count(self, ids: IdArray) -> NDArray[np.int32]:
        """Return the bytes of each of the document's next tokens."""
        wide = self.check(ids).astype(np.int32)
        sizes = self._tokenizer.target_bytes(np.append(np.int32(self._previous), wide[:-1]), wide)
        self._previous = int(wide[-1]) if len(wide) else self._previous
        return sizes


class PlainWriter:
    """Writes tokens to a file without a header."""

    def __init__(self, path: Path, files: ExitStack, dtype: str = "<u2") -> None:
        self.path, self.tokens, self._dtype = path, 0, dtype
        self._file: BinaryIO = files.enter_context(path.open("xb"))

    def append(self, tokens: IdArray) -> None:
        """Append tokens."""
        if self._dtype == "<u2" and (largest := int(tokens.max(initial=0))) >= NARROW:
            raise DataError(f"token {largest:,} does not fit {self.path.name}, whose ids have 16 bits; choose another format")
        self._file.write(tokens.astype(self._dtype, copy=False).tobytes())
        self.tokens += len(tokens)

    def close(self) -> None:
        """Flush the file to disk and close it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class TokenWriter(ABC):
    """Writes one split; counts documents, tokens (marks and repetitions included) and, with a tokenizer, bytes of text."""

    def __init__(self, marks: Marks, counter: ByteCounter | None) -> None:
        self.marks, self.counter = marks, counter
        self.documents = self.tokens = 0
        self.bytes = 0 if counter else None

    def begin_bucket(self, name: str) -> None:  # noqa: B027 (most formats have no buckets)
        """Put the documents that follow into this bucket."""

    @abstractmethod
    def add(self, document: Document) -> None:
        """Write a document."""

    @abstractmethod
    def close(self) -> None:
        """Complete the last file."""


class StreamWriter(TokenWriter):
    """Writes a stream into files of at most `limit` tokens; a document may continue in the next file."""

    def __init__(
        self, marks: Marks, counter: ByteCounter | None, limit: int, open_file: Callable[[int], ShardWriter | PlainWriter]
    ) -> None:
        super().__init__(marks, counter)
        self._limit, self._open, self._files = limit, open_file, 0
        self._file: ShardWriter | PlainWriter | None = None

    def add(self, document: Document) -> None:
        if self.counter:
            self.counter.begin()
        before = self.tokens
        for part in with_marks(document, self.marks):
            if self.counter and self.bytes is not None:
                self.bytes += int(self.counter.count(part).sum())
            self.tokens += len(part)
            while len(part):
                if self._file is None:
                    self._file, self._files = self._open(self._files), self._files + 1
                here = part[: self._limit - self._file.tokens]
                self._file.append(here)
                part = part[len(here) :]
                if self._file.tokens == self._limit:
                    self.close()
        self.documents += self.tokens > before

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class FolderWriter(TokenWriter):
    """Writes a split of a prepared folder."""

    def __init__(
        self, folder: Path, split: str, tokenizer: Tokenizer, counter: ByteCounter, limit: int, files: ExitStack
    ) -> None:
        super().__init__(Marks(tokenizer.bos, None), counter)
        self._writer, self._check = SplitWriter(folder, split, tokenizer, limit, files), counter.check
        self.record: SplitRecord | None = None

    def begin_bucket(self, name: str) -> None:
        self._writer.begin_bucket(name)

    def add(self, document: Document) -> None:
        self._writer.add_document(map(self._check, with_marks(document, self.marks)))
        self.documents, self.tokens, self.bytes = self._writer.documents, self._writer.tokens, self._writer.bytes

    def close(self) -> None:
        self.record = self._writer.close()


def with_marks(document: Document, marks: Marks) -> Document:
    """Put the marks around a document; small parts are joined, which is faster than writing them one by one."""
    before, after = ([] if mark is None else [one_token(mark)] for mark in (marks.bos, marks.eos))
    parts = [*before, *document, *after]
    return [np.concatenate(parts)] if len(parts) > 1 and sum(map(len, parts)) <= CHUNK_TOKENS else parts


def one_token(token: int) -> IdArray:
    """Return an array of one id."""
    return np.array([token], id_type(token + 1))
