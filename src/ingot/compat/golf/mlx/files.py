"""The two files of train_gpt_mlx.py: RUN_ID_mlx_model.npz, arrays by name, and RUN_ID_mlx_model.int8.ptz, a pickle in zlib.

The original's MLX script turns rotary positions the other way than its CUDA script, and our weights are turned as CUDA does. In
these files they are the MLX script's: the halves of every head's rows in c_q and c_k are swapped, which is exact. A pickle may
run code; here it is given three names that make arrays, and can do nothing else.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.compat.golf.export import QUANTISERS, ROUND_TRIP, keep_copies, score_lines, tell_early_stop
from ingot.compat.golf.files import LARGEST, packed, read_file, restored, unpacked, write_packed
from ingot.compat.golf.log import RunLog
from ingot.errors import CheckpointError
from ingot.runtime.files import write_atomically, writing
from ingot.runtime.machine import made_by
from ingot.runtime.tensors import TensorRecord, to_array
from ingot.train.end import Exported
from ingot.train.stop import Shutdown
from ingot.train.trainer import Trainer

STATE, PACKED = "_mlx_model.npz", "_mlx_model.int8.ptz"
TURNED = (".attn.c_q.weight", ".attn.c_k.weight")
RECORDED = {"<f4": "F32", "<f2": "F16", "|i1": "I8", "|V2": "BF16"}  # numpy has no bfloat16: MLX writes its bits as two bytes
PROTOCOL = 5  # of the original's pickle, the first that holds the bytes of an array as they are


class MLXExporter:
    """Writes and scores the two files."""

    over = 0  # there is no limit

    def __init__(self, values: Mapping[str, Any], run_log: RunLog, data: Mapping[str, Any]):
        self._v, self._run_log, self._data = values, run_log, data

    def __call__(self, trainer: Trainer, shutdown: Shutdown) -> Exported:
        v, line, start = self._v, self._run_log.line, str(Path(self._v["OUT_DIR"]) / self._v["RUN_ID"])
        state, small = Path(start + STATE), Path(start + PACKED)
        tell_early_stop(trainer, self._run_log, v["ITERATIONS"])
        self._run_log.note(f"peak memory {trainer.backend.peak_memory()[0] >> 20} MiB")
        weights = turned(trainer.backend.weights(), head_size(v))
        line(f"saved_model:{state} bytes:{write_npz(state, weights)}")
        control, keep = v["CONTROL_TENSOR_NAME_PATTERNS"], v["INT8_KEEP_FLOAT_FP32_NAME_PATTERNS"]
        report = write_packed(small, weights, QUANTISERS[v["INT8_RULE"]], control, keep, pickled)
        ratio = report.tensors / max(report.payload, 1)
        line(
            f"serialized_model_int8_zlib:{report.bytes} bytes "
            f"(payload:{report.payload} raw_pickle:{report.raw} payload_ratio:{ratio:.2f}x)"
        )
        content = read_file(small)
        keep_copies(trainer, {f"artifact/{small.name}": content})
        trainer.backend.load_weights(read_mlx(content, str(small), head_size(v)), str(small))
        score = score_lines(trainer, self._run_log)
        facts = {"made_by": made_by(), "val_loss": score.loss, **self._data}
        return Exported(small, len(content), score.bits_per_byte, facts=facts)


def head_size(values: Mapping[str, Any]) -> int:
    """Rows of a head in c_q and c_k."""
    return int(values["MODEL_DIM"] // values["NUM_HEADS"])


def turned(records: Iterable[TensorRecord], size: int) -> list[TensorRecord]:
    """The weights with the halves of every head's `size` rows in c_q and c_k swapped; a second time gives them back."""
    return [_swapped(one, size) if one.name.endswith(TURNED) else one for one in records]


