"""Import a model from the files of golf's scripts, also the originals': shapes come from its tensors, the rest from defaults."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ingot.compat.golf.files import is_zip, read_file, read_golf, unpacked
from ingot.compat.golf.mlx_script import read_mlx
from ingot.compat.golf.variables import VARIABLES
from ingot.data.tokenizers import Tokenizer, open_tokenizer
from ingot.errors import CheckpointError, ConfigError, DataError
from ingot.inference.model import foreign_weights, open_model
from ingot.runtime.files import open_to_read
from ingot.runtime.tensors import TensorRecord

EMBEDDING = "tok_emb.weight"
ZLIB = (b"x\x01", b"x\x5e", b"x\x9c", b"x\xda")  # the first bytes of a zlib stream, by compression level


def is_golf(path: Path) -> bool:
    """Return True for a golf model file: a zlib stream, or a zip that contains golf's embedding."""
    try:
        if not zipfile.is_zipfile(path):
            with open_to_read(path) as file:
                return file.read(2) in ZLIB
        with zipfile.ZipFile(path) as archive:
            parts = {part.filename: part for part in archive.infolist() if part.compress_type == zipfile.ZIP_STORED}
            pickles = [archive.read(part) for name, part in parts.items() if name.endswith("/data.pkl")]  # of a torch file
            return f"{EMBEDDING}.npy" in parts or any(EMBEDDING.encode() in content for content in pickles)
    except Exception:  # whatever a damaged file makes of zipfile; its reader reports what is wrong
        return False


def import_golf(
    path: Path, tokenizer: str | None, say: Callable[[str], None]
) -> tuple[list[TensorRecord], dict[str, Any], Tokenizer, dict[str, Any]]:
    """Return the weights, the settings of their model, the tokenizer, and the settings of golf's scoring."""
    if tokenizer is None:
        raise ConfigError(f"{path} does not hold its tokenizer; give the .model file of TOKENIZER_PATH with --tokenizer")
    records, settings = read_model(path)
    opened = open_tokenizer(tokenizer)
    if opened.vocab_size != settings["vocab_size"]:
        raise DataError(f"{tokenizer} has {opened.vocab_size:,} ids and the model of {path} {settings['vocab_size']:,}")
    try:
        open_model(foreign_weights(path, records, settings, opened), opened, "cpu")
    except ConfigError as error:
        raise CheckpointError(f"{path} does not hold the model of golf's baseline: {error}") from None
    length = settings["context"]
    say(f"{path} does not say its context, rope base and softcap; golf's defaults are used: {length:,}, 10,000 and 30")
    return records, settings, opened, {"seq_len": length, "bytes": "pieces", "whole_rows": True}


def read_model(path: Path) -> tuple[list[TensorRecord], dict[str, Any]]:
    """Return the weights of a file, and the settings of the model that they fit."""
    content = read_file(path)
    try:  # train_gpt.py writes torch files, train_gpt_mlx.py arrays
        is_mlx = EMBEDDING.encode() + b".npy" in content if is_zip(content) else not is_zip(unpacked(content))
    except ValueError as error:
        raise CheckpointError(f"{path} is not a model that golf wrote, or it is damaged: {error}") from None
    records = read_mlx(content, str(path)) if is_mlx else read_golf(content, path)
    try:
        vocab_size, width = records[EMBEDDING].shape
        (heads,) = records["blocks.0.attn.q_gain"].shape
        return list(records.values()), {
            "family": "golf",
            "vocab_size": vocab_size,
            "context": VARIABLES["TRAIN_SEQ_LEN"].default,
            "layers": len({name.split(".")[1] for name in records if name.startswith("blocks.")}),
            "heads": heads,
            "width": width,
            "kv_heads": records["blocks.0.attn.c_k.weight"].shape[0] // (width // heads),
            "mlp_multiple": records["blocks.0.mlp.fc.weight"].shape[0] // width,
            "tied": "lm_head.weight" not in records,
        }
    except (KeyError, IndexError, ValueError, ZeroDivisionError):
        raise CheckpointError(f"{path} does not hold the model of golf's baseline, the only one that can be imported") from None
