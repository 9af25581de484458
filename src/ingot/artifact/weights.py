"""The exported model: one safetensors file whose metadata says how to rebuild the model and its tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.artifact.tensors import TensorRecord, read_tensors, write_tensors
from ingot.errors import CheckpointError

WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True)
class Weights:
    """A model at rest: its tensors, the settings that build it, the tokenizer's spec, and what else was noted."""

    tensors: dict[str, TensorRecord]
    facts: dict[str, Any]


def write_weights(path: Path, records: Iterable[TensorRecord], facts: Mapping[str, Any]) -> int:
    """Write an exported model beside its name, then rename; returns its bytes."""
    partial = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        size, _ = write_tensors(partial, records, {"format": "pt", "ingot": json.dumps(facts)})
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return size


def read_weights(path: Path) -> Weights:
    """Read an exported model; no code in it is ever run."""
    try:
        tensors, metadata = read_tensors(path)
        facts = json.loads(metadata["ingot"])
        if not isinstance(facts, dict):
            raise TypeError
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {path}") from None
    except (KeyError, TypeError):
        raise CheckpointError(
            f"{path} is a safetensors file that ingot did not write: it does not say how to build the model"
        ) from None
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return Weights(tensors, facts)
