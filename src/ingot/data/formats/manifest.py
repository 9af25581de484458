"""The manifest that came with shards, two folders above them: what it says of them, and which tokenizer made them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ingot.errors import DataError

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
