"""The model files of golf's scripts: torch files of train_gpt.py, .npz files of train_gpt_mlx.py, and quantised versions of both.

The challenge's own scripts read these files too, so names, types and dtypes are fixed. Torch files and pickles can contain code,
which never runs: only weights are loaded. The challenge's MLX script rotates queries and keys in the opposite direction from its
CUDA script and Ingot. In MLX files, the two halves of each head's rows in c_q and c_k are therefore swapped (lossless).
"""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ingot.artifact.quantise import dequantise, quantise
from ingot.backends.torch.state import check_held, record, tensor
from ingot.compat.golf.variables import VARIABLES
from ingot.data.tokenizers import Tokenizer, open_tokenizer
from ingot.errors import CheckpointError, ConfigError, DataError
from ingot.runtime.files import open_to_read, readable
from ingot.runtime.tensors import FLOATS, SCALE, TensorRecord, to_array

FORMAT = "int8_clean_per_row_v1"
ARRAY_DTYPES = {"<f4": "F32", "<f2": "F16", "|i1": "I8", "|V2": "BF16"}  # numpy has no bfloat16: MLX stores its bits as |V2
PICKLE_PROTOCOL = 5  # as in golf's script; the first protocol that stores array bytes directly
EMBEDDING = "tok_emb.weight"
SWAPPED = (".attn.c_q.weight", ".attn.c_k.weight")
ZIP = b"PK"  # first bytes of a torch file or an .npz; quantised files are zlib streams instead
ZLIB = (b"x\x01", b"x\x5e", b"x\x9c", b"x\xda")  # the first bytes of a zlib stream, by compression level
MAX_UNPACKED_BYTES = 1 << 32
FREE_BYTES, MAX_RATIO = 1 << 26, 100  # a file may unpack to 64 MiB plus 100 times its size: more is a zip bomb


def torch_bytes(contents: Any) -> bytes:
    """Serialise an object with torch.save."""
    buffer = io.BytesIO()
    torch.save(contents, buffer)
    return buffer.getvalue()


def state_dict(records: Iterable[TensorRecord]) -> bytes:
    """Serialise records as a state dict with torch.save."""
    return torch_bytes({record.name: tensor(record) for record in records})


