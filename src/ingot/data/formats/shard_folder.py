"""A folder of shards with 1,024-byte headers, as golf, modded-nanogpt and llm.c write them, and the manifest.json of golf's data.

A BOS token precedes every document, and a document may continue in the next file. Golf's data has a manifest.json two folders
above its shards, which records the tokenizer and the numbers of shards and documents.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from ingot.data import SPLITS
from ingot.data.store.dataset import Dataset, Split, foreign_record, readable_shards
from ingot.data.store.shards import DataProblem
from ingot.errors import DataError

MANIFEST = "manifest.json"
VALIDATION = re.compile(r"(?<![a-z])(val|valid|validation|dev)(?![a-z])")
NO_TOKENS = re.compile(r"(?<![a-z])(bytes|test)(?![a-z])")  # file names to skip: byte counts, and the unused test split
Record = dict[str, Any]


def open_shards(path: Path, strict: bool = True) -> Dataset:
    """Open a folder of shards, or one shard.

    With `strict` the first damaged shard raises an error; otherwise damaged shards are skipped and listed in `Dataset.problems`.
    """
    folder, problems, splits = path if path.is_dir() else path.parent, list[DataProblem](), {}
    every = sorted(file for file in path.glob("*.bin") if file.is_file()) if path.is_dir() else [path]
    files = {split: shard_files(path, split) for split in SPLITS} if path.is_dir() else {}
    if not any(files.values()):
        tokens = [file for file in every if len(every) == 1 or not NO_TOKENS.search(file.stem.lower())]
        val = [file for file in tokens if VALIDATION.search(file.stem.lower())]
        files = {"train": [file for file in tokens if file not in val], "val": val}
    if not any(files.values()):
        raise DataError(f"{path} holds no .bin files")
    for split, paths in files.items():
        if paths:
            sizes, dtype = readable_shards(paths, problems)
            record = foreign_record(folder, dict.fromkeys(paths, 0) | sizes)
            splits[split] = Split(split, folder, record, sizes, dtype=dtype)
    if strict and problems:
        raise problems[0].error()
    skipped = len(every) - sum(map(len, files.values()))
    about = f"{len(files['train'])} training and {len(files['val'])} validation shards{f', {skipped} skipped' if skipped else ''}"
    return Dataset(path, "shards", splits, about, problems=problems)


def shard_files(folder: Path, split: str) -> list[Path]:
    """Return a split's shards (*_SPLIT_*.bin), sorted by name, without the *_bytes_* files, which contain byte counts."""
    return sorted(path for path in folder.glob(f"*_{split}_*.bin") if path.is_file() and "_bytes_" not in path.name)


def parse_manifest(content: bytes, where: str) -> Record:
    """Parse the contents of a manifest.json; `where` names the file in error messages."""
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError):
        raise DataError(f"{where} is not JSON; it is damaged or not a manifest") from None
    if not isinstance(manifest, dict):
        raise DataError(f"{where} is not a manifest: expected a JSON object, got {type(manifest).__name__}")
    return manifest


class ManifestEntry(NamedTuple):
    """A shard folder's entry in the manifest.json at `where`, and its tokenizer's kind and file ("" if there is no file)."""

    where: Path
    stats: Record
    kind: str
    file: str


def read_listing(dataset: Path) -> ManifestEntry | None:
    """Return the manifest's entry for a folder of shards; None if the manifest is missing or does not list the folder."""
    folder = Path(os.path.abspath(dataset))  # noqa: PTH100 (a data folder may be a symlink to another disk)
    where = folder.parent.parent / MANIFEST
    manifest = parse_manifest(where.read_bytes(), str(where)) if where.is_file() else {}
    entry = next((entry for entry in entries_of(manifest, "datasets") if entry.get("name") == folder.name), None)
    if entry is None:
        return None
    tokenizers = entries_of(manifest, "tokenizers")
    paired = next((tokenizer for tokenizer in tokenizers if tokenizer.get("name") == entry.get("tokenizer_name")), {})
    stats, file = entry.get("stats"), paired.get("model_path") or paired.get("path") or ""
    return ManifestEntry(where, stats if isinstance(stats, dict) else {}, str(paired.get("kind")), str(file))


def paired_tokenizer(dataset: Path) -> str | None:
    """Return the tokenizer that the manifest records for a shard folder: `byte` or the path of an existing file, else None."""
    if (listing := read_listing(dataset)) is None:
        return None
    path = listing.where.parent / listing.file.lstrip("/")  # the manifest is untrusted: paths must stay inside its folder
    return "byte" if "byte" in listing.kind else str(path) if listing.file and ".." not in path.parts and path.is_file() else None


def entries_of(manifest: Record, kind: str) -> list[Record]:
    """Return the manifest's list `kind` ("datasets" or "tokenizers"), skipping entries that are not JSON objects."""
    entries = manifest.get(kind)
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
