"""The document index of a split, checked when it is opened.

Whoever cuts documents by it trusts every number: one flipped bit makes a document of 2**60 tokens, or moves the end of one. The
numbers are looked at a part at a time and stay on the disk, because a billion documents have 8 GB of them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ingot.data.store.stream import TokenStream
from ingot.runtime.files import file_sha256

PART = 1 << 20  # numbers that are looked at together


def open_index(path: Path, documents: int, tokens: int, sha256: str | None) -> NDArray[np.uint64]:
    """Where each document begins, and after them the end of the last; ValueError says what is wrong with the file."""
    try:
        size, expected = path.stat().st_size, 8 * (documents + 1)
        if size != expected:
            raise ValueError(f"has {size:,} bytes, and {expected:,} belong to {documents:,} documents")
        starts = np.memmap(path, dtype="<u8", mode="r", shape=(documents + 1,))
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    for first in range(0, documents, PART):
        part = np.asarray(starts[first : first + PART + 1])
        if len(falls := np.flatnonzero(part[1:] <= part[:-1])):
            begin, after = part[falls[0]], part[falls[0] + 1]
            raise ValueError(f"does not rise: document {first + falls[0]:,} begins at {begin:,} and the next at {after:,}")
    if starts[0] != 0 or starts[-1] != tokens:
        raise ValueError(f"goes from {starts[0]:,} to {starts[-1]:,} and not from 0 to {tokens:,}")
    if sha256 is not None and file_sha256(path) != sha256:
        raise ValueError("is not what was written: documents begin elsewhere")
    return starts


def starts_at_marks(stream: TokenStream, mark: int) -> NDArray[np.uint64] | None:
    """The same for tokens without an index: a document begins with each mark, and with the first token; None without any mark.

    Where marks are after documents instead, each begins with the mark of the one before: the same tokens lie side by side.
    """
    marks = np.fromiter(stream.positions(mark), np.uint64)
    if not len(marks):
        return None
    first = [] if marks[0] == 0 else [0]
    return np.concatenate([first, marks, [stream.tokens]]).astype(np.uint64)
