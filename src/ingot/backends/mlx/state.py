"""Between MLX's arrays and records of raw bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import mlx.core as mx
import numpy as np

from ingot.runtime.tensors import TensorRecord, to_array

NAMES = {mx.float32: "F32", mx.bfloat16: "BF16", mx.float16: "F16"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


def record(name: str, value: mx.array) -> TensorRecord:
    """A copy of an array on the host."""
    bits = value.view(mx.uint16) if value.dtype == mx.bfloat16 else value  # which numpy does not have
    data = np.array(bits).reshape(-1).view(np.uint8).data
    return TensorRecord(name, NAMES[value.dtype], tuple(value.shape), data)


def number(value: mx.array) -> float:
    """An array of one number, once it is computed."""
    return float(np.array(value))


def records(values: Mapping[str, mx.array]) -> list[TensorRecord]:
    """Copies of arrays, by name."""
    return [record(name, value) for name, value in values.items()]


def array(source: TensorRecord, dtype: mx.Dtype | None = None) -> mx.array:
    """A record's numbers, in its own number format or another."""
    return mx.array(to_array(source)).astype(dtype or DTYPES.get(source.dtype, mx.float32))


def by_parameter(sources: Iterable[TensorRecord]) -> dict[str, dict[str, mx.array]]:
    """The state of an optimizer, which is recorded as `parameter/key`."""
    found: dict[str, dict[str, mx.array]] = {}
    for source in sources:
        parameter, _, key = source.name.rpartition("/")
        found.setdefault(parameter, {})[key] = array(source)
    return found
