"""Token files that other programs made, read as they lie: nanoGPT's folder, folders of shards and of gpt-simple's buckets.

Nobody recorded their documents, their text or their checksums: documents are found by the mark of the tokenizer, and where it has
none, packing, redrawing and document masks need `ingot data convert`. The fingerprint covers names, sizes and both ends of every
file: enough to notice other data, and quick for a hundred files. Nor did anybody record the tokenizer, and a wrong one gives
wrong bits per byte: a few places of every file are held against it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.data import SPLITS
from ingot.data.formats.documents import marks_of
from ingot.data.formats.gpt_simple_folder import Pair
from ingot.data.store.dataset import (
    BucketRecord,
    Dataset,
    Manifest,
    ShardRecord,
    Split,
    SplitRecord,
    TokenizerRecord,
)
from ingot.data.store.shards import OpenTokens, open_plain, open_shard
from ingot.data.text.text_files import find_buckets
from ingot.data.tokenizers import Tokenizer, digest, open_tokenizer
from ingot.data.tokenizers.by_name import round_trips
from ingot.errors import DataError, Setting
from ingot.runtime.files import open_to_read

# The manifest that came with shards, two folders above them: what it says of them, and which tokenizer made them.

MANIFEST = "manifest.json"

Record = dict[str, Any]


def parse_manifest(content: bytes, where: str) -> Record:
    """The manifest in a file's content."""
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError):
        raise DataError(f"{where} is not JSON; it is damaged or not a manifest") from None
    if not isinstance(manifest, dict):
        raise DataError(f"{where} is not a manifest: it holds a {type(manifest).__name__} instead of an object")
    return manifest


def manifest_of(dataset: Path) -> tuple[Path, Record] | None:
    """The manifest of a folder of shards and where it lies; None without one."""
    folder = Path(os.path.abspath(dataset))  # noqa: PTH100 (a data folder may be a link to another disk)
    where = folder.parent.parent / MANIFEST
    return (where, parse_manifest(where.read_bytes(), str(where))) if where.is_file() else None


def listed_dataset(dataset: Path) -> Record | None:
    """What the manifest says of a folder of shards; None where it says nothing."""
    name = Path(os.path.abspath(dataset)).name  # noqa: PTH100
    found = manifest_of(dataset)
    return next((entry for entry in _entries(found[1], "datasets") if entry.get("name") == name), None) if found else None


def paired_tokenizer(dataset: Path) -> str | None:
    """The tokenizer of a folder of shards by its manifest: byte, or a file that is there; None where nothing says it."""
    found, entry = manifest_of(dataset), listed_dataset(dataset)
    if found is None or entry is None:
        return None
    kind, file = tokenizer_of(found[1], entry)
    path = found[0].parent / file.lstrip("/")  # a manifest is a stranger's: no name leads out of its folder
    return "byte" if "byte" in kind else str(path) if file and ".." not in path.parts and path.is_file() else None


def tokenizer_of(manifest: Record, entry: Record) -> tuple[str, str]:
    """The kind and the file of a data set's tokenizer, by its manifest."""
    paired = next((one for one in _entries(manifest, "tokenizers") if one.get("name") == entry.get("tokenizer_name")), {})
    return str(paired.get("kind")), str(paired.get("model_path") or paired.get("path") or "")


def _entries(manifest: Record, kind: str) -> list[Record]:
    found = manifest.get(kind)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


TOKENIZER = Setting("data.tokenizer")
ENDS = 4096  # bytes of a file's start and of its end that the fingerprint covers
OTHER = "the tokenizer; name the one that made them with {0}"
GUESSED = "GPT-2's tokenizer, which is taken without a meta.pkl; put that file beside them, or name what made them with {0}"
PLACES, LOOKED_AT = 32, 4096  # looked at in all, at least 2 of every file, and tokens of each
NANOGPT = {split: f"{split}.bin" for split in SPLITS}


