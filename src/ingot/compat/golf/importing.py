"""A model from the files that golf's scripts leave, also the originals': its tensors tell its shape, golf's defaults the rest."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ingot.compat.golf.files import is_state, read_file, read_golf, unpacked
from ingot.compat.golf.mlx.files import read_mlx
from ingot.compat.golf.variables import NAMES
from ingot.data.tokenizers import Tokenizer, open_tokenizer
from ingot.errors import CheckpointError, ConfigError, DataError
from ingot.inference.model import foreign_weights, open_model
from ingot.runtime.files import open_to_read
from ingot.runtime.tensors import TensorRecord

EMBEDDING = "tok_emb.weight"
ZLIB = (b"x\x01", b"x\x5e", b"x\x9c", b"x\xda")  # how its streams begin, by their level


def is_golf(path: Path) -> bool:
    """Whether a file is one of golf's: a stream of zlib, or a zip that names golf's embedding."""
    try:
        if not zipfile.is_zipfile(path):
            with open_to_read(path) as file:
                return file.read(2) in ZLIB
        with zipfile.ZipFile(path) as archive:
            parts = {part.filename: part for part in archive.infolist() if part.compress_type == zipfile.ZIP_STORED}
            names = [archive.read(part) for name, part in parts.items() if name.endswith("/data.pkl")]  # of a torch file
            return f"{EMBEDDING}.npy" in parts or any(EMBEDDING.encode() in some for some in names)
    except Exception:  # whatever a damaged file makes of zipfile; those who read it say what is wrong
        return False


def import_golf(
    path: Path, tokenizer: str | None, say: Callable[[str], None]
) -> tuple[list[TensorRecord], dict[str, Any], Tokenizer, dict[str, Any]]:
    """Weights, the settings of their model, the tokenizer that is named, and how golf scores."""
    if tokenizer is None:
        raise ConfigError(f"{path} does not hold its tokenizer; name with --tokenizer the .model file that TOKENIZER_PATH was")
    records, settings = read_model(path)
    found = open_tokenizer(tokenizer)
    if found.vocab_size != settings["vocab_size"]:
        raise DataError(f"{tokenizer} has {found.vocab_size:,} ids and the model of {path} {settings['vocab_size']:,}")
    try:
        open_model(foreign_weights(path, records, settings, found), found, "cpu")
    except ConfigError as error:
        raise CheckpointError(f"{path} does not hold the model of golf's baseline: {error}") from None
    length = settings["context"]
    say(f"{path} does not tell its context, rope base and softcap: golf's {length:,}, 10,000 and 30 are taken")
    return records, settings, found, {"seq_len": length, "bytes": "pieces", "whole_rows": True}


def read_model(path: Path) -> tuple[list[TensorRecord], dict[str, Any]]:
    """The weights of a file, and the settings of the model that they would fit."""
    records = _records(read_file(path), path)
    try:
        return list(records.values()), _shape(records)
    except (KeyError, IndexError, ValueError, ZeroDivisionError):
        raise CheckpointError(
            f"{path} does not hold the model of golf's baseline, and no other of golf's can be imported"
        ) from None


def _records(content: bytes, path: Path) -> dict[str, TensorRecord]:
    """What either script wrote: that of CUDA writes torch's files, that of MLX arrays."""
    try:
        arrays = EMBEDDING.encode() + b".npy" in content if is_state(content) else not is_state(unpacked(content))
    except ValueError as error:
        raise CheckpointError(f"{path} is not a model that golf wrote, or it is damaged: {error}") from None
    return read_mlx(content, str(path)) if arrays else read_golf(content, path)


def _shape(records: Mapping[str, TensorRecord]) -> dict[str, Any]:
    vocab_size, width = records[EMBEDDING].shape
    (heads,) = records["blocks.0.attn.q_gain"].shape
    return {
        "family": "golf",
        "vocab_size": vocab_size,
        "context": NAMES["TRAIN_SEQ_LEN"].default,
        "layers": len({name.split(".")[1] for name in records if name.startswith("blocks.")}),
        "heads": heads,
        "width": width,
        "kv_heads": records["blocks.0.attn.c_k.weight"].shape[0] // (width // heads),
        "mlp_multiple": records["blocks.0.mlp.fc.weight"].shape[0] // width,
        "tied": "lm_head.weight" not in records,
    }
