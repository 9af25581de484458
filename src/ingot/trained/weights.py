"""A model at rest: the weights of a run, a checkpoint, an artifact or a foreign file, and what rebuilds it. No framework yet."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ingot.artifact.container import read_artifact
from ingot.artifact.gpt_simple import MODEL, WEIGHTS, is_checkpoint, read_model, saved_checkpoints, tokenizer_folder
from ingot.artifact.hf_tokenizer import find_tokenizer
from ingot.backends.open import read_torch_weights
from ingot.config.loading import load_config
from ingot.config.schema import Config
from ingot.data.tokenizers import Tokenizer
from ingot.errors import CheckpointError, ConfigError
from ingot.runs.checkpoints import Checkpoint, load_checkpoint, read_index
from ingot.runs.finding import find_checkpoint, locate_checkpoint
from ingot.runs.folder import MODEL_COPY
from ingot.runs.steps import INDEX, saved_steps
from ingot.runtime.tensors import TensorRecord

# What a reader of an exported file needs of all that a checkpoint knows.
FACTS = ("config", "tokenizer", "tokenizer_fingerprint", "vocab_size", "data_fingerprint", "model_file_sha256", "step", "val_bpb")


@dataclass(frozen=True)
class Weights:
    """A model that can be opened or exported; `run` is the folder of its run, where that is known."""

    path: Path
    run: Path | None
    tensors: dict[str, TensorRecord]
    facts: dict[str, Any]
    config: Config

    @property
    def names_data(self) -> bool:
        """Whether it knows a text that it was trained on."""
        return self.facts.get("data_fingerprint") is not None


def open_weights(path: Path, which: str = "latest") -> Weights:
    """Read a run folder (its latest or best checkpoint), one checkpoint, or an artifact; gpt-simple's folders too."""
    if path.is_file():
        artifact = read_artifact(path)
        return Weights(path, None, artifact.tensors, *_known(path, artifact.facts))
    if (theirs := _gpt_simple(path, which)) is not None:
        return theirs
    checkpoint = find_checkpoint(path, which)
    run = checkpoint.path.parent.parent if checkpoint.path.parent.name == "checkpoints" else None
    known = dict(checkpoint.progress)
    if (known.get("val_step"), known.get("val_whole")) != (checkpoint.step, True):
        known["val_bpb"] = None  # of other weights, or of a part of the text
    return Weights(checkpoint.path, run, checkpoint.weights, *_known(checkpoint.path, known))


def locate_weights(path: Path) -> Path:
    """The artifact or checkpoint that a path means, found without reading its weights; CheckpointError where there is none."""
    if path.is_file():
        return path.resolve()
    if (theirs := _locate_gpt_simple(path, "latest")) is not None:
        if not (theirs / MODEL / WEIGHTS).is_file():
            raise CheckpointError(f"{theirs} has no {MODEL}/{WEIGHTS}")
        read_model(theirs)
        return theirs.resolve()
    found = locate_checkpoint(path)
    for file, known in read_index(found)["files"].items():
        if not (found / file).is_file() or (found / file).stat().st_size != known["bytes"]:
            raise CheckpointError(f"{found / file} is missing or has not the {known['bytes']:,} bytes it was written with")
    return found.resolve()


def _known(path: Path, known: Mapping[str, Any]) -> tuple[dict[str, Any], Config]:
    facts = {name: known.get(name) for name in FACTS}
    config, tokenizer = facts["config"], facts["tokenizer"]
    told = isinstance(config, dict) and isinstance(config.get("model"), dict) and "family" in config["model"]
    if not told or "tokenizer" not in known or not isinstance(tokenizer, dict | None):
        raise CheckpointError(f"{path} does not say how to build its model")
    try:
        return facts, load_config(python=config, environment={}).config
    except ConfigError as error:
        raise CheckpointError(f"{path} does not say how to build its model: {error}") from None


def scoring_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """How a model was scored, which other programs' files carry along: the same weights must not have two scores.

    `config` is what a checkpoint keeps of it; what it does not say is not told.
    """
    data, evaluation = config.get("data", {}), config.get("evaluation", {})
    known = {"seq_len": data.get("seq_len"), "stride": evaluation.get("stride") or data.get("seq_len")}
    known["bytes"] = evaluation.get("bytes")
    return {name: value for name, value in known.items() if value is not None}