def _swapped(one: TensorRecord, size: int) -> TensorRecord:
    if not one.data.nbytes or one.shape[0] % size:
        return one  # it does not fit the model, which says so
    halves = np.frombuffer(one.data, np.uint8).reshape(one.shape[0] // size, 2, -1)
    return TensorRecord(one.name, one.dtype, one.shape, np.ascontiguousarray(halves[:, ::-1]).reshape(-1).data)


def write_npz(path: Path, records: Iterable[TensorRecord]) -> int:
    """Write the arrays, bfloat16 ones as float32, and return the size of the file; the same bytes for the same numbers."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        for one in records:
            member = io.BytesIO()
            np.lib.format.write_array(member, to_array(one), version=(1, 0), allow_pickle=False)
            file.writestr(zipfile.ZipInfo(f"{one.name}.npy"), member.getvalue())
    with writing(path):
        write_atomically(path, buffer.getvalue())
    return buffer.tell()


def pickled(records: Iterable[TensorRecord], quantiser: str, control: Sequence[str], keep: Sequence[str]) -> tuple[bytes, int]:
    """The pickle of the quantised arrays, and the bytes of the arrays in it."""
    contents, payload = packed(records, quantiser, control, keep, to_array)
    return pickle.dumps(contents, PROTOCOL), payload


def is_npz(content: bytes) -> bool:
    """Whether this is the npz rather than the quantised file."""
    return content[:2] == b"PK"


def score_name(content: bytes) -> str:
    """What the score of a file is called in the log."""
    return "mlx_model" if is_npz(content) else ROUND_TRIP


def read_mlx(content: bytes, where: str, size: int | None = None) -> dict[str, TensorRecord]:
    """The weights in either file, turned as ours are; `where` names it in errors, and without a `size` of heads they tell it."""
    try:
        content = content if is_npz(content) else unpacked(content)
        _refuse_torch(content, where)
        found = _arrays(content) if is_npz(content) else restored(_unpickled(content), _record)
        size = size or found["tok_emb.weight"].shape[1] // found["blocks.0.attn.q_gain"].shape[0]
        return {one.name: one for one in turned(found.values(), size)}
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{where} is damaged, or holds more than weights; it was not loaded, because it could run code: {error!s:.100}"
        ) from None
    except Exception as error:  # whatever a damaged file makes of zipfile and numpy
        said = " ".join(str(error).split("\n")[0].split()) or type(error).__name__
        raise CheckpointError(f"{where} is not a model that train_gpt_mlx.py wrote, or it is damaged: {said:.160}") from None


def _refuse_torch(content: bytes, where: str) -> None:
    if is_npz(content) and any(name.endswith("/data.pkl") for name in zipfile.ZipFile(io.BytesIO(content)).namelist()):
        raise CheckpointError(
            f"{where} is a file of train_gpt.py, which scores it; train_gpt_mlx.py reads its own _mlx_model.npz and "
            "_mlx_model.int8.ptz"
        )


def _arrays(content: bytes) -> dict[str, TensorRecord]:
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        if sum(member.file_size for member in file.infolist()) > LARGEST:
            raise ValueError("it unpacks to more than a model of this kind has")
        named = {member.filename.removesuffix(".npy"): file.read(member) for member in file.infolist()}
    return {name: _record(name, np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)) for name, data in named.items()}


def _record(name: str, value: Any) -> TensorRecord:
    if not isinstance(value, np.ndarray) or value.dtype.str not in RECORDED:
        raise ValueError(f"{name!r:.100} is not an array of weights")
    raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return TensorRecord(name, RECORDED[value.dtype.str], value.shape, raw.data)


class _Callable:
    """Stands for a function of numpy's: a pickle can call it, and can neither look into it nor change it."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]):
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it changes a function")


class _Dtype:
    """A number format by its name, as numpy pickles one."""

    __slots__ = ("name",)

    def __init__(self, name: str, *_: Any):
        self.name = name

    def __setstate__(self, state: Any) -> None:
        if state[1] not in ("<", "|"):
            raise pickle.UnpicklingError("its numbers are not little-endian")


def _from_buffer(buffer: Any, dtype: Any, shape: Any, order: Any) -> NDArray[Any]:
    if not isinstance(buffer, bytes | bytearray) or not isinstance(dtype, _Dtype) or dtype.name not in ("f4", "f2", "i1"):
        raise pickle.UnpicklingError("it holds an array that is not of weights")
    return np.frombuffer(buffer, f"<{dtype.name}").reshape(shape, order=order)


NAMES = {
    ("numpy._core.numeric", "_frombuffer"): _Callable(_from_buffer),
    ("numpy.core.numeric", "_frombuffer"): _Callable(_from_buffer),  # by numpy 1
    ("numpy", "dtype"): _Callable(_Dtype),
}


class _Arrays(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in NAMES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return NAMES[module, name]


def _unpickled(data: bytes) -> Mapping[str, Any]:
    found = _Arrays(io.BytesIO(data)).load()
    if not isinstance(found, dict):
        raise ValueError("it holds no arrays by name")
    return found
