"""What is exported: the weights and facts of a run, a checkpoint or another artifact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.artifact.container import read_artifact
from ingot.config.loading import load_config
from ingot.config.schema import Config
from ingot.errors import CheckpointError
from ingot.runs.checkpoints import find_checkpoint
from ingot.runtime.tensors import TensorRecord

# What a reader of the file needs of all that a checkpoint knows.
FACTS = ("config", "tokenizer", "tokenizer_fingerprint", "vocab_size", "data_fingerprint", "model_file_sha256", "step", "val_bpb")


@dataclass(frozen=True)
class Source:
    """A model that can be exported; `run` is the folder of its run, where that is known."""

    path: Path
    run: Path | None
    tensors: dict[str, TensorRecord]
    facts: dict[str, Any]
    config: Config


def open_source(path: Path, which: str = "latest") -> Source:
    """Read a run folder (its latest or best checkpoint), one checkpoint, or an artifact."""
    if path.is_file():
        weights = read_artifact(path)
        return Source(path, None, weights.tensors, *_known(path, weights.facts))
    checkpoint = find_checkpoint(path, which)
    run = checkpoint.path.parent.parent if checkpoint.path.parent.name == "checkpoints" else None
    known = dict(checkpoint.progress)
    if (known.get("val_step"), known.get("val_whole")) != (checkpoint.step, True):
        known["val_bpb"] = None  # of other weights, or of a part of the text
    return Source(checkpoint.path, run, checkpoint.weights, *_known(checkpoint.path, known))


def _known(path: Path, known: dict[str, Any]) -> tuple[dict[str, Any], Config]:
    facts = {name: known.get(name) for name in FACTS}
    if not isinstance(facts["config"], dict):
        raise CheckpointError(f"{path} does not say how to build its model")
    return facts, load_config(python=facts["config"], environment={}).config


def config_around(settings: Mapping[str, Any], tokenizer: str) -> dict[str, Any]:
    """A whole config around a foreign model, as every reader expects one; `tokenizer` is the kind of its tokenizer."""
    length = settings["context"]
    given = {
        "model": dict(settings),
        "data": {"seq_len": length, "tokenizer": tokenizer if tokenizer in ("byte", "gpt2") else None},
        "training": {"max_steps": 0, "tokens_per_step": length},
    }
    return load_config(python=given, environment={}).config.model_dump(mode="json")
