"""From gpt-simple's keys to one Config of ours: what only gpt-simple says is translated here and known nowhere else.

Its batch is per rank: more ranks make a larger step. Ours is the step's, over all ranks, so the number of ranks at the first
start decides it, and a run that goes on with another number keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from ingot.artifact.gpt_simple import is_checkpoint, model_settings, read_saved
from ingot.compat.gpt_simple.config import Config
from ingot.compat.gpt_simple.names import SETTINGS, key_name
from ingot.config.loading import ResolvedConfig, load_config
from ingot.data.tokenizers import Tokenizer, open_tokenizer
from ingot.errors import CheckpointError, ConfigError, IngotError
from ingot.runs.checkpoints import resume_point
from ingot.runs.folder import named_path, saved_steps
from ingot.runtime.files import user_path

DATA_SEED = 42  # fixed there; training.seed decides weights and dropout alone
VOCAB_MULTIPLE = 128
EVAL_BATCHES = 100  # where max_eval_batches is null
TOKENIZERS = ("gpt2", "byte", "char")  # that need no file
PRECISIONS = {None: "auto", "no": "fp32"}
ALREADY_READ = "already-read.json"  # of a run that the original began: documents that it has read
RESUMES = {"scratch": "never"}


def translate(
    config: Config, world_size: int = 1, kept_tokens: int | None = None, tokenizer: Tokenizer | None = None
) -> ResolvedConfig:
    """The config of a run with these keys on so many ranks; `kept_tokens` are those of a step of the run it goes on with.

    `tokenizer` is that of the keys, where it is open already.
    """
    config.check()
    settings = {ours: _value(config, theirs) for theirs, ours in SETTINGS.items()}
    settings |= _computed(config, tokenizer or named_tokenizer(config))
    settings["training.tokens_per_step"] = kept_tokens or tokens_per_step(config, world_size)
    settings["data.already_read"] = _already_read(config) if kept_tokens is not None else None
    if decided := sorted(settings.keys() & config.settings.keys()):
        raise ConfigError(f"{decided[0]} follows from gpt-simple's keys and cannot be set besides")
    try:
        return load_config(overrides=config.settings, python=settings, environment={})
    except ConfigError as error:
        raise ConfigError(error.render(key_name)) from None


def tokens_per_step(config: Config, world_size: int) -> int:
    """Tokens of a step on so many ranks, as gpt-simple counts them."""
    t = config.training
    return t.per_device_batch_size * t.gradient_accumulation_steps * max(1, world_size) * config.data.max_length


def kept_tokens(config: Config) -> int | None:
    """Tokens of a step of the run that this one goes on with; None where there is none.

    They are part of what a checkpoint says, so another number of ranks, or another batch in the file, does not change them.
    """
    try:
        found = resume_point(resume_setting(config), Path(config.training.output_dir))
        return int(found.progress["config"]["training"]["tokens_per_step"]) if found is not None else None
    except (CheckpointError, KeyError, TypeError):
        return None  # which the checks before a run tell


def tell_batch(config: Config, world_size: int, kept: int | None, told: Callable[[str], None]) -> None:
    """Say that a run keeps the batch it began with, where its keys would make another one of it."""
    t, now = config.training, tokens_per_step(config, world_size)
    if kept is None or kept == now:
        return
    rows, length = kept // config.data.max_length, config.data.max_length
    times = -(-rows // (t.per_device_batch_size * world_size))
    told(
        f"the run began with {kept:,} tokens per step ({rows} rows of {length}) and keeps them on {world_size} "
        f"rank{'s' if world_size > 1 else ''}, with {times} forward pass{'es' if times > 1 else ''} each, where "
        f"gradient_accumulation_steps={t.gradient_accumulation_steps} would give {now:,}; another batch needs another output_dir"
    )


def resume_path(config: Config) -> Path | None:
    """The checkpoint that training.resume names, from the working folder or from output_dir on; None where it names none."""
    name = config.training.resume
    if name in ("auto", "scratch"):
        return None
    found = named_path(name, Path(config.training.output_dir))
    if is_checkpoint(found):  # of gpt-simple's layout: beside it may lie the one of ours that it was made from
        return saved_steps(found.parent).get(read_saved(found).step, found)
    return found


def resume_setting(config: Config) -> str:
    """training.resume of ours; a checkpoint of the original's that it names becomes one of ours in output_dir before the run."""
    return str(resume_path(config) or RESUMES.get(config.training.resume, config.training.resume))


def _already_read(config: Config) -> str | None:
    """The list of documents that the original has read, of this run or of the one whose state it begins with."""
    named = resume_path(config)
    runs = [named, named.parent.parent] if named is not None else []
    paths = [already_read_path(config), *(run / ALREADY_READ for run in runs)]
    return next((str(path) for path in paths if path.exists()), None)


def already_read_path(config: Config) -> Path:
    """Where a run that the original began keeps the list of the documents which that has read."""
    return Path(config.training.output_dir) / ALREADY_READ


