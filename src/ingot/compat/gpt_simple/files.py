"""gpt-simple's files beside ours, for its users' scripts and for the original itself, written during a run.

config.json, tokenizer/, .run_state.json, and a folder (checkpoint-N, checkpoint-N-shutdown or final) for every checkpoint that
the original would have written. The original generates and resumes from these folders; our own resume uses our checkpoints.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ingot.artifact.gpt_simple import (
    CONFIG,
    FINAL,
    MODEL,
    RUN_STATE,
    SHUTDOWN,
    STATE,
    STOP_FLAG,
    TOKENIZER,
    VERSION,
    WEIGHTS,
    Saved,
    arch_hash,
    config_hash,
    model_keys,
    saved_checkpoints,
)
from ingot.artifact.hf_tokenizer import OURS, SENTENCEPIECE, check_no_other_tokenizer, tokenizer_files
from ingot.backends.torch.state import adamw_state, shared_tensor
from ingot.compat.gpt_simple.config import GptSimpleConfig, all_keys
from ingot.compat.options import copied
from ingot.config.schema import Config
from ingot.data.tokenizers import from_spec
from ingot.data.tokenizers.sentencepiece import SentencePieceTokenizer
from ingot.errors import CheckpointError, ConfigError, IngotError, RunError, Setting
from ingot.inference.model import Weights, as_checkpoint
from ingot.runs.checkpoints import Checkpoint, load_checkpoint, read_kind
from ingot.runs.folder import WANDB_ID, Kind, RunFolder, saved_steps, step_of
from ingot.runs.reporter import BeginReport, Reporter, StepReport
from ingot.runs.state import read_state, utc_now
from ingot.runs.tracking import read_id
from ingot.runtime.files import read_dict, replace_folder, to_json, write_atomically, writing
from ingot.runtime.processes import is_alive
from ingot.runtime.tensors import TensorRecord

OPTIMIZER, SCHEDULER = "optimizer.bin", "scheduler.bin"
LEFTOVER = re.compile(rf"\.({FINAL}|checkpoint-\d+.*)\.[0-9a-f]{{8}}\.(tmp|old)")  # left by a kill during a write
STATUSES = {"failed": "error"}  # gpt-simple's words for a status
FRESH_SECONDS = 300.0  # the original writes its state every logging_steps, and clocks of hosts differ
POLL_SECONDS = 0.5  # between two looks for the flag file: a network disk answers slowly
Keys = Mapping[str, Mapping[str, Any]]  # gpt-simple's four sections


def refuse_strangers(folder: Path) -> None:
    """Refuse a folder with a config.json that neither gpt-simple nor we wrote: it would be overwritten."""
    if not (folder / CONFIG).is_file() or (folder / RUN_STATE).is_file():
        return
    if not {"model", "training"} <= (read_dict(folder / CONFIG) or {}).keys():
        what = f"{folder} holds {CONFIG}, which neither gpt-simple nor Ingot wrote"
        raise CheckpointError(what, Setting("training.output_dir"), advice="choose another {0}")


def refuse_live_original(folder: Path) -> None:
    """Refuse a folder in which the original gpt-simple trains: each of the two would delete the other's checkpoints.

    Its state names no host, so a process that is not found here may still train on another one while the state is fresh. A run
    of ours writes the same file; its own lock keeps others out, and a killed one may resume at once.
    """
    state, ours = read_dict(folder / RUN_STATE) or {}, read_state(folder)
    try:
        pid, updated = int(state["pid"]), datetime.fromisoformat(state["updated_at"])
        written_by_us = ours is not None and (ours.pid == pid or datetime.fromisoformat(ours.updated_at) >= updated)
    except (KeyError, TypeError, ValueError):
        return  # the original writes both, the time with its zone
    if state.get("status") != "running" or written_by_us:
        return
    age = time.time() - updated.timestamp()
    output_dir = Setting("training.output_dir")
    if pid > 0 and pid != os.getpid() and is_alive(pid, age):
        what = f"the original gpt-simple, process {pid}, is training in {folder}"
        raise RunError(what, output_dir, advice="stop it first, or choose another {0}")
    if age < FRESH_SECONDS:
        raise RunError(
            f"the original gpt-simple wrote {folder / RUN_STATE} {max(0.0, age):.0f} s ago and may be training on another host",
            output_dir,
            advice=f"stop it first, or choose another {{0}}; if it is dead, delete {folder / RUN_STATE}",
        )


class RunFiles(Reporter):
    """Writes gpt-simple's files into a run folder, on the first rank.

    `keys` are its 59 keys after all overrides, `tokenizer` is the spec of the run's tokenizer. If a file cannot be written, a
    warning is printed, training continues, and `failure` holds the error until a later save succeeds. gpt-simple's flag file
    becomes our stop request, unless it is older than the session, which began at the unix time `began`.
    """

    def __init__(
        self,
        folder: Path,
        keys: Keys,
        tokenizer: Mapping[str, Any] | None,
        warn: Callable[[str], None],
        began: float = 0.0,
    ) -> None:
        self._folder, self._keys, self._tokenizer, self._warn = folder, keys, tokenizer, warn
        self._losses: list[float] = []  # since the last log line
        self._resumed_from: str | None = None
        self._state: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._flag, self._began, self._polled_at = folder / STOP_FLAG, began, -POLL_SECONDS
        self.failure: CheckpointError | None = None

    def begin(self, report: BeginReport) -> None:
        saved_before = saved_checkpoints(self._folder)
        newest = next((saved for saved in reversed(saved_before) if saved.step <= report.resumed_at), None)
        self._resumed_from = str(newest.path) if newest is not None and newest.step == report.resumed_at else None
        self._state = {
            "status": "running",
            "pid": os.getpid(),
            "started_at": now(),
            "updated_at": now(),
            "global_step": report.resumed_at,
            "max_steps": self._keys["training"]["max_steps"],
            "learning_rate": 0.0,
            "tokens_trained": newest.state.get("tokens_trained", 0) if newest is not None else 0,
            "tokens_per_sec": 0.0,
            "error": None,
            "latest_checkpoint": str(newest.path) if newest is not None else None,
            "config_path": str(self._folder / CONFIG),
        }
        with writing(self._folder):
            for leftover in self._folder.glob("checkpoints/.*"):
                if LEFTOVER.fullmatch(leftover.name):
                    shutil.rmtree(leftover, ignore_errors=True)
            write_atomically(self._folder / CONFIG, json.dumps(self._keys, indent=2) + "\n")
            self._write_tokenizer()
            self._write_state()
        self._catch_up(report.resumed_at)
        with suppress(OSError):
            if self._flag.stat().st_mtime < self._began:
                self._flag.unlink()
        self._pass_on_flag()

    def step(self, report: StepReport, log: bool) -> None:
        self._pass_on_flag()
        self._losses.append(report.loss)
        if report.step % self._keys["training"]["logging_steps"]:
            return
        self._update(
            global_step=report.step,
            loss=sum(self._losses) / len(self._losses),
            learning_rate=report.learning_rate,
            tokens_trained=report.tokens,
            tokens_per_sec=report.tokens_per_second,
        )
        self._losses = []

    def saved(self, path: Path, kind: Kind = "regular") -> None:
        try:
            self._write_theirs(path, kind)
            self.failure = None
        except (IngotError, OSError) as error:  # this runs in a thread: training continues, and the run ends with the error
            self.failure = CheckpointError(
                f"cannot write {path.name} as gpt-simple's: {getattr(error, 'strerror', None) or error}"
            )
            self._warn(f"{self.failure}; training continues, and {path} is complete")

    def end(self, result: Any) -> None:
        with suppress(OSError):
            self._flag.unlink(missing_ok=True)
        self._update(
            status=STATUSES.get(result.status, result.status),
            global_step=result.total_steps,
            tokens_trained=result.total_tokens,
            **({} if result.final_loss is None else {"loss": self._state.get("loss", result.final_loss)}),
        )

    def failed(self, error: BaseException) -> None:
        """Record the error that ended the session, which the original's `status` shows."""
        if self._state:
            self._update(status="error", error="".join(traceback.format_exception(error)))

    def _pass_on_flag(self) -> None:
        """Turn gpt-simple's flag file into our stop request; the flag file is removed when the run ends."""
        if time.monotonic() - self._polled_at >= POLL_SECONDS:
            self._polled_at = time.monotonic()
            if self._flag.is_file():
                with suppress(CheckpointError):  # the disk refuses: the next step tries again
                    RunFolder(self._folder).ask_to_stop()

    def _write_theirs(self, path: Path, kind: Kind) -> None:
        """Write our checkpoint as the folders that the original would have written, and delete those it would not keep."""
        step, training = step_of(path), self._keys["training"]
        names = [f"checkpoint-{step}"] if step % training["save_steps"] == 0 and kind != "shutdown" else []
        names += {"regular": [], "shutdown": [f"checkpoint-{step}{SHUTDOWN}"], "final": [FINAL]}[kind]
        folder = path.parent
        names = [name for name in names if name == FINAL or not (folder / name).exists()]
        if not names:
            return
        checkpoint = load_checkpoint(path)
        facts = {"wandb_run_id": read_id(self._folder / WANDB_ID), "resumed_from": self._resumed_from}
        for name in names:
            write_checkpoint(folder / name, checkpoint, self._keys, facts)
        rename_final(saved_checkpoints(self._folder), step)
        for saved in not_kept(saved_checkpoints(self._folder), training["keep_last_k"], training["keep_milestone_every"]):
            shutil.rmtree(saved.path, ignore_errors=True)
        self._update(latest_checkpoint=str(folder / names[-1]))

    def _catch_up(self, step: int) -> None:
        """Write the folder of the checkpoint that this session resumes from, if a kill came before it was written."""
        ours = saved_steps(self._folder / "checkpoints").get(step)
        newest = max((saved.step for saved in saved_checkpoints(self._folder)), default=0)
        if ours is not None and newest < step:
            self.saved(ours, read_kind(ours))

    def _write_tokenizer(self) -> None:
        folder = self._folder / TOKENIZER
        if self._tokenizer is None or (folder.is_dir() and any(folder.iterdir())):
            return  # the original writes it once per run, too
        write_tokenizer(folder, self._tokenizer, self._keys["data"]["max_length"])
        if not theirs_reads(self._tokenizer):
            kind = self._tokenizer["kind"]
            self._warn(
                f"gpt-simple has no {kind} tokenizer: only ingot reads {folder}, and the original cannot generate from this run"
            )

    def _update(self, **values: Any) -> None:
        """Write the latest values to .run_state.json; training continues if the disk refuses."""
        with self._lock:  # the loop and the thread that saves both write
            self._state |= values
            try:
                self._write_state()
            except OSError as error:
                self._warn(f"cannot write {self._folder / RUN_STATE}: {error.strerror or error}; training continues")

    def _write_state(self) -> None:
        self._state["updated_at"] = now()
        durable = self._state["status"] != "running"
        write_atomically(self._folder / RUN_STATE, to_json(self._state, indent=2) + "\n", durable=durable)


