"""Quantise weights to one-byte codes with a scale per row.

A quantised tensor `w` is stored as `w` (I8 codes) and `w::scale` (one scale per row, or one for the whole tensor); a value is
its code times the scale. `int8-golf` reproduces the golf challenge's rule bit for bit, because golf submissions are scored with
it. `int8` is the recommended rule; docs/artifact.md lists the file size and the bits per byte of each rule. Codes with fewer bits
(`std`, `gptq`) are computed by the backend, which can run the model; this module only stores them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.errors import CheckpointError, ConfigError
from ingot.model.settings import CONTROL
from ingot.runtime.tensors import FLOATS, ITEM_BYTES, SCALE, SMALL, TensorRecord, to_array, to_record

QUANTISERS = ("none", "int8", "int8-golf", "std", "gptq")
BY_MODEL = ("std", "gptq")  # quantisers that need the loaded model; tensors that they skip are quantised with int8
FORMATS = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
STAY_FLOATS = {"int8": SMALL, "int8-golf": 65536}  # tensors with at most this many elements are stored as floats
LARGEST = np.float32(127)  # codes range from -127 to 127
GOLF_QUANTILE = 99.99984 / 100  # magnitudes above this quantile of a row are clipped
QUANTILE_LIMIT = 1 << 24  # float32 cannot represent every integer above this, and torch.quantile rejects larger inputs
BLOCK = 1 << 22  # elements processed at once

Float32 = NDArray[np.float32]


def quantise(
    records: Iterable[TensorRecord],
    quantiser: str,
    dtype: str = "fp32",
    keep: Sequence[str] = CONTROL,
    codes: Mapping[str, list[TensorRecord]] = MappingProxyType({}),
) -> tuple[list[TensorRecord], dict[str, str]]:
    """Return the tensors to store, and the original dtypes of those whose stored dtype differs.

    `dtype` applies only to the quantiser `none`. All other quantisers store small tensors as float32 if their name contains a
    word in `keep`, else as float16 where possible. Tensors in `codes` are stored with the codes and scales given there.
    """
    if quantiser not in QUANTISERS:
        raise ConfigError(f"unknown quantiser {quantiser!r}; choose one of {', '.join(QUANTISERS)}")
    if dtype not in FORMATS:
        raise ConfigError(f"unknown dtype {dtype!r}; choose one of {', '.join(FORMATS)}")
    stored: list[TensorRecord] = []
    formats: dict[str, str] = {}
    for record in records:
        if record.name.endswith(SCALE):
            raise CheckpointError(f"{record.name} cannot be stored: names that end in {SCALE} are reserved for scales; rename it")
        if record.dtype not in FLOATS:
            parts = [record]
        elif record.name in codes:
            parts = codes[record.name]
        elif quantiser == "none":
            w, narrow = _numbers(record), FORMATS[dtype]
            parts = [record]
            if ITEM_BYTES[record.dtype] > ITEM_BYTES[narrow]:
                parts = [to_record(record.name, w, narrow)]
                if _overflows(w, parts[0]):
                    raise CheckpointError(f"{record.name} contains values outside {dtype}'s range; choose a wider dtype")
        else:
            parts = _quantised(record, "int8" if quantiser in BY_MODEL else quantiser, keep)
        stored += parts
        if parts[0].dtype != record.dtype:
            formats[record.name] = record.dtype
    return stored, formats


def dequantise(stored: Mapping[str, TensorRecord], formats: Mapping[str, str]) -> dict[str, TensorRecord]:
    """Restore the tensors in their original dtypes; raise ValueError if codes, scales and dtypes are inconsistent."""
    tensors = {name: record for name, record in stored.items() if not name.endswith(SCALE)}
    for name in stored.keys() - tensors.keys():
        codes, scale = tensors.get(name.removesuffix(SCALE)), stored[name]
        if codes is None or codes.dtype != "I8" or codes.name not in formats:
            raise ValueError(f"{name!r:.100} has no matching int8 codes")
        fits = scale.dtype in ("F32", "F16") and scale.shape in ((), codes.shape[:1])
        if not fits or not np.isfinite(to_array(scale)).all():
            raise ValueError(f"the scales in {name!r:.100} have the wrong dtype or shape, or are not finite")
    for name, dtype in formats.items():
        kept = tensors[name].dtype if name in tensors else None
        expected = FLOATS if name + SCALE not in stored else ("I8",)
        if not isinstance(dtype, str) or dtype not in FLOATS or kept not in expected:
            raise ValueError(f"{name!r:.100} cannot have the dtype {dtype!r:.100}")
    for name, dtype in formats.items():
        w = to_array(tensors[name])
        if name + SCALE in stored:
            s = to_array(stored[name + SCALE]).astype(np.float32)  # (R) or ()
            w = w * s.reshape(s.shape + (1,) * (w.ndim - s.ndim if s.ndim else 0))
        tensors[name] = to_record(name, w, dtype)
    return tensors


def _numbers(record: TensorRecord) -> NDArray[Any]:
    w = to_array(record)
    if np.isnan(w).any():
        raise CheckpointError(f"{record.name} contains values that are not finite; use an earlier checkpoint")
    return w


def _quantised(record: TensorRecord, quantiser: str, keep: Sequence[str]) -> list[TensorRecord]:
    w = _numbers(record)
    golf = quantiser == "int8-golf"
    if w.size <= STAY_FLOATS[quantiser] or (w.ndim < 2 and not golf):
        if any(word in record.name for word in keep):
            return [to_record(record.name, w, "F32")]
        half = to_record(record.name, w, "F16")
        return [record if record.dtype == "F64" or _overflows(w, half) else half]
    w = w.astype(np.float32)
    if np.isinf(w).any():
        raise CheckpointError(f"{record.name} contains values that are not finite, which {quantiser} cannot represent")
    codes, scale = _golf(w) if golf else _int8(w)
    scale_format = _scale_format(scale) if scale.ndim else "F32"
    return [to_record(record.name, codes, "I8"), to_record(record.name + SCALE, scale, scale_format)]


def _overflows(w: NDArray[Any], narrow: TensorRecord) -> bool:
    return bool((np.isinf(to_array(narrow)) & np.isfinite(w)).any())


def _scale_format(scale: Float32) -> str:
    """Return F16 if every scale is zero or within the range of normal float16 numbers, else F32."""
    range16 = np.finfo(np.float16)
    return "F16" if ((scale == 0) | ((scale >= range16.tiny) & (scale <= range16.max))).all() else "F32"


def _blocks(w: Float32) -> list[slice]:
    """Return slices of rows to process at once, so that temporary arrays stay small compared with the tensor."""
    rows = max(1, BLOCK // max(1, w[0].size))
    return [slice(first, first + rows) for first in range(0, len(w), rows)]


def _int8(w: Float32) -> tuple[NDArray[np.int8], Float32]:
    """Quantise each row so that its largest magnitude maps to 127; the scales are rounded to their stored dtype first.

    Nothing is clipped: a clipping threshold per row lowers the squared error by 1% but does not improve bits per byte.
    """
    rows = w.reshape(len(w), -1)  # (R, C)
    codes = np.empty(rows.shape, np.int8)
    largest = np.concatenate([np.abs(rows[part]).max(1) for part in _blocks(rows)])
    wanted = np.divide(largest, LARGEST, dtype=np.float32)  # (R)
    scale: Float32 = to_array(to_record("", wanted, _scale_format(wanted))).astype(np.float32)
    divisor = np.where(scale == 0, np.float32(1), scale)[:, None]
    for part in _blocks(rows):
        codes[part] = np.clip(np.rint(rows[part] / divisor[part]), -LARGEST, LARGEST)
    return codes.reshape(w.shape), scale


def _golf(w: Float32) -> tuple[NDArray[np.int8], Float32]:
    """Quantise by the golf challenge's rule: clip each row at a quantile of its magnitudes; the scale is at least 1/127.

    A tensor that is not a matrix has a single scale.
    """
    if w.ndim != 2:
        whole = _quantile(np.abs(w.reshape(1, -1)))[0]
        divisor = np.float32(float(whole) / 127) if whole > 0 else np.float32(1)
        return np.rint(np.clip(w, -whole, whole) / divisor).astype(np.int8), np.asarray(divisor)
    codes, scale = np.empty(w.shape, np.int8), np.empty(len(w), np.float32)
    for part in _blocks(w):
        clip = _quantile(np.abs(w[part]))[:, None]  # (R, 1)
        step = np.maximum(clip / LARGEST, 1 / LARGEST)
        codes[part] = np.rint(np.clip(w[part], -clip, clip) / step)
        scale[part] = step[:, 0]
    return codes, scale


def _quantile(a: Float32) -> Float32:
    """Compute torch.quantile(a, GOLF_QUANTILE, dim=1) in numpy, with bit-identical results."""
    real = np.float32 if a.shape[1] <= QUANTILE_LIMIT else np.float64
    rank = real(GOLF_QUANTILE) * real(a.shape[1] - 1)
    lower, upper = int(rank), int(np.ceil(rank))
    a = np.partition(a, (lower, upper), axis=1)
    low, high = a[:, lower], a[:, upper]
    weight = np.float32(rank - lower)
    part, base = (weight, low) if weight < 0.5 else (weight - np.float32(1), high)
    return (np.float64(part) * (high - low).astype(np.float64) + base).astype(np.float32)