def npz(records: Iterable[TensorRecord]) -> bytes:
    """Serialise records as a deterministic .npz file in the row order of the MLX script; bfloat16 becomes float32."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        for item in swap_halves(records):
            member = io.BytesIO()
            np.lib.format.write_array(member, to_array(item), version=(1, 0), allow_pickle=False)
            file.writestr(zipfile.ZipInfo(f"{item.name}.npy"), member.getvalue())
    return buffer.getvalue()


def quantised(
    records: Iterable[TensorRecord], quantiser: str, control: Sequence[str], keep: Sequence[str], mlx: bool = False
) -> tuple[bytes, int]:
    """Return the quantised file before compression (a torch file or, with `mlx`, a pickle) and the size of its tensors in bytes.

    Tensors whose names match `control` are never quantised; unquantised tensors whose names match `keep` stay float32.
    """
    convert: Callable[[TensorRecord], Any] = to_array if mlx else tensor
    contents: dict[str, Any] = {"__quant_format__": FORMAT, "quantized": {}, "scales": {}, "dtypes": {}, "passthrough": {}}
    meta: dict[str, Any] = {}
    original_dtypes: dict[str, str] = {}
    payload = 0
    for item in swap_halves(records) if mlx else records:
        is_control = any(part in item.name for part in control)
        control_dtype = "fp32" if any(part in item.name for part in keep) else "fp16"
        stored, converted = quantise([item], *(("none", control_dtype) if is_control else (quantiser, "fp32")), keep)
        payload += sum(len(part.data) for part in stored)
        codes, *scales = (convert(part) for part in stored)
        if not scales:
            contents["passthrough"][item.name] = codes
            if converted:
                original_dtypes[item.name] = FLOATS[item.dtype]
            continue
        contents["quantized"][item.name], contents["scales"][item.name] = codes, scales[0]
        contents["dtypes"][item.name] = FLOATS[item.dtype]
        if scales[0].ndim:
            meta[item.name] = {"scheme": "per_row", "axis": 0}
    contents |= {key: value for key, value in (("qmeta", meta), ("passthrough_orig_dtypes", original_dtypes)) if value}
    return (pickle.dumps(contents, PICKLE_PROTOCOL) if mlx else torch_bytes(contents)), payload


def swap_halves(records: Iterable[TensorRecord]) -> list[TensorRecord]:
    """Swap the two halves of each head's rows in the query and key weights (c_q, c_k); a second swap restores the weights."""
    weights = {item.name: item for item in records}
    size = weights[EMBEDDING].shape[1] // weights["blocks.0.attn.q_gain"].shape[0]  # channels per head
    for name, item in weights.items():
        if name.endswith(SWAPPED) and item.shape[0] % size == 0:
            halves = np.frombuffer(item.data, np.uint8).reshape(item.shape[0] // size, 2, -1)
            swapped = np.ascontiguousarray(halves[:, ::-1]).reshape(-1).data
            weights[name] = TensorRecord(name, item.dtype, item.shape, swapped)
    return list(weights.values())


# Functions that read golf's model files.


def read_file(path: Path) -> bytes:
    """Return the content of a file; raise CheckpointError if it cannot be read."""
    with readable(path, CheckpointError), open_to_read(path) as file:
        return file.read()


def read_weights(content: bytes, where: str) -> dict[str, TensorRecord]:
    """Parse any of golf's model files; return the weights in their original dtypes and in Ingot's row order."""
    try:
        if not content.startswith(ZIP):
            unpacker = zlib.decompressobj()
            content = unpacker.decompress(content, min(MAX_UNPACKED_BYTES, FREE_BYTES + MAX_RATIO * len(content)))
            if not unpacker.eof:
                raise ValueError("it is cut short")
        if not content.startswith(ZIP):  # quantised by the MLX script: a pickle, not a zip file
            return {item.name: item for item in swap_halves(_restored(_Unpickler(io.BytesIO(content)).load(), _record).values())}
        with zipfile.ZipFile(io.BytesIO(content)) as file:
            if sum(member.file_size for member in file.infolist()) > MAX_UNPACKED_BYTES:
                raise ValueError("it decompresses to more bytes than a golf model can have")
            if any(name.endswith(".npy") for name in file.namelist()):
                members = {name.removesuffix(".npy"): io.BytesIO(file.read(name)) for name in file.namelist()}
                arrays = (_record(name, np.lib.format.read_array(data, allow_pickle=False)) for name, data in members.items())
                return {item.name: item for item in swap_halves(arrays)}
        contents = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        check_held(contents, len(content))
        if isinstance(contents, dict) and "__quant_format__" not in contents:
            return {name: record(name, value) for name, value in contents.items()}
        return _restored(contents, record)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{where} is damaged, or holds more than weights; it was not loaded, because it could run code: {error!s:.100}"
        ) from None
    except Exception as error:  # damaged files raise many kinds of errors in zipfile, torch and numpy
        reason = " ".join(str(error).split("\n")[0].split()) or type(error).__name__
        raise CheckpointError(f"{where} is not a model that golf wrote, or it is damaged: {reason:.160}") from None


def _restored(contents: Any, record: Callable[[str, Any], TensorRecord]) -> dict[str, TensorRecord]:
    if not isinstance(contents, dict):
        raise ValueError("it is not a dict of weights")
    if contents["__quant_format__"] != FORMAT:
        raise ValueError(f"its format is {contents['__quant_format__']!r:.40}, not {FORMAT}")
    stored = {name: record(name, value) for name, value in {**contents["quantized"], **contents["passthrough"]}.items()}
    if contents["scales"].keys() != contents["quantized"].keys():
        raise ValueError("its quantised tensors and their scales have different names")
    stored |= {name + SCALE: record(name + SCALE, value) for name, value in contents["scales"].items()}
    dtypes = {**contents["dtypes"], **contents.get("passthrough_orig_dtypes", {})}
    names = {name: dtype for dtype, name in FLOATS.items()}
    return dequantise(stored, {name: names[dtype] for name, dtype in dtypes.items()})


def _record(name: str, value: Any) -> TensorRecord:
    if not isinstance(value, np.ndarray) or value.dtype.str not in ARRAY_DTYPES:
        raise ValueError(f"{name!r:.100} is not an array of weights")
    raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return TensorRecord(name, ARRAY_DTYPES[value.dtype.str], value.shape, raw.data)


