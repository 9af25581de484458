"""Models on the Hugging Face hub, as folders in the hub's own cache."""

from __future__ import annotations

import re
from pathlib import Path

from ingot.errors import CheckpointError, DataError, IngotError

MODEL_FILES = (
    "config.json", "model.safetensors", "model.safetensors.index.json", "model-*.safetensors", "tokenizer.json", "vocab.json",
    "merges.txt", "ingot-tokenizer.json",
)  # fmt: skip


def fetch_model(name: str) -> Path:
    """The folder of a model, fetched if it is new there."""
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
