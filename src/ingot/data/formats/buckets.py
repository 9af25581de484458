"""gpt-simple's folder as `data.path`: train/BUCKET and val/BUCKET with pairs of .bin and .idx, read as they lie.

A window of a file is a document here, with its end mark where it has one, and what it repeats of the window before is not
predicted again. Buckets follow each other in a split in the order of their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ingot.data.formats.base import marks_of
from ingot.data.formats.foreign import NoTokenizer, both_ends, check_tokens
from ingot.data.formats.gpt_simple import Pair
from ingot.data.store.dataset import (
    BucketRecord,
    Dataset,
    Manifest,
    ShardRecord,
    Split,
    SplitRecord,
    TokenizerRecord,
)
from ingot.data.text.buckets import find_buckets
from ingot.data.tokenizers import digest, open_tokenizer


class IndexedSplit(Split):
    """The windows of many pairs, one after the other."""

    def __init__(self, folder: Path, record: SplitRecord, pairs: Sequence[Pair], eos: int | None) -> None:
        maps = {pair.path: pair.stream for pair in pairs}
        super().__init__(folder, record, lambda path: maps[path].shard(0), dtype=np.dtype(np.uint32))
        self.eos, begins = eos, np.cumsum([0, *(pair.stream.tokens for pair in pairs)])
        starts = [pair.offsets[:-1] + begin for pair, begin in zip(pairs, begins[:-1], strict=True)]
        self._starts = np.concatenate([*starts, begins[-1:]]).astype(np.uint64)
        self._repeats = np.concatenate([np.empty(0, np.uint16), *(pair.repeats for pair in pairs)])

    def document_starts(self) -> NDArray[np.uint64]:
        return self._starts

    def document_repeats(self) -> NDArray[np.uint16] | None:
        return self._repeats if self._repeats.any() else None


def open_buckets(folder: Path, tokenizer: str | None, trust_tokens: bool) -> Dataset | None:
    """The data of a folder with buckets of .bin and .idx; None where there are none."""
    found = find_buckets(folder, lambda file: file.suffix in (".bin", ".idx"))
    if not found:
        return None
    if tokenizer is None:
        raise NoTokenizer(folder)
    pairs = {
        split: {
            name: [Pair(path) for path in sorted({file.with_suffix(".bin") for file in files})] for name, files in buckets.items()
        }
        for split, buckets in found.items()
    }
    opened, known = open_tokenizer(tokenizer), [pair for buckets in pairs.values() for some in buckets.values() for pair in some]
    maps = {pair.path: pair.stream for pair in known}
    check_tokens(list(maps), opened, lambda path: maps[path].shard(0), trust_tokens)
    records = {split: _record(folder, buckets) for split, buckets in pairs.items()}
    told = TokenizerRecord.of(opened)
    files = [file for pair in known for file in (pair.path, pair.path.with_suffix(".idx"))]
    ends = [[str(file.relative_to(folder)), both_ends(file)] for file in files]
    fingerprint = digest({"tokenizer": told.fingerprint, "files": ends})
    manifest = Manifest(tokenizer=told, splits=records, fingerprint=fingerprint, source=str(folder))
    eos = marks_of(opened).eos
    splits = {
        split: IndexedSplit(folder, records[split], [pair for some in buckets.values() for pair in some], eos)
        for split, buckets in pairs.items()
    }
    return Dataset(folder, manifest, opened, splits)


def bucket_of(name: str, pairs: Sequence[Pair]) -> BucketRecord:
    """What some pairs hold; nobody recorded their text."""
    windows, tokens = sum(len(pair.repeats) for pair in pairs), sum(pair.stream.tokens for pair in pairs)
    return BucketRecord(name=name, documents=windows, tokens=tokens, bytes=0)


def _record(folder: Path, buckets: dict[str, list[Pair]]) -> SplitRecord:
    shards = [
        ShardRecord.model_construct(
            file=str(pair.path.relative_to(folder)), tokens=pair.stream.tokens, documents=len(pair.repeats), bytes=0, sha256=""
        )
        for pairs in buckets.values()
        for pair in pairs
    ]
    told = [bucket_of(name, pairs) for name, pairs in buckets.items()]
    return SplitRecord.model_construct(
        documents=sum(one.documents for one in told),
        tokens=sum(one.tokens for one in told),
        bytes=0,
        piece_bytes=None,
        shards=shards,
        document_index="",
        buckets=told,
    )
