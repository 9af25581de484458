"""Whether checkpoint.json tells all that is asked of it: a checksum says only that it is what somebody wrote."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.runtime.tensors import ITEM_BYTES


def tells_all(record: Mapping[str, Any]) -> bool:
    """Whether a record that is what somebody wrote is one that can be read: names, sizes and places of all tensors."""

    def counts(values: Any) -> bool:
        return all(type(value) is int and value >= 0 for value in values)

    try:
        files, tensors = record["files"], record["tensors"]
        entries = [entry for group in tensors.values() for entry in group.values()]
        return (
            counts([record["step"]])
            and isinstance(record["progress"], dict)
            and "model" in tensors
            and all(
                Path(file).name == file and counts([f["bytes"]]) and isinstance(f["sha256"], str) for file, f in files.items()
            )
            and all(entry["dtype"] in ITEM_BYTES and counts(entry["shape"]) and len(entry["parts"]) for entry in entries)
            and all(
                part["file"] in files and counts(part["offset"]) and len(part["offset"]) == len(entry["shape"])
                for entry in entries
                for part in entry["parts"]
            )
        )
    except (KeyError, TypeError, AttributeError):
        return False
