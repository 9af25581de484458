"""Read gpt-simple's run folders without importing torch: the checkpoints of a run, their models and tokenizers.

A run folder contains tokenizer/ and, for each checkpoint, checkpoints/NAME/ with trainer_state.json and model/. The checkpoint
with the highest step in trainer_state.json is the newest, whatever its name: a run may be resumed after it has saved `final`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ingot.errors import CheckpointError, Unreadable
from ingot.runtime.files import read_object

STATE, MODEL, WEIGHTS, CONFIG, TOKENIZER = "trainer_state.json", "model", "pytorch_model.bin", "config.json", "tokenizer"
FINAL, SHUTDOWN = "final", "-shutdown"
RUN_STATE = ".run_state.json"  # status file of a run
STOP_FLAG = ".shutdown_requested"  # a run that finds this file saves a checkpoint and stops
VERSION = 1  # version of trainer_state.json
_NAME = re.compile(rf"{FINAL}|checkpoint-\d+(?:{SHUTDOWN})?")

# The keys of gpt-simple's `model` section, in gpt-simple's order, and our names for them.
MODEL_KEYS: dict[str, str | None] = {
    "vocab_size": "vocab_size", "n_embd": "width", "n_layer": "layers", "n_head": "heads", "n_kv_head": "kv_heads",
    "n_positions": "context", "dropout": "dropout", "use_bias": "bias", "qkv_bias": "qkv_bias",
    "attn_out_bias": "attention_out_bias", "mlp_bias": "mlp_bias", "activation": "activation", "mlp_type": "mlp",
    "intermediate_size": "inner_width", "norm": "norm", "norm_eps": "norm_epsilon", "tie_word_embeddings": "tied",
    "rope_base": "rope_base", "rope_scaling_type": "rope_scaling", "rope_scaling_factor": "rope_factor",
    "attention_mode": None,  # Ingot's counterpart is a data setting, data.document_mask
}  # fmt: skip
# Keys that define the architecture; gpt-simple resumes a run only if they are unchanged.
ARCH_KEYS = (
    "vocab_size", "n_embd", "n_layer", "n_head", "n_kv_head", "n_positions", "activation", "mlp_type", "intermediate_size",
    "norm", "tie_word_embeddings", "use_bias", "qkv_bias", "attn_out_bias", "mlp_bias",
)  # fmt: skip
ACTIVATIONS, MLPS = {"swish": "silu"}, {"mlp": "plain"}  # gpt-simple's values that Ingot names differently


@dataclass(frozen=True)
class Saved:
    """A gpt-simple checkpoint; `state` is the content of its trainer_state.json."""

    path: Path
    step: int
    state: dict[str, Any]

    @property
    def kind(self) -> Literal["regular", "shutdown", "final"]:
        name = self.path.name
        return "final" if name == FINAL else "shutdown" if name.endswith(SHUTDOWN) else "regular"

    @property
    def run(self) -> Path | None:
        """Return the run folder that contains the checkpoint, or None if it is not in a run."""
        return self.path.parent.parent if self.path.parent.name == "checkpoints" else None


def is_checkpoint(path: Path) -> bool:
    """Return True if a folder contains model/config.json, as every gpt-simple checkpoint does."""
    return (path / MODEL / CONFIG).is_file()


def saved_checkpoints(run: Path) -> list[Saved]:
    """Return the checkpoints of a run, oldest first, skipping incomplete or damaged ones.

    Among checkpoints of the same step, `final` comes last, and one written at a shutdown comes first, because it may lack the
    position in the data.
    """
    found = []
    for path in (run / "checkpoints").glob("*"):
        if _NAME.fullmatch(path.name) and (path / STATE).is_file():
            try:
                found.append(read_saved(path))
            except Unreadable:
                raise
            except CheckpointError:
                continue
    return sorted(found, key=lambda saved: (saved.step, ("shutdown", "regular", "final").index(saved.kind)))


def read_saved(path: Path) -> Saved:
    """Read a checkpoint's trainer_state.json; raise CheckpointError if it is damaged or of an unsupported version."""
    state = read_object(path / STATE)
    step, version = state.get("step"), state.get("schema_version", VERSION)
    if version != VERSION:
        raise CheckpointError(f"{path / STATE} has version {version!r:.40}, but ingot reads version {VERSION}; upgrade ingot")
    if type(step) is not int or step < 0:
        raise CheckpointError(f"{path / STATE} is damaged: step is {step!r:.60}, but must be a whole number >= 0")
    return Saved(path, step, state)


