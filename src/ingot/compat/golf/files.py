"""The two files a golf run leaves: final_model.pt, a torch state dict, and final_model.int8.ptz, its quantised twin in zlib.

Both are read by the challenge's own scripts, so names, types and number formats in them are fixed. They are torch files, which
may hold code; we read them as weights only, and code in them is never run.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ingot.artifact.quantise import dequantise, quantise
from ingot.backends.torch.state import check_held, record, tensor
from ingot.errors import CheckpointError
from ingot.model.settings import CONTROL
from ingot.runtime.files import open_to_read, write_atomically, writing
from ingot.runtime.tensors import SCALE, TensorRecord

FORMAT = "int8_clean_per_row_v1"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
NAMES = {name: dtype for dtype, name in DTYPES.items()}
LARGEST = 1 << 32  # bytes that a file may unpack to
FREE, RATIO = 1 << 26, 100  # and by its own size: weights that zlib makes a hundred times smaller hold nothing

Encode = Callable[[Iterable[TensorRecord], str, Sequence[str], Sequence[str]], tuple[bytes, int]]  # `pack`, or another's


@dataclass(frozen=True)
class PackedReport:
    """What a quantised file came to, in bytes: on the disk, of its tensors, before zlib, and of the tensors it stands for."""

    bytes: int
    payload: int
    raw: int
    tensors: int


def write_state(path: Path, records: Iterable[TensorRecord]) -> int:
    """Write a state dict and return the size of the file."""
    data = _saved({one.name: tensor(one) for one in records})
    with writing(path):
        write_atomically(path, data)
    return len(data)


def write_packed(
    path: Path,
    records: Sequence[TensorRecord],
    quantiser: str = "int8-golf",
    control: Sequence[str] = CONTROL,
    keep: Sequence[str] = CONTROL,
    encode: Encode | None = None,
) -> PackedReport:
    """Write the quantised file, which `encode` makes before zlib.

    Names with a word of `control` are never quantised, those with one of `keep` stay float32.
    """
    data, payload = (encode or pack)(records, quantiser, control, keep)
    smaller = zlib.compress(data, 9)
    with writing(path):
        write_atomically(path, smaller)
    return PackedReport(len(smaller), payload, len(data), sum(len(one.data) for one in records))


def pack(records: Iterable[TensorRecord], quantiser: str, control: Sequence[str], keep: Sequence[str]) -> tuple[bytes, int]:
    """The torch file of the quantised tensors, and the bytes of the tensors in it."""
    contents, payload = packed(records, quantiser, control, keep, tensor)
    return _saved(contents), payload


def packed(
    records: Iterable[TensorRecord],
    quantiser: str,
    control: Sequence[str],
    keep: Sequence[str],
    convert: Callable[[TensorRecord], Any],
) -> tuple[dict[str, Any], int]:
    """What the file holds of the quantised tensors, each as `convert` makes it, and the bytes of them."""
    contents: dict[str, Any] = {"__quant_format__": FORMAT, "quantized": {}, "scales": {}, "dtypes": {}, "passthrough": {}}
    meta: dict[str, Any] = {}
    formats: dict[str, str] = {}
    payload = 0
    for one in records:
        steers = any(word in one.name for word in control)
        how, dtype = ("none", "fp32" if any(word in one.name for word in keep) else "fp16") if steers else (quantiser, "fp32")
        stored, was = quantise([one], how, dtype, keep)
        payload += sum(len(part.data) for part in stored)
        codes, *scales = (convert(part) for part in stored)
        if not scales:
            contents["passthrough"][one.name] = codes
            if was:
                formats[one.name] = DTYPES[one.dtype]
            continue
        contents["quantized"][one.name], contents["scales"][one.name] = codes, scales[0]
        contents["dtypes"][one.name] = DTYPES[one.dtype]
        if scales[0].ndim:
            meta[one.name] = {"scheme": "per_row", "axis": 0}
    contents |= {key: value for key, value in (("qmeta", meta), ("passthrough_orig_dtypes", formats)) if value}
    return contents, payload


def read_file(path: Path) -> bytes:
    """The content of a file that a user names."""
    try:
        with open_to_read(path) as file:
            return file.read()
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {path}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


def is_state(data: bytes) -> bool:
    """Whether this is final_model.pt rather than its quantised twin."""
    return data[:2] == b"PK"


def read_golf(data: bytes, path: Path) -> dict[str, TensorRecord]:
    """The weights in either file, in their original number formats."""
    try:
        data = data if is_state(data) else unpacked(data)
        contents = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        check_held(contents, len(data))
        if not isinstance(contents, dict):
            raise ValueError("it holds no tensors by name")
        if "__quant_format__" not in contents:
            return {name: record(name, value) for name, value in contents.items()}
        return restored(contents, record)
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path} is damaged, or holds more than weights; it was not loaded, because it could run code"
        ) from None
    except Exception as error:  # whatever a damaged file makes of torch's reader
        said = " ".join(str(error).split("\n")[0].split())
        raise CheckpointError(f"{path} is not a model that golf wrote, or it is damaged: {said:.160}") from None


def restored(contents: Mapping[str, Any], record: Callable[[str, Any], TensorRecord]) -> dict[str, TensorRecord]:
    """The weights in what a quantised file holds; ValueError says what does not fit together."""
    if contents["__quant_format__"] != FORMAT:
        raise ValueError(f"its format is {contents['__quant_format__']!r:.40} and not {FORMAT}")
    stored = {name: record(name, value) for name, value in {**contents["quantized"], **contents["passthrough"]}.items()}
    if contents["scales"].keys() != contents["quantized"].keys():
        raise ValueError("its codes and its scales have different names")
    stored |= {name + SCALE: record(name + SCALE, value) for name, value in contents["scales"].items()}
    formats = {**contents["dtypes"], **contents.get("passthrough_orig_dtypes", {})}
    return dequantise(stored, {name: NAMES[dtype] for name, dtype in formats.items()})


def unpacked(data: bytes) -> bytes:
    """What zlib made smaller; ValueError where it is damaged."""
    unpacker = zlib.decompressobj()
    try:
        found = unpacker.decompress(data, min(LARGEST, FREE + RATIO * len(data)))
    except zlib.error as error:
        raise ValueError(f"zlib: {error}") from None
    if not unpacker.eof:
        raise ValueError("it is cut short")
    return found


def _saved(contents: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(contents, buffer)
    return buffer.getvalue()
