"""Token files: shards (a header of 256 int32 values, then the tokens, all little-endian) and files without a header.

The header holds a magic number, the version and the token count, then zeros. Tokens are uint16 in version 1 and uint32 in version
2, which vocabularies of more than 65,536 ids need. A file whose size does not match its header is an error: otherwise training on
a truncated copy would go unnoticed. llm.c's shards of uint32 tokens have a different magic number and are accepted too.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.data.tokenizers.tokenizer_base import NARROW, IdType
from ingot.errors import DataError, one_line
from ingot.runtime.files import open_to_read, reading

AGAIN = "copy the folder again or prepare the data again"


@dataclass(frozen=True)
class DataProblem:
    """A defect in token data. The meaning of a code never changes; docs/data-audit.md explains all codes."""

    code: str
    file: str
    problem: str
    advice: str = AGAIN
    place: str = ""

    @property
    def line(self) -> str:
        """Return the problem as one line of text."""
        where = f"{self.file}, {self.place}" if self.place else self.file
        return one_line(f"{self.code}: {where}: {self.problem}; {self.advice}")

    def error(self) -> DataError:
        """Return the problem as an exception."""
        return DataError(f"{self.file} {self.problem}; {self.advice}")


MAGIC, VERSION, WIDE_VERSION = 20240520, 1, 2
# The dtype of the tokens for each magic number and version in a shard's header; the last entry is for shards of llm.c.
DTYPES = {(MAGIC, VERSION): "<u2", (MAGIC, WIDE_VERSION): "<u4", (20240801, 7): "<u4"}
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
TOKEN_BYTES = 2  # bytes per token in version 1
MAX_TOKENS = 2**31 - 1  # the header stores the count as int32
PART_TOKENS = 1 << 22  # tokens per chunk when counting bytes; counting takes many times the chunk's size in memory
BUFFER_BYTES = 1 << 20


class TokenWriter:
    """Writes tokens to a file; with `header`, to a shard whose header is written last, so that no unfinished file looks complete.

    `written` is the number of tokens that an interrupted process saved in this file; anything after these tokens is truncated.
    """

    def __init__(self, path: Path, files: ExitStack, dtype: str = "<u2", written: int = 0, header: bool = False) -> None:
        self.path, self.tokens, self._dtype, self._header = path, written, np.dtype(dtype), header
        self._file = files.enter_context(path.open("r+b" if written else "xb", buffering=BUFFER_BYTES))
        self._file.truncate(HEADER_BYTES * header + self._dtype.itemsize * written)
        self._file.seek(0, os.SEEK_END)

    def append(self, tokens: NDArray[Any]) -> None:
        """Append tokens in the dtype of the file; raise DataError if an id does not fit."""
        if tokens.dtype.itemsize > self._dtype.itemsize and (largest := int(tokens.max(initial=0))) >= NARROW:
            raise DataError(f"token {largest:,} does not fit the 16-bit ids of {self.path.name}; choose a format with 32-bit ids")
        self._file.write(np.ascontiguousarray(tokens, self._dtype).data)
        self.tokens += len(tokens)

    def sync(self) -> None:
        """Flush all tokens to disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write the header if the file has one, flush the file to disk and close it."""
        if self._header:
            version = VERSION if self._dtype.itemsize == TOKEN_BYTES else WIDE_VERSION
            header = np.zeros(HEADER_INTS, "<i4")
            header[:3] = MAGIC, version, self.tokens
            self._file.seek(0)
            self._file.write(header.tobytes())
        self.sync()
        self._file.close()


def read_header(path: Path) -> tuple[str, int] | DataProblem:
    """Return the dtype and the token count of a shard, or a DataProblem if its header or size is invalid."""
    try:
        with open_to_read(path) as file:
            header, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    except OSError as error:
        return DataProblem("shard-missing", str(path), f"cannot be read: {error.strerror}")
    if len(header) < HEADER_BYTES:
        problem = f"has {len(header):,} bytes, fewer than the {HEADER_BYTES:,} of a header: it is cut short or not a shard"
        return DataProblem("shard-header", str(path), problem, place="header")
    magic, version, count = (int(value) for value in np.frombuffer(header, "<i4", 3))
    dtype = DTYPES.get((magic, version))
    if dtype is None:
        problem = f"has magic {magic} and version {version}, which no supported format has: it is damaged or not a shard"
        return DataProblem("shard-header", str(path), problem, place="header")
    expected = HEADER_BYTES + int(dtype[-1]) * count
    if size != expected:
        state = "is cut short" if size < expected else "is too long"
        problem = f"has {size:,} bytes instead of the {expected:,} of a header and {count:,} tokens: it {state}"
        return DataProblem("shard-size", str(path), problem)
    return dtype, count


def has_header(path: Path) -> bool:
    """Return True if a file begins with the magic number of a shard."""
    with open_to_read(path) as file:
        return int.from_bytes(file.read(4), "little") in {magic for magic, _ in DTYPES}


def open_shard(path: Path) -> NDArray[Any]:
    """Memory-map the tokens of a shard; pages are read on first access."""
    if isinstance(header := read_header(path), DataProblem):
        raise header.error()
    dtype, tokens = header
    return map_tokens(path, dtype, HEADER_BYTES, tokens)


def open_plain(path: Path) -> NDArray[np.uint16]:
    """Memory-map the tokens of a uint16 file without a header."""
    with reading(path):
        size = path.stat().st_size
    if size % TOKEN_BYTES:
        raise DataError(f"{path} has {size:,} bytes, an odd number, but each token has two; it is cut short or not token data")
    return map_tokens(path, "<u2", 0, size // TOKEN_BYTES)


def map_tokens(path: Path, dtype: str, offset: int, count: int) -> NDArray[Any]:
    """Memory-map `count` tokens of a file, starting at a byte offset."""
    if not count:
        return np.empty(0, dtype)
    try:
        return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot memory-map {path}: {error}") from error


CHUNK_TOKENS = 1 << 22  # tokens scanned at a time
OpenTokens = Callable[[Path], NDArray[Any]]


class TokenStream:
    """The tokens of several files as one stream. Files are memory-mapped on first use and stay mapped.

    `dtype` is the type of the ids that are returned. Files with a wider dtype are checked and narrowed when they are read.
    """

    def __init__(
        self, paths: Sequence[Path], sizes: Sequence[int], open_tokens: OpenTokens = open_shard, *, dtype: IdType | None = None
    ) -> None:
        self.paths, self.sizes, self._ends = paths, sizes, list(accumulate(sizes))
        self.tokens = self._ends[-1] if self._ends else 0
        self.open_file, self.dtype = open_tokens, dtype or np.dtype(np.uint16)
        self._maps: dict[int, NDArray[Any]] = {}

    def shard(self, number: int) -> NDArray[Any]:
        """Return the tokens of one file, memory-mapped on the first call."""
        tokens = self._maps.get(number)
        if tokens is None:
            tokens = np.asarray(self.open_file(self.paths[number]))  # slicing a plain array is 3x as fast as slicing a memmap
            if len(tokens) != self.sizes[number]:
                raise DataError(f"{self.paths[number]} was replaced while it was in use; start again with the new data")
            self._maps[number] = tokens
        return tokens

    def read(self, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return a copy of tokens[start:stop], in `out` (of any integer dtype) if it is given."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens {start} to {stop} are out of range for a stream of {self.tokens} tokens")
        out, filled = np.empty(stop - start, self.dtype) if out is None else out[: stop - start], 0
        for part in self._parts(start, stop):
            out[filled : filled + len(part)] = part
            filled += len(part)
        return out

    def slice(self, start: int, stop: int) -> list[NDArray[Any]]:
        """Return tokens[start:stop] as consecutive arrays: views of the files, or copies if the dtype must be narrowed."""
        return [part.astype(self.dtype, copy=False) for part in self._parts(start, stop) if len(part)]

    def _parts(self, start: int, stop: int) -> Iterator[NDArray[Any]]:
        number = bisect_right(self._ends, start)
        while start < stop:
            begin = start - (self._ends[number] - self.sizes[number])
            part = self.shard(number)[begin : begin + min(stop - start, CHUNK_TOKENS)]
            if part.dtype.itemsize > self.dtype.itemsize and (largest := int(part.max(initial=0))) > np.iinfo(self.dtype).max:
                limit = f"ids above {np.iinfo(self.dtype).max:,} do not fit the tokenizer's {8 * self.dtype.itemsize}-bit ids"
                raise DataError(f"{self.paths[number]} contains token {largest:,}: {limit}; give the tokenizer that produced it")
            yield part
            start += len(part)
            number += start == self._ends[number]

    def token(self, position: int) -> int:
        """Return the token at one position."""
        return int(self.slice(position, position + 1)[0][0])

    def positions(self, token: int) -> Iterator[int]:
        """Yield the positions at which a token occurs."""
        for number, end in enumerate(self._ends):
            tokens = self.shard(number)
            for start in range(0, len(tokens), CHUNK_TOKENS):
                positions = np.flatnonzero(tokens[start : start + CHUNK_TOKENS] == token)
                yield from (positions + (end - len(tokens) + start)).tolist()

    def place(self, position: int) -> tuple[str, str]:
        """Return the file that contains a token, and a description of the token's position in it."""
        number = min(bisect_right(self._ends, position), len(self.paths) - 1)
        return str(self.paths[number]), f"token {position - self._ends[number] + self.sizes[number]:,}"