def not_kept(saved: Sequence[Saved], keep_last: int | None, keep_every: int | None) -> list[Saved]:
    """Return the checkpoints to delete: all but the newest regular ones, the newest shutdown one, final, and milestones."""
    if keep_last is None:
        return []
    stops = [one for one in saved if one.name.endswith(SHUTDOWN)]
    regular = [one for one in saved if one.name != FINAL and one not in stops]
    kept = [*regular[-max(1, keep_last) :], *stops[-1:], *(one for one in saved if one.name == FINAL)]
    return [one for one in saved if one not in kept and not (one in regular and keep_every and one.step % keep_every == 0)]


def rename_final(saved: Sequence[Saved], step: int) -> None:
    """Rename `final` to its step after a run has continued: the original would take it for the newest checkpoint forever."""
    for old in (one for one in saved if one.name == FINAL and one.step < step):
        name = old.path.with_name(f"checkpoint-{old.step}")
        if name.exists():
            shutil.rmtree(old.path, ignore_errors=True)
        else:
            old.path.rename(name)


def now() -> str:
    """Return the time in the format of gpt-simple's files."""
    return datetime.now(UTC).isoformat(timespec="seconds")


# Checkpoint folders


def write_checkpoint(
    target: Path, checkpoint: Checkpoint, keys: Keys, facts: Mapping[str, Any] | None = None, tokenizer: bool = False
) -> int:
    """Write our checkpoint as a gpt-simple folder, atomically, and return its size in bytes.

    `keys` are gpt-simple's 59 keys of the run; `facts` are added to trainer_state.json. With `tokenizer`, for a folder outside a
    run, the tokenizer is written too and other files in the folder are kept.
    """
    section = checkpoint.progress["config"]["model"]
    if section["family"] != "llama":
        raise ConfigError(f"gpt-simple has no models of the family {section['family']}; export it with --format ingot")
    weights = {name: shared_tensor(checkpoint.weights[name]) for name in in_their_order(checkpoint.weights)}
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
        # Written last: for the original too, a folder without it is incomplete.
        write_atomically(partial / STATE, json.dumps(_state(checkpoint, keys, target.name, facts or {}), indent=2) + "\n")
        return sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())


