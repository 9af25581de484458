"""Write checkpoints and tokenizers in gpt-simple's formats, so that the original program can generate and resume from them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ingot.artifact.gpt_simple import (
    ARCH_KEYS,
    CONFIG,
    MODEL,
    SHUTDOWN,
    STATE,
    TOKENIZER,
    VERSION,
    WEIGHTS,
    config_hash,
    model_keys,
)
from ingot.artifact.hf_tokenizer import OURS, SENTENCEPIECE, SETTINGS, THEIRS, check_no_other_tokenizer, tokenizer_files
from ingot.backends.torch.state import adamw_state, shared_tensor
from ingot.compat.gpt_simple.config import GptSimpleConfig, all_keys
from ingot.compat.options import copied
from ingot.config.schema import Config
from ingot.data.tokenizers import from_spec
from ingot.data.tokenizers.hf_json import HFTokenizer
from ingot.data.tokenizers.sentencepiece import SentencePieceTokenizer
from ingot.errors import ConfigError
from ingot.runs.checkpoints import Checkpoint
from ingot.runs.state import utc_now
from ingot.runtime.files import replace_file, replace_folder, to_json, write_atomically
from ingot.runtime.tensors import TensorRecord

OPTIMIZER, SCHEDULER = "optimizer.bin", "scheduler.bin"
Keys = Mapping[str, Mapping[str, Any]]  # the values of gpt-simple's keys, by section and name


def write_checkpoint(
    target: Path, checkpoint: Checkpoint, keys: Keys, facts: Mapping[str, Any] | None = None, tokenizer: bool = False
) -> int:
    """Write an Ingot checkpoint atomically as a gpt-simple checkpoint folder; return its size in bytes.

    `keys` holds the values of gpt-simple's 59 keys; `facts` may hold wandb_run_id and resumed_from for trainer_state.json. With
    `tokenizer`, the tokenizer is written too, and a different tokenizer in the folder is an error.
    """
    section = checkpoint.progress["config"]["model"]
    if section["family"] != "llama":
        raise ConfigError(f"gpt-simple does not support the {section['family']} family; export this model with --format ingot")
    order, step, o = in_their_order(checkpoint.weights), checkpoint.step, keys["optimizer"]
    weights = {name: shared_tensor(checkpoint.weights[name]) for name in order}
    model = {**keys["model"], "vocab_size": weights["wte.weight"].shape[0]}
    groups, memory = optimizer_groups(checkpoint.weights, order), checkpoint.tensors.get("optimizer", {})
    peak, rate = o["learning_rate"], learning_rate(o, keys["training"]["max_steps"], step)
    optimizer = adamw_state(*groups, memory, o["weight_decay"], lr=peak, betas=(o["beta1"], o["beta2"]), eps=o["eps"])
    for group in optimizer["param_groups"]:
        group |= {"lr": rate, "initial_lr": peak}
    scheduler = {"base_lrs": [peak, peak], "last_epoch": step, "_step_count": step + 1, "_is_initial": False}
    scheduler |= {"_get_lr_called_within_step": False, "_last_lr": [rate, rate], "lr_lambdas": [{}, {}]}
    spec = checkpoint.progress.get("tokenizer") if tokenizer else None
    with replace_folder(target) as partial:
        (partial / MODEL).mkdir()
        write_atomically(partial / MODEL / CONFIG, to_json(model, indent=2) + "\n")
        for name, value in {f"{MODEL}/{WEIGHTS}": weights, OPTIMIZER: optimizer, SCHEDULER: scheduler}.items():
            try:
                with replace_file(partial / name) as file:
                    torch.save(value, file)
            except RuntimeError as error:  # torch raises RuntimeError on a full disk
                raise OSError(str(error).splitlines()[0]) from None
        if spec is not None:
            write_tokenizer(partial / TOKENIZER, spec, model["n_positions"])
        if tokenizer:
            check_no_other_tokenizer(target / TOKENIZER, {file.name for file in (partial / TOKENIZER).glob("*")})
        # Written last: like Ingot, the original gpt-simple treats a folder without this file as incomplete.
        write_atomically(partial / STATE, json.dumps(_state(checkpoint, keys, target.name, facts or {}), indent=2) + "\n")
        (target / STATE).unlink(missing_ok=True)  # marks an older checkpoint as incomplete while its files are replaced
        return sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())


def write_tokenizer(folder: Path, spec: Mapping[str, Any], context: int) -> bool:
    """Write a tokenizer; if gpt-simple does not support its kind, write it in Ingot's format and return False."""
    tokenizer, (files, _) = from_spec(spec), tokenizer_files(spec, context)
    if isinstance(tokenizer, SentencePieceTokenizer):
        files = {SENTENCEPIECE: tokenizer.contents, OURS: files[OURS]}
    elif isinstance(tokenizer, HFTokenizer):  # without Ingot's start token, which gpt-simple does not use
        files = {THEIRS: tokenizer.contents, SETTINGS: files[SETTINGS]}
    elif OURS in files:  # transformers would load the other files and then encode texts without a start token
        files = {OURS: files[OURS]}
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        write_atomically(folder / name, content)
    return list(files) != [OURS]


