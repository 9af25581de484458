"""The shard file: a header of 256 int32, then tokens, all little-endian; and files of tokens alone.

The header holds a magic number, the version and the token count; the rest of it is zero. Tokens of version 1 are uint16, those of
version 2, for vocabularies above 65,536 ids, uint32. A file whose size does not follow from its header is refused: half a copy
would train without complaint. llm.c has a header of its own for uint32 tokens.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ingot.data.store.findings import Finding
from ingot.errors import DataError
from ingot.runtime.files import file_sha256, open_to_read, reading

MAGIC, VERSION, WIDE_VERSION = 20240520, 1, 2
LLM_C = (20240801, 7)
TYPES = {(MAGIC, VERSION): "<u2", (MAGIC, WIDE_VERSION): "<u4", LLM_C: "<u4"}  # of a token, by magic number and version
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
TOKEN_BYTES = 2  # of version 1
MAX_TOKENS = 2**31 - 1  # the count is an int32
PART_TOKENS = 1 << 22  # written at once: a thread that comes back for more waits for the one that computes


class ShardWriter:
    """A shard that grows; its header is written last, so an unfinished file is never taken for a shard.

    A thread brings tokens to the disk and into the checksum while the caller makes more. The header comes first in a checksum and
    holds the count: `limit` is taken for it, and where it comes to be another, the file is read again. `written`: the tokens of a
    shard that another process left unfinished; what it wrote after them is cut off. `wide`: its tokens have 32 bits.
    """

    def __init__(self, path: Path, files: ExitStack, limit: int = MAX_TOKENS, written: int = 0, wide: bool = False) -> None:
        self.path, self.tokens, self._files = path, written, files
        self._version = WIDE_VERSION if wide else VERSION
        dtype = np.dtype(TYPES[MAGIC, self._version])
        self._file = files.enter_context(path.open("r+b" if written else "xb"))
        self._file.truncate(HEADER_BYTES + dtype.itemsize * written)
        self._file.seek(0, os.SEEK_END)
        self._sum, self._summed = (
            hashlib.sha256(_header(limit, self._version)),
            0 if written else limit,
        )  # the count for which the sum is right
        self._part, self._other = (np.empty(min(limit, PART_TOKENS), dtype) for _ in range(2))
        self._filled = 0
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None

    def append(self, tokens: NDArray[Any]) -> None:
        """Adds tokens at the end."""
        self.tokens += len(tokens)
        while len(tokens):
            part, tokens = np.split(tokens, [len(self._part) - self._filled])
            self._part[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            if self._filled == len(self._part):
                self._hand_over()

    def sync(self) -> None:
        """Brings all tokens to the disk."""
        self._write_rest()
        self._flush()

    def close(self) -> str:
        """Completes the header, brings the file to the disk and returns its sha256."""
        self._write_rest()
        self._file.seek(0)
        self._file.write(_header(self.tokens, self._version))
        self._flush()
        self._file.close()
        if self._thread:
            self._thread.shutdown()
        return self._sum.hexdigest() if self.tokens == self._summed else file_sha256(self.path)

    def _hand_over(self) -> None:
        self._wait()
        self._thread = self._thread or self._files.enter_context(ThreadPoolExecutor(1))
        self._writing = self._thread.submit(self._write_through, self._part)
        self._part, self._other, self._filled = self._other, self._part, 0

    def _wait(self) -> None:
        if self._writing:
            self._writing.result()  # raises what the thread met

    def _write_rest(self) -> None:
        self._wait()
        self._write(self._part[: self._filled])
        self._filled = 0

    def _write_through(self, tokens: NDArray[Any]) -> None:
        self._write(tokens)
        self._flush()

    def _write(self, tokens: NDArray[Any]) -> None:
        self._file.write(tokens.data)
        self._sum.update(tokens.data)

    def _flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())


def _header(tokens: int, version: int) -> bytes:
    header = np.zeros(HEADER_INTS, "<i4")
    header[:3] = MAGIC, version, tokens
    return header.tobytes()


class Header(NamedTuple):
    """What a shard's header says."""

    dtype: str
    tokens: int


def read_header(path: Path, foreign: bool = False) -> Header | Finding:
    """The header of a shard, or what is wrong with it or with the file's size; `foreign`: llm.c's is taken too."""
    try:
        with open_to_read(path) as file:
            header, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    except OSError as error:
        return Finding("shard-missing", str(path), f"{error.strerror}")
    if len(header) < HEADER_BYTES:
        problem = f"{len(header):,} bytes instead of {HEADER_BYTES:,}: the file is cut short or no shard"
        return Finding("shard-header", str(path), problem, place="header")
    magic, version, count = (int(value) for value in np.frombuffer(header, "<i4", 3))
    dtype = TYPES.get((magic, version)) if foreign or magic == MAGIC else None
    if dtype is None:
        problem = f"magic {magic} and version {version} instead of {MAGIC} and {VERSION}: the file is damaged or no shard"
        return Finding("shard-header", str(path), problem, place="header")
    expected = HEADER_BYTES + int(dtype[-1]) * count
    if size != expected:
        state = "is cut short" if size < expected else "is too long"
        problem = f"{expected:,} bytes expected for {count:,} tokens, {size:,} found: the file {state}"
        return Finding("shard-size", str(path), problem)
    return Header(dtype, count)


def has_header(path: Path) -> bool:
    """Whether a file begins as a shard does."""
    with open_to_read(path) as file:
        return int.from_bytes(file.read(4), "little") in {magic for magic, _ in TYPES}


def token_count(path: Path) -> int:
    """The tokens of a shard, after its header and size are checked."""
    return sound_header(path).tokens


def open_shard(path: Path, foreign: bool = False) -> NDArray[Any]:
    """The tokens of a shard, mapped from the disk and read only when touched; `foreign`: it may be one of llm.c's."""
    header = sound_header(path, foreign)
    return map_tokens(path, header.dtype, HEADER_BYTES, header.tokens)


def open_plain(path: Path) -> NDArray[np.uint16]:
    """The tokens of a file without a header, mapped from the disk."""
    with reading(path):
        size = path.stat().st_size
    if size % TOKEN_BYTES:
        raise DataError(f"{path} has {size:,} bytes, an odd number, and tokens have two each; it is cut short or no such data")
    return map_tokens(path, "<u2", 0, size // TOKEN_BYTES)


def map_tokens(path: Path, dtype: str, offset: int, count: int) -> NDArray[Any]:
    """So many tokens of a file, mapped from the disk."""
    if not count:
        return np.empty(0, dtype)
    try:
        return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot map {path}: {error}") from error


def sound_header(path: Path, foreign: bool = False) -> Header:
    """The header of a shard, or an error that says what is wrong with it."""
    if isinstance(header := read_header(path, foreign), Finding):
        raise header.error()
    return header