def write_tokenizer(folder: Path, spec: Mapping[str, Any], context: int) -> None:
    """Write a tokenizer as files that gpt-simple opens; kinds that it does not have are written in our own format."""
    files, _ = tokenizer_files(spec, context)
    if OURS in files:  # transformers would read the other files, and then encode texts without their start mark
        files = {OURS: files[OURS]}
    tokenizer = from_spec(spec)
    if isinstance(tokenizer, SentencePieceTokenizer):
        files[SENTENCEPIECE] = tokenizer.contents
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        write_atomically(folder / name, content)


def theirs_reads(spec: Mapping[str, Any]) -> bool:
    """Return True if gpt-simple has this kind of tokenizer."""
    return spec.get("kind") == "sentencepiece" or OURS not in tokenizer_files(spec, 1)[0]


def learning_rate(optimizer: Mapping[str, Any], max_steps: int, step: int) -> float:
    """Return the original's learning rate after `step` steps; its cosine rises again after its end."""
    peak, warmup, floor = optimizer["learning_rate"], optimizer["warmup_steps"], optimizer["min_lr_ratio"]
    if step < warmup:
        return float(peak * step / max(1, warmup))
    decay = optimizer["decay_steps"] if optimizer["decay_steps"] is not None else max_steps - warmup
    done = (step - warmup) / max(1, decay)
    return float(peak * max(0.0, floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))))


