"""Shards with a header of 1,024 bytes, as golf, modded-nanogpt and llm.c have them, in a folder of any names.

A mark stands in front of every
document, and a document may run on into the next file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

from ingot.data.formats.documents import ByteCounter, Document, Marks, StreamWriter, TokenSource, cut
from ingot.data.store.dataset import Dataset, Split
from ingot.data.store.shards import OPEN_FILES, TOKEN_BYTES, ShardWriter, TokenStream, open_shard, sound_header
from ingot.errors import DataError

VALIDATION = re.compile(r"(?<![a-z])(val|valid|validation|dev)(?![a-z])")
NO_TOKENS = re.compile(r"(?<![a-z])(bytes|test)(?![a-z])")  # byte counts beside the tokens; a split we have no use for


class ShardSource(TokenSource):
    """A folder of shards, or one of them; files with val in their name are validation."""

    format = "shards"

    def __init__(self, path: Path, sure: bool) -> None:
        self.path = path
        found = sorted(file for file in path.glob("*.bin") if file.is_file()) if path.is_dir() else [path]
        files = [file for file in found if len(found) == 1 or not NO_TOKENS.search(file.stem.lower())]
        if not files:
            raise DataError(f"{path} holds no .bin files")
        splits = {"train": [f for f in files if not _is_val(f)], "val": [f for f in files if _is_val(f)]}
        self._streams = {name: _stream(paths) for name, paths in splits.items() if paths}
        self.tokens = {split: stream.tokens for split, stream in self._streams.items()}
        self.wide = any(stream.dtype.itemsize > TOKEN_BYTES for stream in self._streams.values())
        passed = f", {len(found) - len(files)} passed over" if len(found) > len(files) else ""
        self.about = f"{len(splits['train'])} training and {len(splits['val'])} validation shards{passed}"

    def documents(self, split: str, marks: Marks) -> Iterator[Document]:
        return cut(self._streams[split], marks, ends_first=False)


def shard_writer(
    folder: Path,
    split: str,
    marks: Marks,
    counter: ByteCounter | None,
    files: ExitStack,
    name: str,
    limit: int,
    wide: bool = False,
) -> StreamWriter:
    """Writes NAME_SPLIT_NUMBER.bin: each document after its start mark; `wide`: ids of 32 bits."""
    prefix = f"{name}_{split}" if name else split

    def begin(number: int) -> ShardWriter:
        return ShardWriter(folder / f"{prefix}_{number:06d}.bin", files, limit, wide=wide)

    return StreamWriter(Marks(marks.bos, None), counter, limit, begin)


def _stream(paths: list[Path]) -> TokenStream:
    headers = [sound_header(path, foreign=True) for path in paths]
    dtype = max((np.dtype(header.dtype) for header in headers), key=lambda dtype: dtype.itemsize)
    return TokenStream(paths, [header.tokens for header in headers], partial(open_shard, foreign=True), dtype=dtype)


def _is_val(path: Path) -> bool:
    return bool(VALIDATION.search(path.stem.lower()))


class PreparedSource(TokenSource):
    """A folder with dataset.json."""

    format = "ingot"

    def __init__(self, path: Path, sure: bool) -> None:
        self.path = path
        self._dataset = Dataset.open(path)
        self.tokenizer = self._dataset.tokenizer
        self.wide = self.tokenizer.dtype.itemsize > TOKEN_BYTES
        splits = self._dataset.manifest.splits
        self.tokens = {name: record.tokens for name, record in splits.items() if record.tokens}
        documents = sum(record.documents for record in splits.values())
        self.about = f"a prepared folder, {self.tokenizer.kind} tokenizer, {documents:,} documents"

    def documents(self, split: str, marks: Marks) -> Iterator[Document]:
        return self._between(split, 0, self._dataset.manifest.splits[split].documents)

    def buckets(self, split: str, marks: Marks) -> Iterator[tuple[str | None, Iterator[Document]]]:
        first, known = 0, self._dataset.manifest.splits[split].buckets
        for record in known:
            yield record.name, self._between(split, first, first + record.documents)
            first += record.documents
        if not known:
            yield None, self.documents(split, marks)

    def _between(self, split: str, first: int, stop: int) -> Iterator[Document]:
        folder, bos = self._dataset.folder, self._dataset.tokenizer.bos
        stream = Split(folder, self._dataset.manifest.splits[split], keep=OPEN_FILES, dtype=self._dataset.tokenizer.dtype)
        starts = self._dataset.split(split).document_starts()  # which has looked at them once for all buckets
        for number in range(first, stop):
            start, end = int(starts[number]), int(starts[number + 1])
            if bos is not None and (start >= end or stream.token(start) != bos):
                raise DataError(
                    f"{folder} is damaged: document {number} of {split} starts without its mark; prepare the data again"
                )
            yield stream.slice(start + (bos is not None), end)
