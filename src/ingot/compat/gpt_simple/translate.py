"""Translate gpt-simple's keys to a Config.

gpt-simple's batch size is per rank, so more ranks mean more tokens per step. Ingot's tokens_per_step counts all ranks: the
number of ranks at the first start sets it, and a run that resumes on a different number of ranks keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from ingot.artifact.gpt_simple import is_checkpoint, model_settings, read_saved
from ingot.compat.gpt_simple.config import GptSimpleConfig, all_keys
from ingot.compat.options import copied
from ingot.config.loading import ResolvedConfig, load_config
from ingot.data.tokenizers import Tokenizer, open_tokenizer
from ingot.errors import CheckpointError, ConfigError, IngotError
from ingot.runs.checkpoints import resume_point
from ingot.runs.folder import named_path, saved_steps
from ingot.runtime.files import user_path

DATA_SEED = 42  # seed for the data order, fixed in gpt-simple; training.seed only affects weights and dropout
VOCAB_MULTIPLE = 128
EVAL_BATCHES = 100  # batches per evaluation if max_eval_batches is null
TOKENIZERS = ("gpt2", "byte", "char")  # built-in tokenizers
ALREADY_READ = "already-read.json"  # lists the documents that gpt-simple had read before Ingot took over the run


def translate(
    config: GptSimpleConfig, world_size: int = 1, kept_tokens: int | None = None, tokenizer: Tokenizer | None = None
) -> ResolvedConfig:
    """Return the config of a run with these keys on `world_size` ranks.

    `kept_tokens` is the tokens per step of the run being resumed; `tokenizer` is the run's tokenizer, if it is already open.
    """
    config.check()
    keys, tokenizer = config.to_dict(), tokenizer or named_tokenizer(config)
    settings = {ours: keys[path.partition(".")[0]][path.partition(".")[2]] for path, ours in copied(all_keys()).items()}
    m, d, o, t = config.model, config.data, config.optimizer, config.training
    rows = None  # embedding rows: all tokens, plus a pad token if the tokenizer has none, rounded up
    if tokenizer is not None:
        rows = -(-(tokenizer.vocab_size + (tokenizer.pad is None)) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    model = model_settings({**asdict(m), "vocab_size": rows or 1, "n_positions": max(m.n_positions, d.max_length)}, "the config")
    eval_rows = (t.max_eval_batches or EVAL_BATCHES) * t.per_device_batch_size
    settings |= {f"model.{setting}": value for setting, value in model.items()} | {
        "model.vocab_size": rows,
        "data.tokenizer": tokenizer_name(d.tokenizer),
        "data.sampling": "pack" if d.packing else "document",
        "data.document_mask": m.attention_mode != "causal",
        "data.overlap": d.overlap_size if d.format == "jsonl" else 0,
        "data.epochs": 1,
        "data.seed": DATA_SEED,
        "data.exhausted": "renormalise" if d.allow_bucket_exhaustion else "halt",
        "optimizer.name": "adamw",
        "optimizer.schedule": "cosine",
        "optimizer.decay_steps": o.warmup_steps + max(1, cosine_steps(config)),
        "training.tokens_per_step": kept_tokens or tokens_per_step(config, world_size),
        # `auto` recomputes the activations of only as many layers as memory requires, which is faster than recomputing all
        "training.gradient_checkpointing": t.gradient_checkpointing and "auto",
        "training.compile": t.compile if "training.compile" in config.given or not t.compile else "auto",
        "training.precision": {None: "auto", "no": "fp32"}.get(t.mixed_precision, t.mixed_precision),
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
    }
    if d.curriculum is not None:
        settings["data.phases"] = [{"tokens": phase.duration_tokens, "mix": phase.mix} for phase in d.curriculum]
    else:
        train = user_path(d.path) / "train" if d.path else None
        buckets = [path.name for path in train.iterdir() if path.is_dir()] if train is not None and train.is_dir() else []
        settings["data.mix"] = dict.fromkeys(sorted(buckets), 1.0)
    if t.wandb_project is not None:
        name = t.wandb_run_name or f"gpt_simple_{datetime.now():%Y%m%d_%H%M%S}"
        settings |= {"tracking.wandb_project": t.wandb_project, "tracking.wandb_run_name": name}
    if kept_tokens is not None:  # when resuming, there may be a list of the documents that gpt-simple has read
        named = resume_path(config)
        runs = [Path(t.output_dir), *([named, named.parent.parent] if named is not None else [])]
        lists = (run / ALREADY_READ for run in runs)
        settings["data.already_read"] = next((str(path) for path in lists if path.exists()), None)
    if decided := sorted(settings.keys() & config.settings.keys()):
        raise ConfigError(f"{decided[0]} is computed from gpt-simple's keys and cannot be set directly")
    return load_config(overrides=config.settings, python=settings, environment={})


def tokens_per_step(config: GptSimpleConfig, world_size: int) -> int:
    """Return the tokens per step on `world_size` ranks, computed as in gpt-simple."""
    t = config.training
    return t.per_device_batch_size * t.gradient_accumulation_steps * max(1, world_size) * config.data.max_length


def kept_tokens(config: GptSimpleConfig) -> int | None:
    """Return the tokens per step of the run being resumed, or None for a new run.

    The value comes from the checkpoint, so it does not change with the number of ranks or with the batch size in the config file.
    """
    try:
        checkpoint = resume_point(resume_setting(config), Path(config.training.output_dir))
        return int(checkpoint.progress["config"]["training"]["tokens_per_step"]) if checkpoint is not None else None
    except (CheckpointError, KeyError, TypeError):
        return None  # the checks before training report the error


def resume_path(config: GptSimpleConfig) -> Path | None:
    """Return the path of the checkpoint or run named by training.resume, or None for auto and scratch."""
    name = config.training.resume
    if name in ("auto", "scratch"):
        return None
    path = named_path(name, Path(config.training.output_dir))
    if is_checkpoint(path):  # in gpt-simple's format: prefer the Ingot checkpoint of the same step, if there is one
        return saved_steps(path.parent).get(read_saved(path).step, path)
    return path


def resume_setting(config: GptSimpleConfig) -> str:
    """Return the value of Ingot's training.resume: auto, never or a path."""
    return str(resume_path(config) or {"scratch": "never"}.get(config.training.resume, config.training.resume))