def in_their_order(names: Mapping[str, Any]) -> list[str]:
    """Return parameter names in the original's order: within a block, both norms come first."""
    order = {"ln_1": 0, "ln_2": 1, "attn": 2, "mlp": 3}

    def position(name: str) -> tuple[int, int, int]:
        parts = name.split(".")
        if parts[0] != "h":
            return ({"wte": 0, "ln_f": 2}.get(parts[0], 3), 0, 0)
        return (1, int(parts[1]), order[parts[2]])

    return sorted(names, key=position)  # stable: the order within a module stays


def optimizer_groups(weights: Mapping[str, TensorRecord], order: list[str]) -> tuple[list[str], list[str]]:
    """Return the names of the two optimizer groups: matrices, which have weight decay, and the rest."""
    return [n for n in order if len(weights[n].shape) >= 2], [n for n in order if len(weights[n].shape) < 2]


def _optimizer_and_scheduler(
    checkpoint: Checkpoint, o: Mapping[str, Any], training: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    weights, step = checkpoint.weights, checkpoint.step
    groups = optimizer_groups(weights, in_their_order(weights))
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
    """Return the contents of trainer_state.json, without the loss if it is unknown: JSON has no infinity."""
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
    """Return the phase of a run after `tokens` tokens, how many of them belong to it, and its mix."""
    if not curriculum:
        return {"phase_idx": 0, "phase_tokens_consumed": 0, "current_mix": {}}
    number, before = 0, 0
    while number + 1 < len(curriculum) and tokens >= before + curriculum[number]["duration_tokens"]:
        before += curriculum[number]["duration_tokens"]
        number += 1
    return {"phase_idx": number, "phase_tokens_consumed": tokens - before, "current_mix": dict(curriculum[number]["mix"])}


def _save(path: Path, value: Any) -> None:
    """Save with torch.save and fsync; an error of the disk is raised as OSError."""
    try:
        torch.save(value, path)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except RuntimeError as error:  # torch raises this for a full disk
        raise OSError(str(error).splitlines()[0]) from None


def export_folder(source: Weights, folder: Path) -> int:
    """Write a llama model as a gpt-simple checkpoint with its tokenizer, for `ingot export`, and return its size in bytes."""
    return write_checkpoint(folder, as_checkpoint(source), keys_of(source.config), tokenizer=True)


def keys_of(config: Config) -> dict[str, dict[str, Any]]:
    """Return gpt-simple's 59 keys of a config; keys that it says nothing about have their defaults."""
    keys = GptSimpleConfig().to_dict()
    for theirs, ours in copied(all_keys()).items():
        (section, name), (our_section, setting) = theirs.split("."), ours.split(".")
        value = getattr(getattr(config, our_section), setting, None)
        if value not in (None, "auto"):
            keys[section][name] = value
    t, o, rows = config.training, config.optimizer, config.rows_per_step
    micro_batch = rows if t.micro_batch == "auto" else min(t.micro_batch, rows)
    steps = t.max_steps or 1
    model = config.model.model_dump()
    model["context"] = model["context"] or config.data.seq_len
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
