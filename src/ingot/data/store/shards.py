"""The shard file: a header of 256 int32, then tokens, all little-endian; and files of tokens alone.

The header holds a magic number, the version and the token count; the rest of it is zero. Tokens of version 1 are uint16, those of
version 2, for vocabularies above 65,536 ids, uint32. A file whose size does not follow from its header is refused: half a copy
would train without complaint. llm.c has a header of its own for uint32 tokens.
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ingot.data.tokenizers.tokenizer_base import IdType
from ingot.errors import DataError, one_line
from ingot.runtime.files import file_sha256, open_to_read, reading

# What is wrong with a file of token data: a line in the list of an audit, or the error of whoever opens the data.

AGAIN = "copy the folder again or prepare the data again"
TITLES = {
    "shard-missing": "missing shard or one that cannot be read:",
    "shard-header": "unexpected header in",
    "shard-size": "size mismatch in",
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. Codes never change their meaning; docs/data-audit.md explains each."""

    code: str
    file: str
    problem: str
    advice: str = AGAIN
    place: str = ""

    @property
    def line(self) -> str:
        """All of it in one line."""
        where = f"{self.file}, {self.place}" if self.place else self.file
        return one_line(f"{self.code}: {where}: {self.problem}; {self.advice}")

    def error(self) -> DataError:
        """The same for whoever cannot go on."""
        where = f"{TITLES[self.code]} {self.file}:" if self.code in TITLES else self.file
        return DataError(f"{where} {self.problem}; {self.advice}")


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


# The tokens of several files as one stream, wherever the files end.

CHUNK_TOKENS = 1 << 22  # looked at at once
OPEN_FILES = 8
OpenTokens = Callable[[Path], NDArray[Any]]


class TokenStream:
    """Files one after the other; wider ids than those of `dtype` are checked and narrowed where they are read.

    At most `keep` files stay mapped, None: all. `dtype` is uint16 unless it is given.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        sizes: Sequence[int],
        open_tokens: OpenTokens = open_shard,
        *,
        keep: int | None = OPEN_FILES,
        dtype: IdType | None = None,
    ) -> None:
        self.paths, self.sizes, self._ends = paths, sizes, list(accumulate(sizes))
        self.tokens = self._ends[-1] if self._ends else 0
        self._open, self._keep, self.dtype = open_tokens, keep, dtype or np.dtype(np.uint16)
        self._maps: dict[int, NDArray[Any]] = {}

    def shard(self, number: int) -> NDArray[Any]:
        """The tokens of one file, mapped at the first call."""
        found = self._maps.get(number)
        if found is None:
            found = np.asarray(self._open(self.paths[number]))  # a slice of a memmap takes three times as long
            if len(found) != self.sizes[number]:
                raise DataError(f"{self.paths[number]} was replaced while it was in use; start again with the new data")
            if self._keep is not None and len(self._maps) >= self._keep:
                del self._maps[next(iter(self._maps))]
            self._maps[number] = found
        return found

    @property
    def shards(self) -> list[NDArray[Any]]:
        """The tokens of every file."""
        return [self.shard(number) for number in range(len(self.paths))]

    def read(self, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Tokens start..stop of the stream, copied into `out` (any integer type) where it is given."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens {start} to {stop} of a stream of {self.tokens}")
        count = stop - start
        out = np.empty(count, self.dtype) if out is None else out[:count]
        number, filled = bisect_right(self._ends, start), 0
        while filled < count:
            begin = start + filled - (self._ends[number] - self.sizes[number])
            part = self._fitting(number, begin, begin + count - filled)
            out[filled : filled + len(part)] = part
            filled += len(part)
            number += 1
        return out

    def slice(self, start: int, stop: int) -> list[NDArray[Any]]:
        """Tokens start..stop, as views that follow one another."""
        parts = []
        number = bisect_right(self._ends, start)
        while start < stop:
            begin = start - (self._ends[number] - self.sizes[number])
            part = self._fitting(number, begin, begin + min(stop - start, CHUNK_TOKENS)).astype(self.dtype, copy=False)
            parts += [part] if len(part) else []
            start += len(part)
            number += start == self._ends[number]
        return parts

    def token(self, position: int) -> int:
        """The token at one position."""
        return int(self.slice(position, position + 1)[0][0])

    def positions(self, token: int) -> Iterator[int]:
        """Where a token stands."""
        for number, end in enumerate(self._ends):
            tokens = self.shard(number)
            for start in range(0, len(tokens), CHUNK_TOKENS):
                found = np.flatnonzero(tokens[start : start + CHUNK_TOKENS] == token)
                yield from (found + (end - len(tokens) + start)).tolist()

    def place(self, position: int) -> tuple[str, str]:
        """The file of a token, and its place there, in words."""
        number = min(bisect_right(self._ends, position), len(self.paths) - 1)
        return str(self.paths[number]), f"token {position - self._ends[number] + self.sizes[number]:,}"

    def _fitting(self, number: int, begin: int, end: int) -> NDArray[Any]:
        part = self.shard(number)[begin:end]
        if part.dtype.itemsize > self.dtype.itemsize:
            limit = int(np.iinfo(self.dtype).max)
            if (largest := int(part.max(initial=0))) > limit:
                raise DataError(
                    f"{self.paths[number]} holds token {largest:,}: ids above {limit:,} do not fit the "
                    f"{8 * self.dtype.itemsize} bits that the ids of its tokenizer have; give the one that made the tokens"
                )
        return part
