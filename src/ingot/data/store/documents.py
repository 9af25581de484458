"""Documents in a token stream: their separators (BOS or EOS ids, called marks), boundaries and contents.

A document is a list of arrays without separators: consecutive views of memory-mapped files, so that even a document larger than
memory can be processed. In formats without an index, the separators define the document boundaries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ingot.data.store.shards import TokenStream, map_tokens
from ingot.data.tokenizers import Tokenizer
from ingot.data.tokenizers.tokenizer_base import IdArray
from ingot.runtime.files import file_sha256

Document = list[IdArray]
INDEX_PART = 1 << 20  # index entries checked at a time


@dataclass(frozen=True)
class Marks:
    """The id before each document (BOS) and the id after each document (EOS); a format uses only one of the two."""

    bos: int | None = None
    eos: int | None = None


def marks_of(tokenizer: Tokenizer) -> Marks:
    """Return the ids before and after documents; if the vocabulary has only one of the two ids, it is used for both."""
    bos, eos = tokenizer.bos, tokenizer.eos
    return Marks(eos if bos is None else bos, bos if eos is None else eos)


def ends_of(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that end a text: the BOS id of the next document, as in prepared folders, and the EOS id."""
    return [mark for mark in dict.fromkeys((tokenizer.bos, tokenizer.eos)) if mark is not None]


def cut(stream: TokenStream, marks: Marks, ends_first: bool) -> Iterator[Document]:
    """Yield the documents of a stream without an index, in which a separator precedes or follows each document.

    Separators follow documents if the last token of the stream is a separator and the first token is not; if both are separators,
    `ends_first` decides. A stream without separators is one document. Tokens before the first BOS id are a document too.
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


def check_index_size(path: Path, documents: int) -> None:
    """Raise ValueError if the size of a document index does not match the number of documents."""
    try:
        size, expected = path.stat().st_size, 8 * (documents + 1)
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    if size != expected:
        raise ValueError(f"must have {expected:,} bytes for {documents:,} documents, but has {size:,}")


def open_index(path: Path, documents: int, tokens: int, sha256: str | None) -> NDArray[np.uint64]:
    """Memory-map a document index (all starts, then the end of the last document); raise ValueError if it is damaged."""
    check_index_size(path, documents)
    starts = map_tokens(path, "<u8", 0, documents + 1)
    for first in range(0, documents, INDEX_PART):
        part = np.asarray(starts[first : first + INDEX_PART + 1])
        if len(falls := np.flatnonzero(part[1:] <= part[:-1])):
            begin, after = part[falls[0]], part[falls[0] + 1]
            raise ValueError(f"does not increase: document {first + falls[0]:,} begins at {begin:,} and the next at {after:,}")
    if starts[0] != 0 or starts[-1] != tokens:
        raise ValueError(f"goes from token {starts[0]:,} to {starts[-1]:,} instead of from 0 to {tokens:,}")
    if sha256 is not None and file_sha256(path) != sha256:
        raise ValueError("has changed since it was written: its checksum differs")
    return starts


def starts_at_marks(tokens: int, marks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the start of each document and the end of the last one; documents begin at separators and at the first token.

    In formats with EOS ids, each document therefore begins with the EOS id of the previous document.
    """
    first = [0] if tokens and (not len(marks) or marks[0]) else []
    return np.concatenate([np.array(first, np.int64), marks, np.array([tokens], np.int64)])