def foreign_weights(
    path: Path,
    records: Iterable[TensorRecord],
    settings: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    named: str | None = None,
    scoring: Mapping[str, Any] = MappingProxyType({}),
) -> Weights:
    """A model that was not trained here, by the settings of its `model` section, with a whole config as every reader expects.

    `named`: what opens its tokenizer again. `scoring` is what `scoring_of` said of it, where its file knows.
    """
    length = scoring.get("seq_len") or settings["context"]
    named = tokenizer.kind if tokenizer is not None and tokenizer.kind in ("byte", "gpt2") else named
    given = {
        "model": dict(settings),
        "data": {"seq_len": length, "tokenizer": named},
        "training": {"max_steps": 0, "tokens_per_step": length},
        "evaluation": {name: scoring[name] for name in ("stride", "bytes", "whole_rows") if name in scoring},
    }
    config = load_config(python=given, environment={}).config
    facts: dict[str, Any] = dict.fromkeys(FACTS)
    facts["config"] = config.model_dump(mode="json")
    if tokenizer is not None:
        facts |= {"tokenizer": tokenizer.spec(), "tokenizer_fingerprint": tokenizer.fingerprint()}
        facts["vocab_size"] = tokenizer.vocab_size
    return Weights(path, None, {record.name: record for record in records}, facts, config)


def _gpt_simple(path: Path, which: str) -> Weights | None:
    """The model of a checkpoint of gpt-simple's, or of a run of its own; None if what lies there is ours, or newer there."""
    if (saved := _locate_gpt_simple(path, which)) is None:
        return None
    settings = read_model(saved)
    records = read_torch_weights(saved / MODEL / WEIGHTS)
    folder = tokenizer_folder(saved)
    tokenizer = find_tokenizer(folder, settings["vocab_size"]) if folder is not None else None
    try:
        known = foreign_weights(saved, records.values(), settings, tokenizer, str(folder) if folder is not None else None)
    except ConfigError as error:
        raise CheckpointError(f"{saved / MODEL} does not say how to build its model: {error}") from None
    # Any tokenizer may be named for it: the one beside it has a mark for padding more than the one its data were made with.
    return replace(known, run=saved.parent.parent, facts={**known.facts, "tokenizer_fingerprint": None})


def _locate_gpt_simple(path: Path, which: str) -> Path | None:
    """The checkpoint of gpt-simple's that a path means.

    A run folder may hold the same step in both layouts: ours, which says more, is taken then.
    """
    if is_checkpoint(path):
        return path
    if which != "latest" or not (found := saved_checkpoints(path)):
        return None
    return found[-1].path if found[-1].step > max(saved_steps(path / "checkpoints"), default=-1) else None


def as_checkpoint(weights: Weights) -> Checkpoint:
    """A model as the checkpoint that it is, with the optimizer's memory; what is none of ours has only its weights."""
    if (weights.path / INDEX).is_file():
        return load_checkpoint(weights.path)
    known = {"tokens": 0, "elapsed_seconds": 0.0, **weights.facts}
    return Checkpoint(weights.path, int(weights.facts["step"] or 0), known, {"model": weights.tensors})


def model_file(weights: Weights) -> Path:
    """The Python file of a model of one's own: the copy in its run folder or beside an artifact, unchanged.

    A file may come from anybody, so an artifact never says which code on this machine is run.
    """
    folder = weights.path.resolve().parent
    kept = [folder / MODEL_COPY, *([folder.parent / MODEL_COPY] if folder.name in ("artifact", "checkpoints") else [])]
    file = next((file for file in kept if file.is_file()), None)
    if file is None:
        raise CheckpointError(f"{weights.path} holds a model of its own; put its Python file beside it as {MODEL_COPY}")
    if hashlib.sha256(file.read_bytes()).hexdigest() != weights.facts.get("model_file_sha256"):
        raise CheckpointError(f"{file} is not the file that {weights.path} was trained with; put that one there")
    return file
