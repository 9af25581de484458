"""GPT-2 in Hugging Face's layout: a folder with config.json and model.safetensors, read and written without their library.

Two things differ from ours: the four matrices of a block are stored transposed there, and the layout always has biases.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ingot.artifact.hf_tokenizer import MERGES, OURS, THEIRS, VOCABULARY, tokenizer_files
from ingot.errors import CheckpointError, ConfigError, DataError, IngotError
from ingot.runtime.files import read_json, readable, replace_folder, write_atomically
from ingot.runtime.tensors import FLOATS, ITEM_BYTES, TensorRecord, read_tensors, write_tensors

SCORING = "ingot_scoring"  # a key of ours in their config.json, which transformers keeps and does not read
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PREFIX = "transformer."
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
BUFFERS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # old files hold the causal mask too
GELU = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "erf"}
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
MODEL_FILES = (CONFIG, WEIGHTS, INDEX, "model-*.safetensors", THEIRS, VOCABULARY, MERGES, OURS)  # that are fetched from the hub
# Settings of their config.json that would make it another model, and the values that do not.
FIXED: dict[str, tuple[object, ...]] = {
    "model_type": ("gpt2",), "layer_norm_epsilon": (1e-5,), "scale_attn_weights": (True,), "add_cross_attention": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
}  # fmt: skip


def fetch_model(name: str) -> Path:
    """The folder of a model on the hub, in the hub's own cache; fetched if it is new there."""
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise CheckpointError(f"there is no folder {name}")
    from ingot.data.hub import Hub

    try:
        return Hub(name, "model", attempts=1).snapshot(MODEL_FILES)
    except IngotError as error:
        raise DataError(f"there is no folder {name}, and it cannot be fetched from the hub: {error}") from None


def cached_model(name: str) -> Path | None:
    """The folder of a model that was fetched before, whoever did it; None where it is not there or not whole."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(MODEL_FILES), local_files_only=True))
    except Exception:  # not there, in one of the many ways the client has to say so
        return None
    return folder if all((folder / file).is_file() for file in MODEL_FILES[:2]) else None


def read_gpt2(folder: Path) -> tuple[list[TensorRecord], dict[str, Any]]:
    """The weights of a folder in our names and layout, and the settings of the section `model` that they fit."""
    if not folder.is_dir():
        what = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
        raise CheckpointError(f"{what}; give a folder with {CONFIG} and {WEIGHTS}")
    settings = _settings(folder)
    found = {name.removeprefix(PREFIX): record for name, record in _weights(folder).items()}
    head, embedding = found.pop("lm_head.weight", None), found.get("wte.weight")
    if head is not None and embedding is not None and (head.dtype, head.data) != (embedding.dtype, embedding.data):
        raise CheckpointError(f"{folder} has a head of its own, and that of the gpt2 family is its embedding; it cannot be read")
    if settings["layers"] > len(found):
        raise CheckpointError(f"{folder / CONFIG} says {settings['layers']:,} layers, and there are fewer tensors than that")
    shapes = _shapes(settings)
    records = []
    for name, shape in shapes.items():
        record = found.get(name)
        if record is None:
            raise CheckpointError(f"{folder} has no tensor {name}; it is not a GPT-2, or not all of it")
        if record.dtype not in FLOATS:
            raise CheckpointError(f"{folder}: {name} holds {record.dtype}; only floating-point weights can be read")
        if record.shape != shape:
            raise CheckpointError(f"{folder}: {name} has shape {list(record.shape)}, and {CONFIG} says {list(shape)}")
        records.append(_turned(record, PREFIX + name))
    if unknown := sorted(name for name in found.keys() - shapes.keys() if not BUFFERS.fullmatch(name)):
        raise CheckpointError(f"{folder} has a tensor {unknown[0]!r:.100} that GPT-2 does not have; it is another model")
    return records, settings


def read_scoring(folder: Path) -> dict[str, Any]:
    """How the model of a folder that we wrote was scored; nothing of another's."""
    found = _json(folder / CONFIG).get(SCORING)
    return found if isinstance(found, dict) else {}


def write_gpt2(
    folder: Path,
    records: Iterable[TensorRecord],
    settings: Mapping[str, Any],
    tokenizer: Mapping[str, Any] | None,
    scoring: Mapping[str, Any] | None = None,
) -> int:
    """Make a folder that transformers' GPT2LMHeadModel loads, with the tokenizer of a spec beside it; returns its bytes."""
    if settings["family"] != "gpt2":
        raise ConfigError(f"a model of the family {settings['family']} has no place in GPT-2's layout; export it as ingot")
    found = {record.name.removeprefix(PREFIX): record for record in records}
    if not {"wte.weight", "wpe.weight"} <= found.keys():
        raise CheckpointError("the model has no embeddings; it is not a whole GPT-2")
    embedding, positions = found["wte.weight"], found["wpe.weight"]
    shapes = _shapes({**settings, "vocab_size": embedding.shape[0], "context": positions.shape[0]})
    if unknown := sorted(found.keys() - shapes.keys()):
        raise CheckpointError(f"the tensor {unknown[0]} has no place in GPT-2's layout")
    stored = [_turned(found.get(name) or _zeros(name, shape, embedding.dtype), PREFIX + name) for name, shape in shapes.items()]
    files, bos = tokenizer_files(tokenizer, positions.shape[0]) if tokenizer is not None else ({}, None)
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": embedding.shape[0],
        "n_positions": positions.shape[0],
        "n_ctx": positions.shape[0],
        "n_embd": embedding.shape[1],
        "n_layer": settings["layers"],
        "n_head": settings["heads"],
        "n_inner": None,
        "activation_function": "gelu_new" if settings["gelu"] == "tanh" else "gelu",
        "layer_norm_epsilon": 1e-5,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), settings["dropout"]),
        "tie_word_embeddings": True,
        "torch_dtype": DTYPE_NAMES[embedding.dtype],
        "bos_token_id": bos,
        "eos_token_id": bos,
    }
    if scoring is not None:
        config[SCORING] = dict(scoring)
    files = {CONFIG: json.dumps(config, indent=2).encode(), **files}
    with replace_folder(folder) as partial:
        size, _ = write_tensors(partial / WEIGHTS, stored, {"format": "pt"})
        for name, content in files.items():
            write_atomically(partial / name, content)
    return size + sum(map(len, files.values()))


