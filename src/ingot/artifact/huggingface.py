"""Models in Hugging Face's layout: a folder with config.json and model.safetensors, read and written without their library.

What differs between the families is in hf_layouts.py.
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

from ingot.artifact.hf_layouts import LAYOUTS, Layout, Shapes, layout_of
from ingot.artifact.hf_tokenizer import MERGES, OURS, THEIRS, VOCABULARY, check_no_other_tokenizer, tokenizer_files
from ingot.artifact.portable import refuse_unportable
from ingot.data.formats.base import ends_of
from ingot.errors import CheckpointError, DataError, IngotError
from ingot.runtime.files import read_json, readable, replace_folder, write_atomically
from ingot.runtime.tensors import FLOATS, ITEM_BYTES, TensorRecord, read_tensors, write_tensors

SCORING = "ingot_scoring"  # a key of ours in their config.json, which transformers keeps and does not read
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
WHOLE = f"a folder with {CONFIG} and {WEIGHTS}"
HEAD = "lm_head.weight"
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
MODEL_FILES = (CONFIG, WEIGHTS, INDEX, "model-*.safetensors", THEIRS, VOCABULARY, MERGES, OURS)  # that are fetched from the hub


def fetch_model(name: str) -> Path:
    """The folder of a model on the hub, in the hub's own cache; fetched if it is new there."""
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise CheckpointError(f"there is no folder {name}; give {WHOLE}")
    from ingot.data.hub import Hub, Unreachable

    try:
        return Hub(name, "model", attempts=1).snapshot(MODEL_FILES)
    except IngotError as error:
        advice = f"; go online once, or give {WHOLE}" if isinstance(error, Unreachable) else ""
        raise DataError(f"there is no folder {name}, and it cannot be fetched from the hub: {error}{advice}") from None


def cached_model(name: str) -> Path | None:
    """The folder of a model that was fetched before, whoever did it; None where it is not there or not whole."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=list(MODEL_FILES), local_files_only=True))
    except Exception:  # not there, in one of the many ways the client has to say so
        return None
    return folder if all((folder / file).is_file() for file in MODEL_FILES[:2]) else None


def read_model(folder: Path, families: tuple[str, ...] = tuple(LAYOUTS)) -> tuple[list[TensorRecord], dict[str, Any]]:
    """The weights of a folder in our names and layout, and the settings of the section `model` that they fit."""
    if not folder.is_dir():
        what = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
        raise CheckpointError(f"{what}; give {WHOLE}")
    config = _json(folder / CONFIG)
    layout = layout_of(config, folder / CONFIG, families)
    settings = layout.settings(config, folder / CONFIG)
    found = {name.removeprefix(layout.prefix): record for name, record in _weights(folder).items()}
    _tie_head(folder, found, layout, settings)
    if settings["layers"] > len(found):
        raise CheckpointError(f"{folder / CONFIG} says {settings['layers']:,} layers, and there are fewer tensors than that")
    shapes = layout.shapes(settings)
    records = [_read(folder, found, layout, name, shape) for name, shape in shapes.items()]
    if unknown := sorted(name for name in found.keys() - shapes.keys() if not layout.buffers.fullmatch(name)):
        raise CheckpointError(f"{folder} has a tensor {unknown[0]!r:.100} that {layout.shown} does not have; it is another model")
    return records, settings


def _tie_head(folder: Path, found: dict[str, TensorRecord], layout: Layout, settings: Mapping[str, Any]) -> None:
    """Leave out a head that is the embedding, as some files have it; another one is told where the family has none."""
    embedding = found.get(layout.embedding)
    if not settings.get("tied", True) or HEAD not in found or embedding is None:
        return
    head = found.pop(HEAD)
    if (head.dtype, head.data) != (embedding.dtype, embedding.data):
        whose = f"that of the {layout.family} family is its embedding" if layout.family == "gpt2" else f"{CONFIG} says it is tied"
        raise CheckpointError(f"{folder} has a head of its own, and {whose}; it cannot be read")


def _read(folder: Path, found: Mapping[str, TensorRecord], layout: Layout, name: str, shape: tuple[int, ...]) -> TensorRecord:
    record = found.get(name)
    if record is None:
        raise CheckpointError(f"{folder} has no tensor {name}; it is not a {layout.shown}, or not all of it")
    if record.dtype not in FLOATS:
        raise CheckpointError(f"{folder}: {name} holds {record.dtype}; only floating-point weights can be read")
    if record.shape != shape:
        raise CheckpointError(f"{folder}: {name} has shape {list(record.shape)}, and {CONFIG} says {list(shape)}")
    return _turned(record, layout.ours(name), name.endswith(layout.transposed))


def read_scoring(folder: Path) -> dict[str, Any]:
    """How the model of a folder that we wrote was scored; nothing of another's."""
    found = _json(folder / CONFIG).get(SCORING)
    return found if isinstance(found, dict) else {}


