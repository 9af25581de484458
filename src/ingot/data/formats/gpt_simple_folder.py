"""gpt-simple's data: train/BUCKET and val/BUCKET with pairs of .bin (tokens) and .idx (where windows begin).

A document longer than a window is stored as several, each of which may repeat the end of the one before; the .idx says how much.
Read back they are one document and no token is there twice. The .idx says too much where windows overlap by more than half, and
after the end of a document windows follow that repeat it, so repetitions are compared before they are dropped.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ingot.data import SPLITS
from ingot.data.formats.documents import (
    ByteCounter,
    Document,
    FileCounts,
    Ids,
    Marks,
    PlainWriter,
    TokenSource,
    TokenWriter,
    one_token,
    read_file,
)
from ingot.data.store.shards import TokenStream, map_tokens
from ingot.errors import ConfigError, DataError
from ingot.runtime.files import write_atomically

MAGIC, VERSION = b"GPTS", 1
HEADER = struct.Struct("<4sIII")  # magic, version, bytes of a token, windows
DTYPES = {2: "<u2", 4: "<u4"}
WIDE = 4
AGAIN = "copy it again or tokenize again"


class GPTSimpleSource(TokenSource):
    """A folder with train/ and val/, one bucket, or one .bin with its .idx."""

    format = "gpt-simple"

    def __init__(self, path: Path, sure: bool) -> None:
        self.path = path
        self._files = {split: files for split, files in find_pairs(path).items() if files}
        if not self._files:
            raise DataError(f"{path} holds no .bin with an .idx beside it; it is not data of gpt-simple")
        pairs = {split: [Pair(file) for file in files] for split, files in self._files.items()}
        self.tokens = {split: sum(pair.stream.tokens for pair in some) for split, some in pairs.items()}
        self.wide = any(pair.wide for some in pairs.values() for pair in some)
        files = [file for files in self._files.values() for file in files]
        buckets = ", ".join(sorted({file.parent.name for file in files}))
        self.about = f"gpt-simple's .bin and .idx, {len(files)} pairs, buckets: {buckets}"

    def documents(self, split: str, marks: Marks) -> Iterator[Document]:
        for _, documents in self.buckets(split, marks):
            yield from documents

    def buckets(self, split: str, marks: Marks) -> Iterator[tuple[str | None, Iterator[Document]]]:
        for folder, files in groupby(self._files[split], lambda file: file.parent):
            name = folder.name if folder.parent == self.path / split else None
            yield name, (document for file in files for document in Pair(file).documents(marks.eos))


def find_pairs(path: Path) -> dict[str, list[Path]]:
    """The .bin files of each split in order; a folder without train/ and val/ is one bucket for training."""
    if not path.is_dir():
        return {"train": [path.with_suffix(".bin")] if path.with_suffix(".idx").is_file() else []}
    folders = {split: path / split for split in SPLITS if (path / split).is_dir()}
    found = {split: [*folder.rglob("*.idx"), *folder.rglob("*.bin")] for split, folder in folders.items()}
    found = found or {"train": [*path.glob("*.idx"), *path.glob("*.bin")]}
    if not any(file.suffix == ".idx" for files in found.values() for file in files):
        return {}
    return {split: sorted({file.with_suffix(".bin") for file in files}) for split, files in found.items()}


def read_index(path: Path) -> tuple[int, NDArray[np.int64], NDArray[np.uint16]]:
    """The bytes of a token, where windows begin and the last one ends, and how many tokens each repeats."""
    contents, size = read_file(path)
    if size < HEADER.size:
        raise DataError(f"unexpected header in {path}: {size:,} bytes instead of {HEADER.size}; {AGAIN}")
    magic, version, width, count = HEADER.unpack_from(contents)
    if (magic, version) != (MAGIC, VERSION) or width not in DTYPES:
        raise DataError(
            f"unexpected header in {path}: magic {magic!r}, version {version}, {width} bytes per token instead of "
            f"{MAGIC!r}, {VERSION}, 2 or 4; {AGAIN}"
        )
    expected = HEADER.size + 8 * (count + 1) + 2 * count
    if size != expected:
        raise DataError(f"size mismatch in {path}: {expected:,} bytes expected for {count:,} windows, {size:,} found; {AGAIN}")
    offsets = np.frombuffer(contents, "<i8", count + 1, HEADER.size)
    repeats = np.frombuffer(contents, "<u2", count, HEADER.size + 8 * (count + 1))
    lengths = np.diff(offsets)
    if offsets[0] != 0 or (lengths <= 0).any():
        raise DataError(f"{path} is damaged: its offsets do not rise from 0; {AGAIN}")
    if (repeats > lengths).any():
        raise DataError(f"{path} is damaged: a window repeats more tokens than it has; {AGAIN}")
    return width, offsets, repeats


class Pair:
    """A .bin and its .idx, checked against each other."""

    def __init__(self, path: Path) -> None:
        width, self.offsets, self.repeats = read_index(path.with_suffix(".idx"))
        _, size = read_file(path, 0)
        count = int(self.offsets[-1])
        if size != width * count:
            raise DataError(f"size mismatch in {path}: {width * count:,} bytes expected by its .idx, {size:,} found; {AGAIN}")
        self.path = path
        self.wide, dtype = width == WIDE, np.dtype(DTYPES[width])
        self.stream = TokenStream([path], [count], lambda path: map_tokens(path, DTYPES[width], 0, count), dtype=dtype)

    def documents(self, eos: int | None) -> Iterator[Document]:
        """Whole documents without their end marks. Where a file has such marks, a window without one goes on in the next."""
        marked = self.stream.tokens > 0 and self.stream.token(self.stream.tokens - 1) == eos
        document: Document = []
        last: Ids | None = None
        for number, repeats in enumerate(self.repeats.tolist()):
            window = _joined(self.stream.slice(int(self.offsets[number]), int(self.offsets[number + 1])))
            ended = last is not None and marked and int(last[-1]) == eos
            skip = _repeated(window, last, repeats, ended) if repeats else 0
            if skip is None:
                raise DataError(
                    f"{self.path} is damaged: window {number} repeats {repeats} tokens that do not come before it; {AGAIN}"
                )
            if skip == len(window):
                continue
            if not repeats and last is not None and (ended or not marked):
                yield _without(document, eos if marked else None)
                document = []
            document.append(window[skip:])
            last = window
        if last is not None:
            yield _without(document, eos if marked else None)


class IndexedWriter(TokenWriter):
    """Writes SPLIT/BUCKET/NUMBER.bin and .idx; a file is full when it has `limit` tokens, and no document is in two."""

    def __init__(
        self,
        folder: Path,
        marks: Marks,
        counter: ByteCounter | None,
        files: ExitStack,
        *,
        limit: int,
        max_length: int,
        overlap: int,
        width: int = 2,
    ) -> None:
        super().__init__(marks, counter)
        check_windows(max_length, overlap)
        self._folder, self._files, self._limit, self._width = folder, files, limit, width
        self._max_length, self._overlap, self._number = max_length, overlap, 0
        self._file: PlainWriter | None = None
        self._offsets: list[int] = []
        self._repeats: list[int] = []

    def begin_bucket(self, name: str) -> None:
        self.close()
        self._folder, self._number = self._folder.with_name(name), 0

    def add(self, document: Document) -> None:
        parts = [*document, *([] if self.marks.eos is None else [one_token(self.marks.eos)])]
        if not parts:
            return
        whole = _joined(parts)
        file = self._file or self._begin()
        for start, stop, repeats in cut_windows(len(whole), self._max_length, self._overlap):
            file.append(whole[start:stop])
            self._offsets.append(file.tokens)
            self._repeats.append(repeats)
        self.documents += 1
        counts = self.files[-1]
        counts.documents, counts.tokens = counts.documents + 1, file.tokens
        if self.counter:
            self.counter.begin()
            counts.bytes += int(self.counter.count(whole).sum())
        if file.tokens >= self._limit:
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            write_atomically(self._file.path.with_suffix(".idx"), index_bytes(self._offsets, self._repeats, self._width))
            self._file = None

    def _begin(self) -> PlainWriter:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = PlainWriter(self._folder / f"{self._number:05d}.bin", self._files, DTYPES[self._width])
        self._number += 1
        self.files.append(FileCounts(self._file.path))
        self._offsets, self._repeats = [0], []
        return self._file


def check_windows(max_length: int, overlap: int) -> None:
    """Refuse windows that would repeat more than half of themselves, or more than an .idx can say."""
    if not 0 <= 2 * overlap <= max_length or max_length < 1 or overlap > 0xFFFF:
        raise ConfigError(
            f"an overlap of {overlap:,} does not fit windows of {max_length:,} tokens; give at most half of it, and up to 65,535"
        )


def cut_windows(length: int, max_length: int, overlap: int) -> Iterator[tuple[int, int, int]]:
    """The windows of a document, its end mark included: where each begins and ends, and how many tokens it repeats.

    The last one ends with the document: none follows that would only repeat.
    """
    start = repeats = 0
    while start + repeats < length:
        stop = min(start + max_length, length)
        yield start, stop, repeats
        start, repeats = stop - overlap, overlap


def index_bytes(offsets: list[int], repeats: list[int], width: int) -> bytes:
    """An .idx: `offsets` has one more than there are windows, the end of the last."""
    header = HEADER.pack(MAGIC, VERSION, width, len(repeats))
    return header + np.array(offsets, "<i8").tobytes() + np.array(repeats, "<u2").tobytes()


def token_width(vocab_size: int) -> int:
    """The bytes of a token in a .bin: 4 from a vocabulary of 65,536 ids on."""
    return 2 if vocab_size < 1 << 16 else 4


def _repeated(window: Ids, last: Ids | None, told: int, ended: bool) -> int | None:
    """How many tokens of a window to leave out: all of one after the end of its document; None if it repeats nothing."""
    if last is None:
        return None
    trailer = len(window) == told + 1 and window[-1] == last[-1] and _ends_with(last[:-1], window[:-1])
    if ended and trailer:
        return len(window)
    for count in (min(told, len(last) - len(last) // 2), told):
        if _ends_with(last, window[:count]):
            return count
    return len(window) if trailer else None


def _ends_with(ids: Ids, end: Ids) -> bool:
    return len(end) <= len(ids) and bool((ids[len(ids) - len(end) :] == end).all())


def _without(document: Document, eos: int | None) -> Document:
    if eos is not None and int(document[-1][-1]) == eos:
        document = [*document[:-1], document[-1][:-1]]
    return [part for part in document if len(part)]


def _joined(parts: Document) -> Ids:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
