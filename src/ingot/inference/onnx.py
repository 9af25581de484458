"""Export a trained model as a folder for onnxruntime: the graph, a config.json about its inputs, and the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.artifact.hf_tokenizer import check_no_other_tokenizer, tokenizer_files
from ingot.backends.open import export_onnx
from ingot.data.store.documents import ends_of
from ingot.inference.model import Weights, find_tokenizer, settings_on
from ingot.runtime.files import replace_folder, write_atomically


def write_onnx(folder: Path, weights: Weights, tokenizer: Mapping[str, Any] | None, dtype: str) -> int:
    """Write model.onnx, config.json and, if a spec is given, the tokenizer's files to a folder; return their size in bytes."""
    config = settings_on(weights, "cpu")
    vocab_size = find_tokenizer(weights).vocab_size
    files, known = tokenizer_files(tokenizer, config.model.context or config.data.seq_len) if tokenizer else ({}, None)
    check_no_other_tokenizer(folder, files)
    with replace_folder(folder) as partial:
        about: dict[str, Any] = {"format": "ingot-onnx", "family": config.model.family, "vocab_size": vocab_size, "dtype": dtype}
        about |= export_onnx(config, vocab_size, weights.tensors, partial / "model.onnx", dtype)
        bos, ends = (known.bos, ends_of(known)) if known is not None else (None, [])
        about |= {"bos_token_id": bos, "eos_token_ids": ends, "tokenizer_files": sorted(files)}
        for name, content in {**files, "config.json": json.dumps(about, indent=2).encode()}.items():
            write_atomically(partial / name, content)
        return sum(file.stat().st_size for file in partial.iterdir())