def write_model(
    folder: Path,
    records: Iterable[TensorRecord],
    settings: Mapping[str, Any],
    tokenizer: Mapping[str, Any] | None,
    scoring: Mapping[str, Any] | None = None,
) -> int:
    """Make a folder that transformers loads, with the tokenizer of a spec beside it; returns its bytes.

    `settings` is a whole section `model`; how many ids there are is seen from the weights.
    """
    refuse_unportable(settings, "huggingface")
    layout = LAYOUTS[settings["family"]]
    found = {record.name: record for record in records}
    embedding, places = found.get(layout.ours(layout.embedding)), found.get("transformer.wpe.weight")
    if embedding is None or (layout.family == "gpt2" and places is None):
        raise CheckpointError(f"the model has no embeddings; it is not a whole {layout.shown}")
    whole = {**settings, "vocab_size": embedding.shape[0], "context": places.shape[0] if places else settings["context"]}
    shapes = layout.shapes(whole)
    if unknown := sorted(found.keys() - {layout.ours(name) for name in shapes}):
        raise CheckpointError(f"the tensor {unknown[0]} has no place in {layout.shown}'s layout")
    stored = _stored(found, layout, shapes, embedding.dtype)
    files, known = tokenizer_files(tokenizer, whole["context"]) if tokenizer is not None else ({}, None)
    ends = ends_of(known) if known is not None else []
    config = {
        **layout.config(whole),
        "torch_dtype": DTYPE_NAMES[embedding.dtype],
        "bos_token_id": known.bos if known is not None else None,
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
    }
    if scoring is not None:
        config[SCORING] = dict(scoring)
    files = {CONFIG: json.dumps(config, indent=2).encode(), **files}
    check_no_other_tokenizer(folder, files)
    with replace_folder(folder, keep_others=True) as partial:
        size, _ = write_tensors(partial / WEIGHTS, stored, {"format": "pt"})
        for name, content in files.items():
            write_atomically(partial / name, content)
    return size + sum(map(len, files.values()))


def _stored(found: Mapping[str, TensorRecord], layout: Layout, shapes: Shapes, dtype: str) -> list[TensorRecord]:
    """The tensors as they are laid out there, with zeros for biases that a model of ours does without."""
    stored = []
    for name, shape in shapes.items():
        record = found.get(layout.ours(name))
        if record is None:
            if not name.endswith("bias"):
                raise CheckpointError(f"the model has no tensor {layout.ours(name)}; it is not a whole {layout.shown}")
            record = TensorRecord(name, dtype, shape, memoryview(bytes(prod(shape) * ITEM_BYTES[dtype])))
        turned = _turned(record, layout.stored(name), name.endswith(layout.transposed))
        if turned.shape != shape:
            raise CheckpointError(f"the tensor {record.name} has shape {list(turned.shape)}, and its settings say {list(shape)}")
        stored.append(turned)
    return stored


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


def _turned(record: TensorRecord, name: str, transposed: bool) -> TensorRecord:
    """A tensor under another name, its rows and columns exchanged where the two layouts differ."""
    if not transposed:
        return TensorRecord(name, record.dtype, record.shape, record.data)
    raw = np.frombuffer(record.data, f"u{ITEM_BYTES[record.dtype]}").reshape(record.shape)
    return TensorRecord(name, record.dtype, raw.T.shape, np.ascontiguousarray(raw.T).reshape(-1).view(np.uint8).data)
