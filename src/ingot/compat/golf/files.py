"""The end of a golf run and its two files: final_model.pt, a torch state dict, and final_model.int8.ptz, its int8 twin in zlib.

Both are read by the challenge's own scripts, so names, types and dtypes in them are fixed. They are torch files, which may hold
code; they are read as weights only, and code in them is never run.
"""

from __future__ import annotations

import base64
import io
import math
import pickle
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ingot.artifact.quantise import dequantise, quantise
from ingot.backends.torch.state import check_held, record, tensor
from ingot.compat.golf.bundle import bundle
from ingot.compat.golf.log import RunLog, custom_model_source, timing
from ingot.compat.golf.variables import CARRIED, CODE, PACKED, STATE, as_text, differing
from ingot.errors import CheckpointError, RunError
from ingot.eval.evaluator import Score
from ingot.model.settings import CONTROL
from ingot.runtime.files import open_to_read, write_atomically, writing
from ingot.runtime.machine import made_by
from ingot.runtime.tensors import SCALE, TensorRecord
from ingot.train.end import Exported
from ingot.train.stop import Shutdown
from ingot.train.trainer import Trainer

FORMAT = "int8_clean_per_row_v1"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
QUANTISERS = {"golf": "int8-golf", "exact": "int8"}
ROUND_TRIP = "final_int8_zlib_roundtrip"  # what the log calls the score of the quantised file
MAX_UNPACKED_BYTES = 1 << 32
FREE_BYTES, MAX_RATIO = 1 << 26, 100  # weights that zlib makes a hundred times smaller hold nothing

Encode = Callable[[Iterable[TensorRecord], str, Sequence[str], Sequence[str]], tuple[bytes, int]]


class GolfExporter:
    """Writes and scores the files of a run; `over` says afterwards by how many bytes they exceed the limit."""

    def __init__(self, values: Mapping[str, Any], run_log: RunLog, data: Mapping[str, Any]):
        self._v, self._run_log, self._data, self.over = values, run_log, data, 0
        carried = {"MODEL_FILE": CARRIED} if values["MODEL_FILE"] else {}
        model = custom_model_source(values["MODEL_FILE"]) if carried else None
        # Before training, so that the code is what the run began with.
        self._code = bundle(differing(values) | carried, model) if run_log.writes else b""

    def __call__(self, trainer: Trainer, shutdown: Shutdown) -> Exported:
        """Write the files on the first rank; score them on all ranks."""
        early_stop_line(trainer, self._run_log, self._v["ITERATIONS"])
        allocated, reserved = (size >> 20 for size in trainer.backend.peak_memory())
        self._run_log.line(f"peak memory allocated: {allocated} MiB reserved: {reserved} MiB")
        weights, content = trainer.backend.weights(), b""
        if trainer.outputs is not None:
            self._write(trainer, weights)
            content = read_file(PACKED)
        # Other ranks may be on machines that do not see the file.
        content = base64.b64decode(trainer.backend.broadcast(base64.b64encode(content).decode()))
        trainer.backend.load_weights(read_golf(content, PACKED), str(PACKED))
        score = score_lines(trainer, self._run_log)
        facts = {
            "made_by": made_by(),
            "variables": {name: as_text(value) for name, value in self._v.items() if value is not None},
            "val_loss": score.loss,
            "code_bytes": len(self._code),
            "parameters": trainer.backend.parameters,
            "ranks": trainer.backend.ranks.world_size,
            "device": trainer.backend.device.name,
            **self._data,
        }
        return Exported(PACKED, len(content), score.bits_per_byte, facts=facts)

    def _write(self, trainer: Trainer, weights: list[TensorRecord]) -> None:
        v, line, code = self._v, self._run_log.line, len(self._code)
        control, keep = v["CONTROL_TENSOR_NAME_PATTERNS"], v["INT8_KEEP_FLOAT_FP32_NAME_PATTERNS"]
        state = write_state(STATE, weights)
        line(f"Serialized model: {state} bytes")
        line(f"Code size: {code} bytes")
        line(f"Total submission size: {state + code} bytes")
        report = write_packed(PACKED, weights, QUANTISERS[v["INT8_RULE"]], control, keep)
        line(
            f"Serialized model int8+zlib: {report.bytes} bytes "
            f"(payload:{report.payload} raw_torch:{report.raw} payload_ratio:{report.ratio:.2f}x)"
        )
        keep_copies(trainer, {f"artifact/{PACKED}": PACKED.read_bytes(), CODE: self._code})
        total, limit = report.bytes + code, v["ARTIFACT_LIMIT_BYTES"]
        line(f"Total submission size int8+zlib: {total} bytes")
        if 0 < limit < total:
            self.over = total - limit
            each = report.bytes / trainer.backend.parameters
            fits = f"at {each:.3f} bytes per parameter, about {int((limit - code) / each):,} parameters would fit"
            fits = fits if limit > code else "the code alone is larger"
            line(f"error: {total} bytes are {self.over} more than ARTIFACT_LIMIT_BYTES={limit}; {fits}")


def early_stop_line(trainer: Trainer, run_log: RunLog, iterations: int) -> None:
    """Log that the clock ended the run, if it did."""
    p = trainer.progress
    if p.step < iterations:
        milliseconds = timing(p.elapsed_seconds, p.step).split()[0]
        run_log.line(f"stopping_early: wallclock_cap {milliseconds} step:{p.step}/{iterations}")


def keep_copies(trainer: Trainer, files: Mapping[str, bytes]) -> None:
    """Copy the files of a run into its folder, because the next run overwrites them."""
    assert trainer.outputs is not None
    for name, content in files.items():
        path = trainer.outputs.folder.path / name
        with writing(path):
            write_atomically(path, content)


