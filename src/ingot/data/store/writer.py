"""Write a prepared folder: documents in order, split into shards, and dataset.json last.

`save` syncs the files to disk and returns a record of their contents. Another process can resume from that record: it truncates
the files to the saved sizes, so anything written after the save is discarded.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from ingot.data.store.dataset import MANIFEST, BucketRecord, Count, Manifest, ShardRecord, SplitRecord, TokenizerRecord, identity
from ingot.data.store.shards import HEADER_BYTES, PART_TOKENS, TOKEN_BYTES, TokenWriter
from ingot.data.tokenizers import Tokenizer
from ingot.data.tokenizers.tokenizer_base import NARROW, OUTSIDE, IdArray
from ingot.runtime.files import file_sha256, write_atomically
from ingot.runtime.machine import made_by

INDEX_BYTES = 8  # bytes per entry of the document index
COUNTS = ("documents", "tokens", "bytes", "piece_bytes")  # fields shared by splits, buckets and their saved states
SAVE_TOKENS = 1 << 25  # tokens written between two resume points


class SavedSplit(BaseModel):
    """The state of a split that is being written: totals, finished shards, and the counts of the unfinished shard."""

    model_config = ConfigDict(strict=True)

    documents: Count = 0
    tokens: Count = 0
    bytes: Count = 0
    piece_bytes: Count = 0
    shards: list[ShardRecord] = []
    shard_tokens: Count = 0
    shard_documents: Count = 0
    shard_bytes: Count = 0
    token_bytes: Count = TOKEN_BYTES
    buckets: list[BucketRecord] = []  # each holds the running totals at the start of the bucket

    def files(self, name: str) -> dict[str, int]:
        """Return the minimum size in bytes that each file of the split `name` needs for writing to be resumed."""
        sizes = {shard.file: HEADER_BYTES + self.token_bytes * shard.tokens for shard in self.shards}
        if self.shard_tokens:
            sizes[f"{name}_{len(self.shards):06d}.bin"] = HEADER_BYTES + self.token_bytes * self.shard_tokens
        return sizes | {f"{name}.index": INDEX_BYTES * self.documents}

    def counts(self) -> dict[str, Any]:
        """Return the numbers of documents, tokens, text bytes and decoded bytes, as in the records of splits and buckets."""
        return {count: getattr(self, count) for count in COUNTS}


class Point(BaseModel):
    """The progress of the work: numbers of blocks, documents and empty texts so far, and the saved states of the splits."""

    blocks: Count = 0
    documents: Count = 0
    empty: Count = 0
    splits: dict[str, SavedSplit] = {}

    def files(self) -> dict[str, int]:
        """Return the minimum size in bytes that each file needs for the work to be resumed."""
        return {file: size for name, split in self.splits.items() for file, size in split.files(name).items()}


def is_sound(folder: Path, saved: Any) -> bool:
    """Return True if the files of a folder are at least as large as a resume point requires."""
    try:
        files = Point.model_validate(saved, strict=True).files()
        return all((folder / file).stat().st_size >= size for file, size in files.items())
    except (ValidationError, OSError):
        return False


def write_manifest(folder: Path, tokenizer: Tokenizer, splits: dict[str, SplitRecord], source: Any) -> Manifest:
    """Write dataset.json and return its contents."""
    version: Literal[1, 2] = 2 if tokenizer.vocab_size > NARROW else 1
    told = TokenizerRecord.of(tokenizer)
    manifest = Manifest(version=version, tokenizer=told, splits=splits, created_by=made_by(), source=source)
    manifest = manifest.model_copy(update={"fingerprint": identity(manifest.model_dump())})
    write_atomically(folder / MANIFEST, json.dumps(manifest.model_dump(), indent=2) + "\n")
    return manifest


class SplitWriter:
    """Writes a stream of documents into shards; a document may continue in the next shard."""

    def __init__(
        self, folder: Path, name: str, tokenizer: Tokenizer, shard_tokens: int, files: ExitStack, saved: SavedSplit | None = None
    ) -> None:
        self._folder, self.name, self._files = folder, name, files
        self._tokenizer, self._shard_tokens = tokenizer, shard_tokens
        self._index = files.enter_context((folder / f"{name}.index").open("r+b" if saved else "xb"))
        self.state = saved or SavedSplit(token_bytes=tokenizer.dtype.itemsize)
        self._shard: TokenWriter | None = None
        if self.state.shard_tokens:
            self._open_shard(self.state.shard_tokens)
        self._index.truncate(INDEX_BYTES * self.state.documents)
        self._index.seek(0, os.SEEK_END)

    def begin_bucket(self, name: str) -> None:
        """Assign the following documents to the bucket `name`, which starts here unless it is already the current bucket."""
        if not self.state.buckets or self.state.buckets[-1].name != name:
            self.state.buckets.append(BucketRecord(name=name, **self.state.counts()))

    def add(self, documents: Encoded) -> None:
        """Add documents, skipping those that encode to no tokens."""
        documents = documents.select(documents.tokens > 0)
        ends, state = np.cumsum(documents.tokens), self.state
        self._index.write((state.tokens + ends - documents.tokens).astype("<u8").tobytes())
        state.documents += len(ends)
        state.tokens += len(documents.ids)
        state.bytes += int(documents.bytes.sum())
        state.piece_bytes += int(documents.piece_bytes.sum())
        number = begin = 0
        while number < len(ends):
            room = self._shard_tokens - state.shard_tokens
            whole = int(np.searchsorted(ends, begin + room, side="right"))  # first document that ends beyond this shard
            if whole > number:
                self._append(documents.ids[begin : ends[whole - 1]], whole - number, int(documents.bytes[number:whole].sum()))
            else:
                self._write_document([documents.ids[begin : ends[number]]], int(documents.bytes[number]))
                whole += 1
            number, begin = whole, int(ends[whole - 1])

    def add_document(self, parts: Iterable[IdArray]) -> None:
        """Add one document whose text is unknown; its tokens are given in parts, because it may be larger than memory."""
        start, state = self.state.tokens, self.state
        tokens, size = self._write_document(parts)
        if tokens:
            self._index.write(start.to_bytes(INDEX_BYTES, "little"))
            state.documents += 1
            state.tokens += tokens
            state.bytes += size
            state.piece_bytes += size

    def save(self) -> SavedSplit:
        """Sync everything to disk and return `state` (not a copy: adding more documents changes it)."""
        if self._shard:
            self._shard.sync()
        self._index.flush()
        os.fsync(self._index.fileno())
        return self.state

    def close(self) -> SplitRecord:
        """Complete the last files and return the record of the split."""
        if self._shard:
            self._finish_shard(self._shard)
        self._index.write(self.state.tokens.to_bytes(INDEX_BYTES, "little"))
        self.save()
        buckets = []  # the counts of a bucket are the differences between the running totals at its end and its start
        for begin, end in pairwise([*self.state.buckets, BucketRecord(name="", **self.state.counts())]):
            buckets.append(BucketRecord(name=begin.name, **{key: getattr(end, key) - getattr(begin, key) for key in COUNTS}))
        return SplitRecord(
            **self.state.counts(),
            shards=self.state.shards,
            document_index=f"{self.name}.index",
            document_index_sha256=file_sha256(self._folder / f"{self.name}.index"),
            buckets=buckets,
        )

    def _write_document(self, parts: Iterable[IdArray], left: int | None = None) -> tuple[int, int]:
        """Write the tokens of a document, which may span several shards; return its token and byte counts.

        `left` is the text size in bytes of a document given in one part; if it is None, bytes are counted from the tokens.
        """
        previous, begins, tokens, total = OUTSIDE, 1, 0, 0
        for ids in parts:
            while len(ids):
                # Counting the bytes of a whole document at once would take many times its size in memory.
                part = ids[: min(self._shard_tokens - self.state.shard_tokens, PART_TOKENS)]
                ids = ids[len(part) :]
                sizes = self._tokenizer.target_bytes(np.append(np.int32(previous), part[:-1].astype(np.int32)), part)
                size = int(sizes.sum())
                if left is not None:  # the last shard gets the remainder, so that the sizes add up for any tokenizer
                    size = min(left, size) if len(ids) else left
                    left -= size
                self._append(part, begins, size)
                previous, begins, tokens, total = int(part[-1]), 0, tokens + len(part), total + size
        return tokens, total

    def _append(self, ids: IdArray, documents: int, size: int) -> None:
        shard = self._shard or self._open_shard()
        shard.append(ids)
        self.state.shard_tokens = shard.tokens
        self.state.shard_documents += documents
        self.state.shard_bytes += size
        if shard.tokens == self._shard_tokens:
            self._finish_shard(shard)

    def _open_shard(self, tokens: int = 0) -> TokenWriter:
        path = self._folder / f"{self.name}_{len(self.state.shards):06d}.bin"
        self._shard = TokenWriter(path, self._files, f"<u{self.state.token_bytes}", tokens, header=True)
        return self._shard

    def _finish_shard(self, shard: TokenWriter) -> None:
        shard.close()
        state, name, checksum = self.state, shard.path.name, file_sha256(shard.path)
        counts = {"tokens": shard.tokens, "documents": state.shard_documents, "bytes": state.shard_bytes}
        state.shards.append(ShardRecord(file=name, sha256=checksum, **counts))
        self._shard, state.shard_tokens, state.shard_documents, state.shard_bytes = None, 0, 0, 0


class Encoded(NamedTuple):
    """Encoded documents: their concatenated ids, and the token count, text bytes and decoded bytes of each document."""

    ids: IdArray
    tokens: NDArray[np.int64]
    bytes: NDArray[np.int64]
    piece_bytes: NDArray[np.int64]
    empty: int  # number of empty texts, which are not documents

    def select(self, which: NDArray[np.bool_]) -> Encoded:
        """Return the documents selected by a mask."""
        if which.all():
            return self
        return Encoded(self.ids[np.repeat(which, self.tokens)], self.tokens[which], self.bytes[which], self.piece_bytes[which], 0)