def _settings(folder: Path) -> dict[str, Any]:
    """The settings of our gpt2 family that a config.json stands for."""
    path = folder / CONFIG
    config = _json(path)
    for name, allowed in FIXED.items():
        if config.get(name, allowed[0]) not in allowed or (name == "model_type" and name not in config):
            raise ConfigError(
                f"{path}: {name} is {config.get(name)!r:.60}, and only {allowed[0]!r} can be read into the gpt2 family"
            )
    gelu = config.get("activation_function", "gelu_new")
    if not isinstance(gelu, str) or gelu not in GELU:
        raise ConfigError(f"{path}: activation_function is {gelu!r:.60}; only {', '.join(GELU)} can be read")
    names = {"layers": "n_layer", "heads": "n_head", "width": "n_embd", "context": "n_positions", "vocab_size": "vocab_size"}
    settings: dict[str, Any] = {"family": "gpt2", "bias": True, "gelu": GELU[gelu], "dropout": 0.0}
    for ours, theirs in names.items():
        value = config.get(theirs, config.get("n_ctx") if ours == "context" else None)
        if type(value) is not int or not 0 < value < 1 << 31:
            raise CheckpointError(f"{path}: {theirs} is {value!r:.60}, and must be a number above 0")
        settings[ours] = value
    if config.get("n_inner") not in (None, 4 * settings["width"]):
        raise ConfigError(f"{path}: n_inner is {config['n_inner']!r:.60}, and only {4 * settings['width']} can be read")
    return settings


def _json(path: Path) -> dict[str, Any]:
    found = None
    with readable(path, CheckpointError), suppress(ValueError):
        if not path.exists():
            raise CheckpointError(f"there is no {path}")
        found = read_json(path)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is damaged: it is not a JSON object")
    return found


def _weights(folder: Path) -> dict[str, TensorRecord]:
    """All tensors of a folder, from one file or from the parts that its index names."""
    files = [WEIGHTS]
    if not (folder / WEIGHTS).is_file() and (folder / INDEX).is_file():
        told = _json(folder / INDEX).get("weight_map")
        names = set(told.values()) if isinstance(told, dict) and all(isinstance(n, str) for n in told.values()) else set()
        if not names or any(Path(name).name != name for name in names):
            raise CheckpointError(f"{folder / INDEX} is damaged: it does not name the files of the weights")
        files = sorted(names)
    tensors: dict[str, TensorRecord] = {}
    for file in files:
        with readable(folder / file, CheckpointError):
            if not (folder / file).exists():
                raise CheckpointError(f"there is no {folder / file}; only safetensors files are read, not pickles")
            tensors |= read_tensors(folder / file)[0]
    return tensors


def _shapes(settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors in their layout, where matrices are stored (inputs, outputs)."""
    C = settings["width"]
    block = {
        "ln_1.weight": (C,), "ln_1.bias": (C,), "attn.c_attn.weight": (C, 3 * C), "attn.c_attn.bias": (3 * C,),
        "attn.c_proj.weight": (C, C), "attn.c_proj.bias": (C,), "ln_2.weight": (C,), "ln_2.bias": (C,),
        "mlp.c_fc.weight": (C, 4 * C), "mlp.c_fc.bias": (4 * C,), "mlp.c_proj.weight": (4 * C, C), "mlp.c_proj.bias": (C,),
    }  # fmt: skip
    blocks = {f"h.{i}.{name}": shape for i in range(settings["layers"]) for name, shape in block.items()}
    ends = {"wte.weight": (settings["vocab_size"], C), "wpe.weight": (settings["context"], C)}
    return {**ends, **blocks, "ln_f.weight": (C,), "ln_f.bias": (C,)}


def _turned(record: TensorRecord, name: str) -> TensorRecord:
    """A tensor under another name, its rows and columns exchanged if it is one of the matrices."""
    if not name.endswith(TRANSPOSED):
        return TensorRecord(name, record.dtype, record.shape, record.data)
    raw = np.frombuffer(record.data, f"u{ITEM_BYTES[record.dtype]}").reshape(record.shape)
    return TensorRecord(name, record.dtype, raw.T.shape, np.ascontiguousarray(raw.T).reshape(-1).view(np.uint8).data)


def _zeros(name: str, shape: tuple[int, ...], dtype: str) -> TensorRecord:
    if not name.endswith("bias"):
        raise CheckpointError(f"the model has no tensor {PREFIX}{name}; it is not a whole GPT-2")
    return TensorRecord(name, dtype, shape, memoryview(bytes(prod(shape) * ITEM_BYTES[dtype])))
