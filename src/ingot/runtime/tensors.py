"""Tensors as names, shapes and raw bytes, and the safetensors files that store them.

The training loop handles tensors only in this form, so all backends write the same checkpoints. The format is safetensors (eight
bytes of length, a JSON header, the data). It is implemented here so that files are written and hashed in one pass and do not
depend on the installed version of the safetensors package.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.runtime.files import open_to_read

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U16": 2, "U8": 1, "BOOL": 1}
DTYPES: dict[str, type[np.generic]] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # names in safetensors to names in torch
MAX_RANK, MAX_ITEMS = 32, 1 << 59  # numpy 1 allows 32 dimensions; a tensor's size in bytes must fit in 64 bits
METADATA = "__metadata__"
SCALE = "::scale"  # name suffix for the scales of a quantised tensor
SMALL = 1024  # tensors of up to this many elements are not quantised


@dataclass(frozen=True)
class Part:
    """The position of a rank's part in a whole tensor that is sharded over ranks."""

    offset: tuple[int, ...]  # indices, in the whole tensor, of the part's first element
    whole: tuple[int, ...]  # shape of the whole tensor


@dataclass(frozen=True)
class TensorRecord:
    """One tensor, independent of any framework; `data` is little-endian and row-major."""

    name: str
    dtype: str  # safetensors name: F32, BF16, I64...
    shape: tuple[int, ...]
    data: memoryview
    part: Part | None = None  # None: the record holds the whole tensor


def pack_tensors(records: Iterable[TensorRecord], metadata: Mapping[str, str] | None = None) -> list[bytes | memoryview]:
    """Return the parts of a safetensors file in order: length and header, then the data of each tensor."""
    # Sort by item size, largest first, so that every tensor is aligned to its item size.
    records = sorted(records, key=lambda record: (-ITEM_BYTES[record.dtype], record.name))
    header: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    offset = 0
    for record in records:
        end = offset + record.data.nbytes
        header[record.name] = {"dtype": record.dtype, "shape": list(record.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # pad the header, so that the data begins at a multiple of 8 bytes
    return [len(text).to_bytes(8, "little") + text, *(record.data.cast("B") for record in records if record.data.nbytes)]


def write_tensors(path: Path, records: Iterable[TensorRecord], metadata: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Write and sync a safetensors file, and return its size and sha256."""
    digest, size = hashlib.sha256(), 0
    parts = pack_tensors(records, metadata)
    with path.open("xb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
            size += len(part)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def read_tensors(path: Path, sha256: str | None = None) -> tuple[dict[str, TensorRecord], dict[str, str]]:
    """Return the tensors and metadata of a safetensors file; raise ValueError if it is invalid or `sha256` does not match."""
    with open_to_read(path) as file:
        # Read into a numpy buffer: frameworks can share it, unlike read-only bytes, and a bytearray would be zeroed first.
        data, done = np.empty(os.fstat(file.fileno()).st_size, np.uint8).data, 0
        while done < len(data) and (count := file.readinto(data[done:])):
            done += count
    data = data[:done]
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError("its checksum does not match")
    return unpack_tensors(data)


def unpack_tensors(data: memoryview) -> tuple[dict[str, TensorRecord], dict[str, str]]:
    """Parse the bytes of a safetensors file into tensors and metadata; raise ValueError if they are invalid."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise ValueError("it is cut short or is not a safetensors file")
    try:
        header = json.loads(bytes(data[8 : 8 + length]))
    except (ValueError, RecursionError):
        raise ValueError("its header is not JSON") from None
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict):
        raise ValueError("its metadata is not a JSON object")
    body = data[8 + length :]
    records = {name: _record(name, entry, body) for name, entry in header.items()}
    places = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    if [0, *(end for _, end in places)] != [*(begin for begin, _ in places), len(body)]:
        raise ValueError("its tensors do not cover the data exactly")
    return records, metadata


def _record(name: str, entry: object, body: memoryview) -> TensorRecord:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]  # type: ignore[index]
        whole = isinstance(dtype, str) and all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"its entry for {name!r:.100} is malformed") from None
    if not whole or len(shape) > MAX_RANK or prod(n or 1 for n in shape) > MAX_ITEMS:
        raise ValueError(f"its entry for {name!r:.100} does not describe a tensor")
    if end > len(body) or dtype not in ITEM_BYTES or end - begin != prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"its entry for {name!r:.100} does not fit its data")
    return TensorRecord(name, dtype, shape, body[begin:end])


def to_array(record: TensorRecord) -> NDArray[Any]:
    """Convert a record to a numpy array; bfloat16 becomes float32, which is exact."""
    stored = np.uint16 if record.dtype == "BF16" else DTYPES[record.dtype]
    array = np.frombuffer(record.data, stored) if record.data.nbytes else np.empty(0, stored)
    if record.dtype == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.reshape(record.shape)


def to_record(name: str, array: NDArray[Any], dtype: str) -> TensorRecord:
    """Convert a numpy array to a record of the given dtype, rounded to nearest, ties to even."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        stored: NDArray[Any] = np.where(np.isnan(array), 0x7FC0, nearest).astype(np.uint16)
    else:
        with np.errstate(over="ignore"):  # overflow to infinity is allowed; callers check for it if it matters
            stored = np.ascontiguousarray(array, DTYPES[dtype])
    return TensorRecord(name, dtype, array.shape, stored.reshape(-1).view(np.uint8).data)


# A batch of rows as a numpy array, used by data loading, evaluation and every backend.

IGNORED = -1  # a target that is not predicted; equal to IGNORED in model/cross_entropy.py, which does not import this module
Batch = NDArray[np.int32]  # shape (rows, planes, seq_len); planes: tokens, targets and, with a document mask, document ids