def learning_rate(optimizer: Mapping[str, Any], max_steps: int, step: int) -> float:
    """Return the learning rate of the original gpt-simple after `step` steps; its cosine rises again after the decay ends."""
    peak, warmup, floor = optimizer["learning_rate"], optimizer["warmup_steps"], optimizer["min_lr_ratio"]
    if step < warmup:
        return float(peak * step / warmup)
    decay = optimizer["decay_steps"] if optimizer["decay_steps"] is not None else max_steps - warmup
    done = (step - warmup) / max(1, decay)
    return float(peak * max(0.0, floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))))


def in_their_order(names: Mapping[str, Any]) -> list[str]:
    """Sort parameter names as the original gpt-simple does: the two norms of a block come before its other parameters."""
    order = ["wte", "h", "ln_f", "lm_head"]

    def position(name: str) -> tuple[int, ...]:
        top, *parts = name.split(".")
        return order.index(top), *((int(parts[0]), ["ln_1", "ln_2", "attn", "mlp"].index(parts[1])) if top == "h" else ())

    return sorted(names, key=position)  # stable sort: keeps the order within a module


def optimizer_groups(weights: Mapping[str, TensorRecord], order: list[str]) -> tuple[list[str], list[str]]:
    """Return the parameter names of the two optimizer groups: matrices, which get weight decay, and all others."""
    return [n for n in order if len(weights[n].shape) >= 2], [n for n in order if len(weights[n].shape) < 2]


def _state(checkpoint: Checkpoint, keys: Keys, name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of trainer_state.json; the loss is omitted if it is unknown."""
    known, step = checkpoint.progress, checkpoint.step
    loss = {} if known.get("loss") is None else {"loss": known["loss"]}
    rate, seconds = learning_rate(keys["optimizer"], keys["training"]["max_steps"], step), known["elapsed_seconds"]
    curriculum, phase, before = keys["data"].get("curriculum") or [], 0, 0  # `before`: tokens in earlier phases
    while phase + 1 < len(curriculum) and known["tokens"] >= before + curriculum[phase]["duration_tokens"]:
        before += curriculum[phase]["duration_tokens"]
        phase += 1
    consumed, mix = (known["tokens"] - before, dict(curriculum[phase]["mix"])) if curriculum else (0, {})
    return {
        "schema_version": VERSION,
        "step": step,
        "tokens_trained": known["tokens"],
        "wandb_run_id": facts.get("wandb_run_id"),
        "config_hash": config_hash(keys),
        "model_arch_hash": config_hash({key: keys["model"].get(key) for key in ARCH_KEYS}),  # vocab_size before padding
        "curriculum": {"phase_idx": phase, "phase_tokens_consumed": consumed, "current_mix": mix},
        "timing": {"wallclock_seconds_elapsed": seconds, "last_save_duration_seconds": 0.0, "saved_at": utc_now()},
        "metrics": {**loss, "learning_rate": rate, "grad_norm": 0.0, "tokens_per_sec": 0.0},
        "lineage": {"resumed_from": facts.get("resumed_from"), "is_shutdown_checkpoint": name.endswith(SHUTDOWN)},
    }


def keys_of(config: Config) -> dict[str, dict[str, Any]]:
    """Return the values of gpt-simple's 59 keys for an Ingot config; keys without a matching setting keep their defaults."""
    keys = GptSimpleConfig().to_dict()
    for theirs, ours in copied(all_keys()).items():
        (section, name), (our_section, setting) = theirs.split("."), ours.split(".")
        value = getattr(getattr(config, our_section), setting, None)
        if value not in (None, "auto"):
            keys[section][name] = value
    t, o, rows, steps = config.training, config.optimizer, config.rows_per_step, config.training.max_steps or 1
    micro_batch = rows if t.micro_batch == "auto" else min(t.micro_batch, rows)
    model = config.model.model_dump() | {"context": config.model.context or config.data.seq_len}
    keys["model"] = model_keys(model, config.data.document_mask) | {"vocab_size": None}
    keys["data"] |= {"packing": config.data.sampling != "document", "tokenizer": config.data.tokenizer or "gpt2"}
    keys["optimizer"]["decay_steps"] = max(1, (o.decay_steps or steps) - o.warmup_steps)
    keys["training"] |= {
        "max_steps": steps,
        "per_device_batch_size": micro_batch,
        "gradient_checkpointing": bool(t.gradient_checkpointing),
        "gradient_accumulation_steps": -(-rows // micro_batch),
        "keep_last_k": t.keep_last,
        "keep_milestone_every": t.keep_every or None,
    }
    return keys
