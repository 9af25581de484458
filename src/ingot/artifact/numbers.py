"""Between records of raw bytes and numpy arrays. numpy has no bfloat16: those are the upper halves of float32 numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.runtime.tensors import TensorRecord

DTYPES: dict[str, type[np.generic]] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")


def to_array(record: TensorRecord) -> NDArray[Any]:
    """The numbers of a record; bfloat16 ones as float32, which holds each of them exactly."""
    stored = np.uint16 if record.dtype == "BF16" else DTYPES[record.dtype]
    array = np.frombuffer(record.data, stored) if record.data.nbytes else np.empty(0, stored)
    if record.dtype == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.reshape(record.shape)


def to_record(name: str, array: NDArray[Any], dtype: str) -> TensorRecord:
    """A record of an array in another number format, rounded to the nearest number there, ties to even."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        stored: NDArray[Any] = np.where(np.isnan(array), 0x7FC0, nearest).astype(np.uint16)
    else:
        with np.errstate(over="ignore"):  # whoever must not have an infinity looks for it
            stored = np.ascontiguousarray(array, DTYPES[dtype])
    return TensorRecord(name, dtype, array.shape, stored.reshape(-1).view(np.uint8).data)