def tokenizer_name(name: str) -> str:
    """Return Ingot's name for a tokenizer: a bare name is a Hub repository, unless it is built in or an existing path."""
    name = name or "gpt2"
    bare = "/" not in name and name not in TOKENIZERS and not Path(name).exists()
    return f"hf:{name}" if bare else name


def named_tokenizer(config: GptSimpleConfig) -> Tokenizer | None:
    """Return the run's tokenizer, or None if it cannot be opened; the checks before training report the error."""
    try:
        return open_tokenizer(tokenizer_name(config.data.tokenizer))
    except IngotError:
        return None


def cosine_steps(config: GptSimpleConfig) -> int:
    """Return the number of cosine decay steps after the warmup."""
    o = config.optimizer
    return o.decay_steps if o.decay_steps is not None else config.training.max_steps - o.warmup_steps


def warnings(config: GptSimpleConfig, report: Callable[[str], None], world_size: int = 1, kept: int | None = None) -> None:
    """Report settings that are valid but probably unintended; `kept` is the tokens per step of the run being resumed, if any."""
    t, steps, length = config.training, config.training.max_steps, config.data.max_length
    unseen = {"logging_steps": "no step is logged", "eval_steps": "nothing is evaluated"}
    for name, what in {**unseen, "save_steps": "nothing is saved before the end"}.items():
        if getattr(t, name) > steps:
            report(f"training.{name}={getattr(t, name)} is more than training.max_steps={steps}: {what}")
    if length > config.model.n_positions:
        report(f"data.max_length={length} is more than model.n_positions={config.model.n_positions}, which is raised to {length}")
    end, last = config.optimizer.warmup_steps + cosine_steps(config), f"training.max_steps={steps}"
    if end < steps:
        report(f"the learning rate reaches its floor at step {end} and stays there for {steps - end} more steps, up to {last}")
    elif end > steps:
        report(f"the learning rate does not reach its floor: it decays until step {end}, {end - steps} steps after {last}")
    if kept is not None and kept != (now := tokens_per_step(config, world_size)):
        what = f"the run keeps the {kept:,} tokens per step that it started with, although the config now implies {now:,}"
        report(f"{what}; to use a different batch size, start a new run in another training.output_dir")