def score_lines(trainer: Trainer, run_log: RunLog, name: str = ROUND_TRIP) -> Score:
    """Score the weights of the model and log the score, rounded and exact."""
    began = time.perf_counter()
    score = trainer.evaluation.score("val", None)
    milliseconds = 1000 * (time.perf_counter() - began)
    run_log.line(f"{name} val_loss:{score.loss:.4f} val_bpb:{score.bits_per_byte:.4f} eval_time:{milliseconds:.0f}ms")
    run_log.line(f"{name}_exact val_loss:{score.loss:.8f} val_bpb:{score.bits_per_byte:.8f}")
    if not math.isfinite(score.loss):
        raise RunError(f"the loss is {score.loss}: the weights are not finite, so this is not a score")
    return score


@dataclass(frozen=True)
class PackedReport:
    """Sizes of a quantised file in bytes: on disk, its tensors, before zlib, and the tensors before quantisation."""

    bytes: int
    payload: int
    raw: int
    tensors: int

    @property
    def ratio(self) -> float:
        """How much smaller quantisation makes the tensors."""
        return self.tensors / max(self.payload, 1)


def write_state(path: Path, records: Iterable[TensorRecord]) -> int:
    """Write a state dict and return the size of the file."""
    data = _torch_bytes({one.name: tensor(one) for one in records})
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
    """Write the quantised file, whose content before zlib `encode` makes.

    Names that contain a part in `control` are never quantised, those with one in `keep` stay float32.
    """
    data, payload = (encode or pack)(records, quantiser, control, keep)
    content = zlib.compress(data, 9)
    with writing(path):
        write_atomically(path, content)
    return PackedReport(len(content), payload, len(data), sum(len(one.data) for one in records))


def pack(records: Iterable[TensorRecord], quantiser: str, control: Sequence[str], keep: Sequence[str]) -> tuple[bytes, int]:
    """Return the torch file of the quantised tensors, and the bytes of the tensors in it."""
    contents, payload = quantised_contents(records, quantiser, control, keep, tensor)
    return _torch_bytes(contents), payload


def quantised_contents(
    records: Iterable[TensorRecord],
    quantiser: str,
    control: Sequence[str],
    keep: Sequence[str],
    convert: Callable[[TensorRecord], Any],
) -> tuple[dict[str, Any], int]:
    """Return the dict that a quantised file holds, its tensors made by `convert`, and their bytes."""
    contents: dict[str, Any] = {"__quant_format__": FORMAT, "quantized": {}, "scales": {}, "dtypes": {}, "passthrough": {}}
    meta: dict[str, Any] = {}
    original_dtypes: dict[str, str] = {}
    payload = 0
    for one in records:
        is_control = any(part in one.name for part in control)
        control_dtype = "fp32" if any(part in one.name for part in keep) else "fp16"
        stored, converted = quantise([one], *(("none", control_dtype) if is_control else (quantiser, "fp32")), keep)
        payload += sum(len(part.data) for part in stored)
        codes, *scales = (convert(part) for part in stored)
        if not scales:
            contents["passthrough"][one.name] = codes
            if converted:
                original_dtypes[one.name] = DTYPES[one.dtype]
            continue
        contents["quantized"][one.name], contents["scales"][one.name] = codes, scales[0]
        contents["dtypes"][one.name] = DTYPES[one.dtype]
        if scales[0].ndim:
            meta[one.name] = {"scheme": "per_row", "axis": 0}
    contents |= {key: value for key, value in (("qmeta", meta), ("passthrough_orig_dtypes", original_dtypes)) if value}
    return contents, payload


def read_file(path: Path) -> bytes:
    """Return the content of a file that a user names."""
    try:
        with open_to_read(path) as file:
            return file.read()
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {path}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None


def is_zip(data: bytes) -> bool:
    """Return True for final_model.pt or an .npz, False for the quantised file."""
    return data[:2] == b"PK"


def read_golf(data: bytes, path: Path) -> dict[str, TensorRecord]:
    """Return the weights in either file, in their original dtypes."""
    try:
        data = data if is_zip(data) else unpacked(data)
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
        reason = " ".join(str(error).split("\n")[0].split())
        raise CheckpointError(f"{path} is not a model that golf wrote, or it is damaged: {reason:.160}") from None


def restored(contents: Mapping[str, Any], record: Callable[[str, Any], TensorRecord]) -> dict[str, TensorRecord]:
    """Return the weights of a quantised file's dict; ValueError if its parts do not fit together."""
    if contents["__quant_format__"] != FORMAT:
        raise ValueError(f"its format is {contents['__quant_format__']!r:.40} and not {FORMAT}")
    stored = {name: record(name, value) for name, value in {**contents["quantized"], **contents["passthrough"]}.items()}
    if contents["scales"].keys() != contents["quantized"].keys():
        raise ValueError("its codes and its scales have different names")
    stored |= {name + SCALE: record(name + SCALE, value) for name, value in contents["scales"].items()}
    dtypes = {**contents["dtypes"], **contents.get("passthrough_orig_dtypes", {})}
    names = {name: dtype for dtype, name in DTYPES.items()}
    return dequantise(stored, {name: names[dtype] for name, dtype in dtypes.items()})


def unpacked(data: bytes) -> bytes:
    """Return the decompressed content; ValueError if it is damaged."""
    unpacker = zlib.decompressobj()
    try:
        content = unpacker.decompress(data, min(MAX_UNPACKED_BYTES, FREE_BYTES + MAX_RATIO * len(data)))
    except zlib.error as error:
        raise ValueError(f"zlib: {error}") from None
    if not unpacker.eof:
        raise ValueError("it is cut short")
    return content


def _torch_bytes(contents: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(contents, buffer)
    return buffer.getvalue()
