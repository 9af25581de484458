"""gpt-simple's checkpoint folders: written so that its own program generates from them and trains on, and read to go on here.

Exact resume never relies on them. What they hold is opened with torch's weights_only; the place in its data is pickled there as
objects of its own classes, which are built as plain records, so nothing in a folder can run.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ingot.artifact.gpt_simple import (
    CONFIG,
    MODEL,
    SHUTDOWN,
    STATE,
    TOKENIZER,
    VERSION,
    WEIGHTS,
    Saved,
    arch_hash,
    config_hash,
    read_model,
)
from ingot.artifact.hf_tokenizer import OURS, SENTENCEPIECE, check_no_other_tokenizer, tokenizer_files
from ingot.backends.torch.state import adamw_memory, adamw_state, load_saved, shared_tensor, state_records
from ingot.data.formats.gpt_simple_folder import read_index
from ingot.data.loading.rows import Mask
from ingot.data.tokenizers import from_spec
from ingot.data.tokenizers.sentencepiece import SentencePieceTokenizer
from ingot.errors import CheckpointError, ConfigError
from ingot.runs.checkpoints import Checkpoint
from ingot.runs.state import utc_now
from ingot.runtime.files import replace_folder, to_json, write_atomically
from ingot.runtime.tensors import TensorRecord

OPTIMIZER, SCHEDULER, CURSORS = "optimizer.bin", "scheduler.bin", "dataloader_state"
CURSOR_VERSION = 2
ALL = -1  # rows of a file that was read to its end
Keys = Mapping[str, Mapping[str, Any]]  # its four sections


def write_checkpoint(
    target: Path, checkpoint: Checkpoint, keys: Keys, facts: Mapping[str, Any] | None = None, tokenizer: bool = False
) -> int:
    """Write a checkpoint of ours as one of gpt-simple's, whole or not at all, and return its bytes.

    `keys` are its 59 as they were configured; `facts` go over what trainer_state.json says; `tokenizer`: put it in too, for a
    folder that belongs to no run, and keep other files that are there.
    """
    section = checkpoint.progress["config"]["model"]
    if section["family"] != "llama":
        raise ConfigError(f"a model of the family {section['family']} has no place in gpt-simple's folders; export it as ingot")
    weights = {name: shared_tensor(checkpoint.weights[name]) for name in _in_their_order(checkpoint.weights)}
    model = {**keys["model"], "vocab_size": weights["wte.weight"].shape[0]}
    optimizer, scheduler = _optimizer_and_scheduler(checkpoint, keys["optimizer"], keys["training"])
    spec = checkpoint.progress.get("tokenizer") if tokenizer else None
    with replace_folder(target, keep_others=tokenizer) as partial:
        (partial / MODEL).mkdir()
        _save(partial / MODEL / WEIGHTS, weights)
        write_atomically(partial / MODEL / CONFIG, to_json(model, indent=2) + "\n")
        _save(partial / OPTIMIZER, optimizer)
        _save(partial / SCHEDULER, scheduler)
        if spec is not None:
            write_tokenizer(partial / TOKENIZER, spec, model["n_positions"])
        if tokenizer:
            check_no_other_tokenizer(target / TOKENIZER, {file.name for file in (partial / TOKENIZER).glob("*")})
        # Last: a folder without it is one that a kill left, to the original too.
        write_atomically(partial / STATE, json.dumps(_state(checkpoint, keys, target.name, facts or {}), indent=2) + "\n")
        return sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())


def write_tokenizer(folder: Path, spec: Mapping[str, Any], context: int) -> None:
    """Write a tokenizer as files that gpt-simple opens; kinds that it does not have go along as a file that only ingot reads."""
    files, _ = tokenizer_files(spec, context)
    if OURS in files:  # transformers would open what lies beside it, and put no mark in front of a text
        files = {OURS: files[OURS]}
    tokenizer = from_spec(spec)
    if isinstance(tokenizer, SentencePieceTokenizer):
        files[SENTENCEPIECE] = tokenizer.contents
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        write_atomically(folder / name, content)


def theirs_reads(spec: Mapping[str, Any]) -> bool:
    """Whether gpt-simple has this kind of tokenizer."""
    return spec.get("kind") == "sentencepiece" or OURS not in tokenizer_files(spec, 1)[0]


def learning_rate(optimizer: Mapping[str, Any], max_steps: int, step: int) -> float:
    """The rate that the original's next step has after `step` steps; its cosine rises again after its end."""
    peak, warmup, floor = optimizer["learning_rate"], optimizer["warmup_steps"], optimizer["min_lr_ratio"]
    if step < warmup:
        return float(peak * step / max(1, warmup))
    decay = optimizer["decay_steps"] if optimizer["decay_steps"] is not None else max_steps - warmup
    done = (step - warmup) / max(1, decay)
    return float(peak * max(0.0, floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))))