def buckets(config: Config) -> list[str]:
    """The buckets of the training data: the folders below data.path/train."""
    train = user_path(config.data.path) / "train" if config.data.path else None
    return sorted(path.name for path in train.iterdir() if path.is_dir()) if train is not None and train.is_dir() else []


def tokenizer_name(name: str) -> str:
    """A tokenizer by a name of ours: a bare name is one of the Hub's, unless it needs no file."""
    name = name or "gpt2"
    bare = "/" not in name and name not in TOKENIZERS and not Path(name).exists()
    return f"hf:{name}" if bare else name


def named_tokenizer(config: Config) -> Tokenizer | None:
    """The tokenizer of the run; None where it cannot be opened, which the checks before a run tell in their words."""
    try:
        return open_tokenizer(tokenizer_name(config.data.tokenizer))
    except IngotError:
        return None


def padded_vocabulary(tokenizer: Tokenizer) -> int:
    """Rows of the embedding: all ids, one more where there is none to pad with, up to a multiple of 128."""
    ids = tokenizer.vocab_size + (tokenizer.pad is None)
    return -(-ids // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def cosine_steps(config: Config) -> int:
    """Steps of the cosine after the warm-up."""
    o = config.optimizer
    return o.decay_steps if o.decay_steps is not None else config.training.max_steps - o.warmup_steps


def warnings(config: Config, told: Callable[[str], None]) -> None:
    """Say what is allowed and probably not meant."""
    t, steps = config.training, config.training.max_steps
    for name, every, what in (
        ("logging_steps", t.logging_steps, "no step is logged"),
        ("eval_steps", t.eval_steps, "nothing is evaluated"),
        ("save_steps", t.save_steps, "nothing is saved before the end"),
    ):
        if every > steps:
            told(f"training.{name}={every} is more than training.max_steps={steps}: {what}")
    if config.data.max_length > config.model.n_positions:
        length = config.data.max_length
        told(f"data.max_length={length} is more than model.n_positions={config.model.n_positions}, which is taken as {length}")
    end = config.optimizer.warmup_steps + cosine_steps(config)
    if end < steps:
        told(f"the learning rate is at its floor after step {end}, for the last {steps - end} of training.max_steps={steps}")
    elif end > steps:
        told(
            f"the learning rate decays until step {end}, {end - steps} after training.max_steps={steps}, and ends above its floor"
        )


def _value(config: Config, path: str) -> Any:
    section, _, name = path.partition(".")
    return getattr(getattr(config, section), name)


def _computed(config: Config, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The settings that several keys decide, whose words differ, or that gpt-simple never lets anybody choose."""
    m, d, o, t = config.model, config.data, config.optimizer, config.training
    eval_rows = (t.max_eval_batches or EVAL_BATCHES) * t.per_device_batch_size
    rows = padded_vocabulary(tokenizer) if tokenizer is not None else None
    model = model_settings({**asdict(m), "vocab_size": rows or 1, "n_positions": max(m.n_positions, d.max_length)}, "the config")
    return {
        **{f"model.{setting}": value for setting, value in model.items()},
        "model.vocab_size": rows,
        "data.tokenizer": tokenizer_name(d.tokenizer),
        "data.sampling": "pack" if d.packing else "document",
        "data.document_mask": m.attention_mode != "causal",
        "data.overlap": d.overlap_size if d.format == "jsonl" else 0,
        "data.epochs": 1,
        "data.seed": DATA_SEED,
        **_mix(config),
        "data.exhausted": "renormalise" if d.allow_bucket_exhaustion else "halt",
        "optimizer.name": "adamw",
        "optimizer.schedule": "cosine",
        "optimizer.decay_steps": o.warmup_steps + max(1, cosine_steps(config)),
        "training.gradient_checkpointing": t.gradient_checkpointing and "auto",  # it asks for room: more than needed is slower
        "training.compile": t.compile if "training.compile" in config.given or not t.compile else "auto",
        "training.precision": PRECISIONS.get(t.mixed_precision, t.mixed_precision),
        "training.priming_steps": 0,
        "training.resume": resume_setting(config),
        "training.save_seconds": 0,
        "training.keep_every": t.keep_milestone_every or 0,
        "evaluation.at_start": False,
        "evaluation.at_end": t.max_steps % t.eval_steps == 0,
        "evaluation.rows": eval_rows,
        "evaluation.final_rows": eval_rows,
        "evaluation.micro_batch": t.per_device_batch_size,
        "artifact.write": False,
        **_tracking(config),
    }


def _mix(config: Config) -> dict[str, Any]:
    phases = config.data.curriculum
    if phases is not None:
        return {"data.phases": [{"tokens": phase.duration_tokens, "mix": phase.mix} for phase in phases]}
    return {"data.mix": dict.fromkeys(buckets(config), 1.0)}


def _tracking(config: Config) -> dict[str, Any]:
    t = config.training
    if t.wandb_project is None:
        return {}
    name = t.wandb_run_name or f"gpt_simple_{datetime.now():%Y%m%d_%H%M%S}"
    return {"tracking.wandb_project": t.wandb_project, "tracking.wandb_run_name": name}