class NoTokenizer(DataError):
    """Tokens that do not say which tokenizer made them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"{folder} holds tokens and does not say their tokenizer; name it with {{0}}", TOKENIZER)


def open_foreign(folder: Path, tokenizer: str | None, trust_tokens: bool = False) -> Dataset | None:
    """The data of a folder that nanoGPT, gpt-simple or a writer of shards made; None where it is none of them.

    `trust_tokens`: whether the tokenizer made the tokens is not asked.
    """
    if (folder / NANOGPT["train"]).is_file():
        return _open_nanogpt(folder, tokenizer, trust_tokens)
    splits = {split: shard_files(folder, split) for split in SPLITS}
    if not splits["train"] and not splits["val"]:
        return open_buckets(folder, tokenizer, trust_tokens)
    if (tokenizer := tokenizer or paired_tokenizer(folder)) is None:
        raise NoTokenizer(folder)
    return _dataset(folder, splits, open_tokenizer(tokenizer), open_shard, trust_tokens)


def shard_files(folder: Path, split: str) -> list[Path]:
    """The shards of a split in the order of their names; files with byte counts beside them are not tokens."""
    return sorted(path for path in folder.glob(f"*_{split}_*.bin") if path.is_file() and "_bytes_" not in path.name)


def _open_nanogpt(folder: Path, tokenizer: str | None, trust_tokens: bool) -> Dataset:
    from ingot.data.formats.nanogpt_folder import META, nanogpt_tokenizer

    files = {split: [folder / name] for split, name in NANOGPT.items() if (folder / name).is_file()}
    which = OTHER if tokenizer or (folder / META).is_file() else GUESSED
    return _dataset(folder, {"val": [], **files}, nanogpt_tokenizer(folder, tokenizer), open_plain, trust_tokens, which)


def _dataset(
    folder: Path, splits: dict[str, list[Path]], tokenizer: Tokenizer, open_tokens: OpenTokens, trust: bool, which: str = OTHER
) -> Dataset:
    """The data of a folder; `which` says what tokenizer is meant, and what to do if it is another."""
    records = {split: _split(paths, open_tokens) for split, paths in splits.items()}
    check_tokens([path for paths in splits.values() for path in paths], tokenizer, open_tokens, trust, which)
    known = TokenizerRecord.of(tokenizer)
    ends = {split: [[path.name, both_ends(path)] for path in paths] for split, paths in splits.items()}
    fingerprint = digest({"tokenizer": known.fingerprint, "files": ends})
    manifest = Manifest(tokenizer=known, splits=records, fingerprint=fingerprint, source=str(folder))
    found = {
        split: Split(folder, record, open_tokens, dtype=tokenizer.dtype, mark=tokenizer.bos) for split, record in records.items()
    }
    return Dataset(folder, manifest, tokenizer, found)


def check_tokens(paths: Sequence[Path], tokenizer: Tokenizer, open_tokens: OpenTokens, trust: bool, which: str = OTHER) -> None:
    """Refuse a tokenizer that did not make the tokens of some files, as far as a few places of each tell."""
    samples = []
    for path in paths:
        tokens = open_tokens(path)
        for place in np.linspace(0, max(0, len(tokens) - LOOKED_AT), max(2, PLACES // len(paths))).astype(int):
            part = tokens[place : place + LOOKED_AT]
            if (largest := part.max(initial=0)) >= tokenizer.vocab_size:
                raise DataError(f"{path} holds token {largest}, outside the {tokenizer.vocab_size:,} ids of {which}", TOKENIZER)
            samples.append(part)
    if not round_trips(tokenizer, samples, trust).fit:
        raise DataError(
            f"the tokens of {paths[0].parent} are not those that their text has in {which}",
            TOKENIZER,
            Setting("data.trust_tokens"),
            advice="if that is on purpose, set {1}",
        )


def _split(paths: Sequence[Path], open_tokens: OpenTokens) -> SplitRecord:
    shards = [
        ShardRecord.model_construct(file=path.name, tokens=len(open_tokens(path)), documents=0, bytes=0, sha256="")
        for path in paths
    ]
    return SplitRecord.model_construct(
        documents=0, tokens=sum(shard.tokens for shard in shards), bytes=0, piece_bytes=None, shards=shards, document_index=""
    )


def both_ends(path: Path) -> str:
    """A checksum of a file's size, start and end."""
    with open_to_read(path) as file:
        start = file.read(ENDS)
        size = file.seek(0, 2)
        file.seek(max(0, size - ENDS))
        return hashlib.sha256(start + file.read() + str(size).encode()).hexdigest()


# gpt-simple's folder as `data.path`: train/BUCKET and val/BUCKET with pairs of .bin and .idx, read as they lie.


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