def _in_their_order(names: Mapping[str, Any]) -> list[str]:
    """The parameters as the original numbers them: in a block both norms come first."""
    places = {"ln_1": 0, "ln_2": 1, "attn": 2, "mlp": 3}

    def place(name: str) -> tuple[int, int, int]:
        parts = name.split(".")
        if parts[0] != "h":
            return ({"wte": 0, "ln_f": 2}.get(parts[0], 3), 0, 0)
        return (1, int(parts[1]), places[parts[2]])

    return sorted(names, key=place)  # stable: inside a module the order is the same


def _groups(weights: Mapping[str, TensorRecord], order: list[str]) -> tuple[list[str], list[str]]:
    """The names of its two groups: matrices, whose weights decay, and the rest."""
    return [n for n in order if len(weights[n].shape) >= 2], [n for n in order if len(weights[n].shape) < 2]


def _optimizer_and_scheduler(
    checkpoint: Checkpoint, o: Mapping[str, Any], training: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    weights, step = checkpoint.weights, checkpoint.step
    groups = _groups(weights, _in_their_order(weights))
    betas = (o["beta1"], o["beta2"])
    memory = checkpoint.tensors.get("optimizer", {})
    peak, rate = o["learning_rate"], learning_rate(o, training["max_steps"], step)
    state = adamw_state(*groups, memory, o["weight_decay"], lr=peak, betas=betas, eps=o["eps"])
    for group in state["param_groups"]:
        group |= {"lr": rate, "initial_lr": peak}
    scheduler = {"base_lrs": [peak, peak], "last_epoch": step, "_step_count": step + 1, "_is_initial": False}
    scheduler |= {"_get_lr_called_within_step": False, "_last_lr": [rate, rate], "lr_lambdas": [{}, {}]}
    return state, scheduler


def _state(checkpoint: Checkpoint, keys: Keys, name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What trainer_state.json says; a loss that is not known is left out, because JSON has no infinity."""
    known, step = checkpoint.progress, checkpoint.step
    loss = {} if known.get("loss") is None else {"loss": known["loss"]}
    rate = learning_rate(keys["optimizer"], keys["training"]["max_steps"], step)
    return {
        "schema_version": VERSION,
        "step": step,
        "tokens_trained": known["tokens"],
        "wandb_run_id": facts.get("wandb_run_id"),
        "config_hash": config_hash(keys),
        "model_arch_hash": arch_hash(keys["model"]),
        "curriculum": phase_of(keys["data"].get("curriculum"), known["tokens"]),
        "timing": {
            "wallclock_seconds_elapsed": known["elapsed_seconds"],
            "last_save_duration_seconds": 0.0,
            "saved_at": utc_now(),
        },
        "metrics": {**loss, "learning_rate": rate, "grad_norm": 0.0, "tokens_per_sec": 0.0},
        "lineage": {"resumed_from": facts.get("resumed_from"), "is_shutdown_checkpoint": name.endswith(SHUTDOWN)},
    }


def phase_of(curriculum: Any, tokens: int) -> dict[str, Any]:
    """The phase that a run is in after so many tokens, how many of them are of this phase, and its mix."""
    if not curriculum:
        return {"phase_idx": 0, "phase_tokens_consumed": 0, "current_mix": {}}
    number, before = 0, 0
    while number + 1 < len(curriculum) and tokens >= before + curriculum[number]["duration_tokens"]:
        before += curriculum[number]["duration_tokens"]
        number += 1
    return {"phase_idx": number, "phase_tokens_consumed": tokens - before, "current_mix": dict(curriculum[number]["mix"])}


def _save(path: Path, value: Any) -> None:
    """torch.save that reaches the disk, with its hidden errors told."""
    try:
        torch.save(value, path)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except RuntimeError as error:  # torch hides a full disk in it
        raise OSError(str(error).splitlines()[0]) from None


def read_state(saved: Saved) -> tuple[dict[str, TensorRecord], dict[str, TensorRecord], dict[str, Any], str | None]:
    """Weights, AdamW's memory by our names, the section `model`, and why there is no memory if there is none."""
    path = saved.path / MODEL / WEIGHTS
    weights = state_records(load_saved(path), path)
    settings = read_model(saved.path)
    try:
        optimizer = load_saved(saved.path / OPTIMIZER)
    except CheckpointError as error:
        if (saved.path / OPTIMIZER).exists():
            raise
        return weights, {}, settings, str(error)
    orders = [_groups(weights, list(weights)), _groups(weights, _in_their_order(weights))]
    memory, problem = adamw_memory(optimizer, orders, weights)
    return weights, memory, settings, problem


class _Record:
    """A plain record in the place of an object of gpt-simple's; what it holds is in its attributes."""


CLASSES = {f"gpt_simple.data.{name}": _Record for name in ("WorkerDataState", "PerBucketCursor")}


def read_cursors(path: Path) -> dict[str, dict[int, int]] | None:
    """How many rows of each file had been read, by bucket and number of the file. None: the folder does not say.

    The files of all ranks are taken together, as the original does; one without any worker says nothing.
    """
    files = sorted((path / CURSORS).glob("rank_*.pkl")) or [file for file in [path / f"{CURSORS}.pt"] if file.is_file()]
    found: dict[str, dict[int, int]] = {}
    known = False
    for file in files:
        state = load_saved(file, CLASSES)
        with suppress(AttributeError, TypeError, ValueError, KeyError):
            if state["schema_version"] != CURSOR_VERSION:
                continue
            for worker in state["worker_states"].values():
                known = True
                for bucket, cursor in _field(worker, "bucket_cursors").items():
                    progress = {int(number): int(rows) for number, rows in _field(cursor, "file_progress").items()}
                    count_rows(found, {str(bucket): progress})
            continue
        raise CheckpointError(f"{file} is damaged: it does not say where the data had been read to")
    return found if known else None


def _field(record: Any, name: str) -> Any:
    return record[name] if isinstance(record, dict) else vars(record)[name]


def count_rows(known: dict[str, dict[int, int]], more: Mapping[str, Mapping[int, int]]) -> None:
    """Add what another worker or checkpoint has read: of each file the most rows count, and all are more than any."""
    for bucket, files in more.items():
        counts = known.setdefault(bucket, {})
        for number, rows in files.items():
            before = counts.get(number, 0)
            counts[number] = ALL if ALL in (before, rows) else max(before, rows)


# Where the original stood in its data: from the rows it had read of each file to the documents in them.

SEED = 42  # of its data order, whatever training.seed is
BUFFER = 256


def documents_read(data: Path, cursors: Mapping[str, Mapping[int, int]], max_length: int, packing: bool) -> dict[str, Mask]:
    """Which documents of each bucket lie in the rows that were read, by the numbers they have in the bucket."""
    masks = {}
    for bucket, files in cursors.items():
        paths = sorted((data / "train" / bucket).glob("*.bin"))
        if unknown := [number for number in files if not 0 <= number < len(paths)]:
            raise CheckpointError(
                f"the checkpoint has read file {unknown[0] + 1} of {data / 'train' / bucket}, which has {len(paths)}; it is of "
                "other data: give the data that the run began with"
            )
        parts = [np.empty(0, np.bool_)]
        for number, path in enumerate(paths):
            lengths = np.diff(read_index(path.with_suffix(".idx"))[1])
            parts.append(_read_of_file(lengths, number, files.get(number, 0), max_length, packing))
        masks[bucket] = np.concatenate(parts)
    return masks


def _read_of_file(lengths: NDArray[np.int64], number: int, rows: int, max_length: int, packing: bool) -> Mask:
    mask = np.full(len(lengths), rows == ALL)
    for documents in islice(file_rows(lengths, number, max_length, packing), max(0, rows)):
        mask[documents] = True
    return mask


def file_rows(lengths: NDArray[np.int64], number: int, max_length: int, packing: bool = True) -> Iterator[list[int]]:
    """The documents of each row of a file, in the order in which the original reads them."""
    order = np.arange(len(lengths))
    np.random.RandomState(hash((SEED, number)) % 2**31).shuffle(order)  # its own generator, so the same order
    if not packing:
        yield from ([document] for document in order.tolist())
        return
    cut = np.minimum(lengths, max_length)
    for start in range(0, len(order), BUFFER):
        documents = order[start : start + BUFFER]
        by_length = documents[np.argsort(-lengths[documents], kind="stable")]
        yield from _first_fit(by_length.tolist(), cut[by_length].tolist(), max_length)


def _first_fit(documents: list[int], lengths: list[int], room: int) -> list[list[int]]:
    rows: list[list[int]] = []
    filled: list[int] = []
    for document, length in zip(documents, lengths, strict=True):
        place = next((row for row, tokens in enumerate(filled) if tokens + length <= room), None) if length < room else None
        if place is None:
            rows.append([document])
            filled.append(length)
        else:
            rows[place].append(document)
            filled[place] += length
    return rows
