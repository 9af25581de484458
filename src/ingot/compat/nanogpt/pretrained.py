"""GPT-2 weights, by nanoGPT's names for them or from a folder in Hugging Face's layout.

They are GPT-2's own: with the tanh form of the GELU that OpenAI trained them with, not nanoGPT's erf.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ingot.artifact.huggingface import CONFIG, cached_model, fetch_model, read_model
from ingot.errors import ConfigError
from ingot.runtime.files import user_path
from ingot.runtime.tensors import TensorRecord

SIZES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
OWNER = "openai-community"  # whose name they have on the hub; older caches know them without one


def read_pretrained(name: str) -> tuple[dict[str, TensorRecord], dict[str, Any]]:
    """The weights of a size of GPT-2 or of a folder, and the settings of the section `model` that they fit."""
    records, settings = read_model(pretrained_folder(name), ("gpt2",))
    return {record.name: record for record in records}, settings


def pretrained_folder(name: str) -> Path:
    """The folder that holds the weights: the named one, or one in the hub's cache, which is filled if need be."""
    folder = user_path(name)
    if (folder / CONFIG).is_file():
        return folder
    if name in SIZES:
        return cached_model(f"{OWNER}/{name}") or cached_model(name) or fetch_model(f"{OWNER}/{name}")
    if folder.is_dir() or "/" in name:
        raise ConfigError(f"there is no {folder / CONFIG}; give a folder with GPT-2 weights, or one of {', '.join(SIZES)}")
    raise ConfigError(
        f"there are no weights {name!r}; give {', '.join(SIZES)}, or a folder with GPT-2 weights (init_from also knows resume, "
        "and in train.py scratch)"
    )
