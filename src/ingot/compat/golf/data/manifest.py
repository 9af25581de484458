"""The manifest of a published data set: which files it asks for, and where the one in a folder came from.

The manifest is a stranger's: every path it names is checked before it becomes a path here. Names of shards follow from our own
arguments and its counts. Where a manifest came from stands in a small file beside it, because it does not say so itself.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from ingot.data.formats.foreign import MANIFEST, Record
from ingot.data.hub import FileInfo
from ingot.errors import ConfigError, DataError
from ingot.runtime.files import write_atomically

SOURCE = "manifest.source.json"
PREVIOUS = "manifest.previous.json"
DOCS = "docs_selected.jsonl"
DOCS_SOURCE = "docs_selected.source_manifest.json"
ARTIFACTS = ("model_path", "vocab_path", "path")  # where a tokenizer's entry may name its files
MOST_SHARDS = 1_000_000  # six digits number them


def dataset_name(variant: str) -> str:
    """The data set of a variant: byte260, sp1024, or sp8192_anything for the derived ones."""
    if not re.fullmatch(r"byte260|sp[0-9]+(_[A-Za-z0-9_]+)?", variant):
        raise ConfigError(f"unknown variant {variant!r}; it is byte260, or sp and the size of a vocabulary, such as sp1024")
    return f"fineweb10B_{variant}"


@dataclass(frozen=True)
class Plan:
    """The files of one data set that are asked for; names are relative, below the hub's prefix and the output folder alike."""

    name: str
    train: tuple[str, ...]
    val: tuple[str, ...]  # with the byte counts of its tokens, where the data set has them
    tokenizer: tuple[str, ...]
    train_available: int
    stats: Record

    @property
    def folder(self) -> str:
        """Where the shards lie."""
        return f"datasets/{self.name}"

    @property
    def files(self) -> tuple[str, ...]:
        """The small and the needed first."""
        return (*self.tokenizer, *self.val, *self.train)


def plan_files(manifest: Record, variant: str, train_shards: int | None, repo: str, where: str) -> Plan:
    """What a request comes to; None asks for 80 train shards or as many as there are."""
    name = dataset_name(variant)
    entry = _entry(manifest, "datasets", name, repo, where)
    stats = entry.get("stats")
    if not isinstance(stats, dict):
        raise DataError(f"{where} of {repo} has no stats for {name}, so the number of its shards is not known")
    available, val = (_count(stats, key, f"{where} of {repo}") for key in ("files_train", "files_val"))
    if train_shards is not None and train_shards > available:
        raise ConfigError(f"{variant} has {available:,} train shards in {repo}, fewer than the {train_shards:,} asked for")
    wanted = min(80, available) if train_shards is None else train_shards
    kinds = ("val", "val_bytes") if entry.get("val_bytes_glob") else ("val",)
    return Plan(
        name,
        train=tuple(_shards(name, "train", wanted)),
        val=tuple(shard for kind in kinds for shard in _shards(name, kind, val)),
        tokenizer=_artifacts(_entry(manifest, "tokenizers", str(entry.get("tokenizer_name")), repo, where), repo, where),
        train_available=available,
        stats=stats,
    )


def _entry(manifest: Record, kind: str, name: str, repo: str, where: str) -> Record:
    entries = manifest.get(kind)
    found = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    for entry in found:
        if entry.get("name") == name:
            return entry
    listed = ", ".join(str(entry.get("name")) for entry in found[:8]) or "none"
    raise DataError(f"no {kind.removesuffix('s')} {name} in {where} of {repo}; it lists {listed}")


def _count(stats: Record, key: str, where: str) -> int:
    count = stats.get(key)
    if type(count) is not int or not 0 <= count <= MOST_SHARDS:
        raise DataError(f"{where} says {key}={count!r}, which is not a number of files")
    return count


def _shards(name: str, kind: str, count: int) -> list[str]:
    return [f"datasets/{name}/fineweb_{kind}_{index:06d}.bin" for index in range(count)]


def _artifacts(entry: Record, repo: str, where: str) -> tuple[str, ...]:
    """The files of a tokenizer; only names inside tokenizers/ are taken, so that a manifest cannot write over anything else."""
    names = [entry[key] for key in ARTIFACTS if entry.get(key)]
    if not names:
        raise DataError(f"tokenizer {entry.get('name')} in {where} of {repo} names no file ({', '.join(ARTIFACTS)})")
    for name in names:
        parts = name.split("/") if isinstance(name, str) else []
        sound = len(parts) > 1 and parts[0] == "tokenizers" and not {"", ".", ".."} & set(parts)
        if not sound or re.search(r"[\\:\x00-\x1f]", name) or any(part.startswith(".") for part in parts):
            raise DataError(f"{where} of {repo} names {name!r} as a tokenizer's file; only names inside tokenizers/ are taken")
    return tuple(dict.fromkeys(names))


class Source(BaseModel):
    """Where a manifest came from, and what the hub said of the files downloaded with it."""

    repo: str
    prefix: str
    commit: str
    manifest_sha256: str
    files: dict[str, FileInfo]


def read_source(folder: Path) -> Source | None:
    """Where the manifest in a folder came from; None if that is not known or it was changed since."""
    try:
        source = Source.model_validate_json((folder / SOURCE).read_bytes())
        here = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    except (OSError, ValueError):
        return None
    return source if source.manifest_sha256 == here else None


def write_manifest(folder: Path, content: bytes, source: Source) -> None:
    """Put a manifest and its origin into a folder; killed in between, the origin counts as unknown."""
    record = source.model_dump_json(indent=1, exclude_none=True) + "\n"
    for path, wanted in ((folder / SOURCE, record.encode()), (folder / MANIFEST, content)):
        if not path.is_file() or path.read_bytes() != wanted:
            write_atomically(path, wanted)