class _Dtype:
    """Stand-in for numpy.dtype during unpickling; numpy pickles a dtype by its name."""

    __slots__ = ("name",)

    def __init__(self, name: str, *_: Any):
        self.name = name

    def __setstate__(self, state: Any) -> None:
        if state[1] not in ("<", "|"):
            raise pickle.UnpicklingError("its numbers are not little-endian")


def _from_buffer(buffer: Any, dtype: Any, shape: Any, order: Any) -> NDArray[Any]:
    if not isinstance(buffer, bytes | bytearray) or not isinstance(dtype, _Dtype) or dtype.name not in ("f4", "f2", "i1"):
        raise pickle.UnpicklingError("it holds an array that is not of float32, float16 or int8")
    return np.frombuffer(buffer, f"<{dtype.name}").reshape(shape, order=order)


ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,  # the module's name in numpy 1
    ("numpy", "dtype"): _Dtype,
}


class _Unpickler(pickle.Unpickler):
    """An unpickler that accepts only dicts, numbers, strings and arrays."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return partial(ALLOWED[module, name])  # a new partial each time: a pickle can change the objects that it gets


# Functions for `ingot import`. The model's shape is read from the tensors; the other settings are golf's defaults.


def is_golf(path: Path) -> bool:
    """Return True for a golf model file: a zlib stream, or a zip file that contains golf's embedding tensor."""
    try:
        if not zipfile.is_zipfile(path):
            with open_to_read(path) as file:
                return file.read(2) in ZLIB
        with zipfile.ZipFile(path) as archive:
            parts = {part.filename: part for part in archive.infolist() if part.compress_type == zipfile.ZIP_STORED}
            pickles = [archive.read(part) for name, part in parts.items() if name.endswith("/data.pkl")]  # torch files have one
            return f"{EMBEDDING}.npy" in parts or any(EMBEDDING.encode() in content for content in pickles)
    except Exception:  # damaged files raise many kinds of errors in zipfile; the reader reports them
        return False


def import_golf(
    path: Path, tokenizer: str | None, say: Callable[[str], None]
) -> tuple[list[TensorRecord], dict[str, Any], Tokenizer, dict[str, Any]]:
    """Read a golf model file; return its weights and model settings, the opened tokenizer and golf's evaluation settings."""
    from ingot.inference.model import foreign_weights, open_model

    if tokenizer is None:
        raise ConfigError(f"{path} does not contain a tokenizer; set --tokenizer to the .model file that the run used")
    weights = read_weights(read_file(path), str(path))
    settings, records, opened = model_settings(weights, path), list(weights.values()), open_tokenizer(tokenizer)
    if opened.vocab_size != settings["vocab_size"]:
        raise DataError(f"{tokenizer} has {opened.vocab_size:,} ids, but the model in {path} has {settings['vocab_size']:,}")
    try:
        open_model(foreign_weights(path, records, settings, opened), opened, "cpu")
    except ConfigError as error:
        raise CheckpointError(f"{path} does not contain golf's baseline model: {error}") from None
    length = settings["context"]
    say(f"{path} does not record its context, rope base and softcap; using golf's defaults: {length:,}, 10,000 and 30")
    return records, settings, opened, {"seq_len": length, "bytes": "pieces", "whole_rows": True}


def model_settings(weights: Mapping[str, TensorRecord], path: Path) -> dict[str, Any]:
    """Infer the model settings from the weights; the context is golf's default."""
    try:
        vocab_size, width = weights[EMBEDDING].shape
        (heads,) = weights["blocks.0.attn.q_gain"].shape
        return {
            "family": "golf",
            "vocab_size": vocab_size,
            "context": VARIABLES["TRAIN_SEQ_LEN"].default,
            "layers": len({name.split(".")[1] for name in weights if name.startswith("blocks.")}),
            "heads": heads,
            "width": width,
            "kv_heads": weights["blocks.0.attn.c_k.weight"].shape[0] // (width // heads),
            "mlp_multiple": weights["blocks.0.mlp.fc.weight"].shape[0] // width,
            "tied": "lm_head.weight" not in weights,
        }
    except (KeyError, IndexError, ValueError, ZeroDivisionError):
        raise CheckpointError(f"{path} does not contain golf's baseline model, the only one that can be imported") from None