def read_model(path: Path) -> dict[str, Any]:
    """Read a checkpoint's settings as Ingot's `model` section; a larger data.max_length of the run replaces the context."""
    settings = model_settings(read_object(path / MODEL / CONFIG), str(path / MODEL / CONFIG))
    try:
        told = read_object(path.parent.parent / CONFIG)["data"]["max_length"]
    except (CheckpointError, KeyError, TypeError):
        return settings
    return {**settings, "context": max(settings["context"], told) if type(told) is int else settings["context"]}


def model_settings(keys: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Convert gpt-simple's keys to Ingot's `model` section; `where` names the source of the keys in error messages."""
    if unknown := sorted(keys.keys() - MODEL_KEYS.keys()):
        raise CheckpointError(f"{where} contains {unknown[0]!r:.60}, which is not a gpt-simple key")
    settings: dict[str, Any] = {ours: keys[key] for key, ours in MODEL_KEYS.items() if ours and key in keys}
    for name in ("vocab_size", "width", "layers", "heads", "context"):
        if type(settings.get(name)) is not int or settings[name] < 1:
            key = next(key for key, ours in MODEL_KEYS.items() if ours == name)
            raise CheckpointError(f"{where}: {key} is {settings.get(name)!r:.60}, but must be a whole number >= 1")
    for name, words in (("activation", ACTIVATIONS), ("mlp", MLPS)):
        if name in settings:
            settings[name] = words.get(settings[name], settings[name])
    if settings.get("rope_scaling") is None:
        settings["rope_factor"] = 1.0  # without a scaling type, gpt-simple ignores the factor
    return {"family": "llama", **settings}


def model_keys(settings: Mapping[str, Any], document_mask: bool = False) -> dict[str, Any]:
    """Convert the `model` section of an Ingot config to gpt-simple's keys; `document_mask` selects the attention mode."""
    theirs: dict[Any, str] = {ours: word for words in (ACTIVATIONS, MLPS) for word, ours in words.items()}
    keys = {key: settings.get(ours) for key, ours in MODEL_KEYS.items() if ours}
    keys |= {key: theirs.get(keys[key], keys[key]) for key in ("activation", "mlp_type")}
    return {**keys, "attention_mode": "sdpa_mask" if document_mask else "causal"}


def refuse_other_shapes(path: Path, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the architecture (except the context) differs between a checkpoint (`was`) and a run (`now`)."""
    before, after = model_keys(was), model_keys(now)
    changed = [key for key in ARCH_KEYS if key != "n_positions" and before[key] != after[key]]
    if changed:
        differences = "; ".join(f"model.{key} was {before[key]} and is {after[key]}" for key in changed)
        raise CheckpointError(f"{path} cannot be resumed: {differences}; undo the changes or choose another training.output_dir")


def tokenizer_folder(path: Path) -> Path | None:
    """Return the tokenizer folder of a checkpoint, or else of its run; return None if neither has one."""
    folders = (path / TOKENIZER, path.parent.parent / TOKENIZER)
    return next((folder for folder in folders if folder.is_dir() and any(folder.iterdir())), None)


def config_hash(keys: Mapping[str, Any]) -> str:
    """Return the hash of `keys` as gpt-simple computes it for trainer_state.json."""
    return "sha256:" + hashlib.sha256(json.dumps(keys, sort_keys=True).encode()).hexdigest()[:16]
