"""`gpt-simple train`: its keys, trained by our loop, in this process or in as many as there are ranks."""

from __future__ import annotations

import math
import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.artifact.gpt_simple import RUN_STATE, STOP_FLAG, TOKENIZER
from ingot.compat.gpt_simple.config import Config
from ingot.compat.gpt_simple.log import Log
from ingot.compat.gpt_simple.names import advice, in_their_values, key_name
from ingot.compat.gpt_simple.reading import read_config
from ingot.compat.gpt_simple.translate import (
    ALREADY_READ,
    kept_tokens,
    named_tokenizer,
    resume_setting,
    tell_batch,
    translate,
    warnings,
)
from ingot.console.entry import STARTED_AT, process_start
from ingot.errors import ConfigError, IngotError
from ingot.runtime.files import user_path
from ingot.runtime.ranks import ranks_from_environment

if TYPE_CHECKING:
    from ingot.config.schema import Config as IngotConfig
    from ingot.data.store.dataset import Dataset

MODULE = "ingot.compat.gpt_simple"
PORT = 29500  # at which machines meet, where none is named
# What --force deletes besides what is ours. Not config.json: it may be the very file that the run is started from.
THEIR_FILES = (
    TOKENIZER, RUN_STATE, STOP_FLAG, ".stop_chain", ALREADY_READ, "checkpoints/checkpoint-*",
    "checkpoints/final",
)  # fmt: skip


@dataclass
class TrainingResult:
    """What a run came to."""

    final_loss: float  # the mean of the last log line, else the last step's
    checkpoint_path: str
    total_tokens: int
    total_steps: int


def train(options: Namespace, overrides: Mapping[str, Any], words: Sequence[str], log: Log) -> int:
    """Train as a file and a command line say; returns the exit code."""
    config = configured(options, overrides)
    try:
        if "RANK" not in os.environ and (options.nproc_per_node > 1 or options.nnodes > 1):
            return _launch(config, options, words, log)
        status, result = run_training(config, log, options.force)
    except IngotError as error:
        in_their_values(error, (resume_setting(config), config.training.resume))
        raise
    if not ranks_from_environment().first:
        return 0  # a launcher takes another code for a failure, and kills the first rank before it is done
    if status == "completed":
        log.info(f"Training complete: {result.total_steps} steps, final loss {result.final_loss:.4f}")
    return options.stop_exit_code if status == "stopped" else 0


def configured(options: Namespace, overrides: Mapping[str, Any]) -> Config:
    """The config of a command: the file, the keys beside it, and the two flags that are keys."""
    flags = {f"data.{name}": True for name in ("allow_bucket_exhaustion", "allow_budget_mismatch") if getattr(options, name)}
    config = read_config(options.config, {**overrides, **flags})
    record = user_path(config.training.output_dir) / "config.yaml"
    if record.exists() and record.samefile(options.config):
        raise ConfigError(f"{options.config} is where the run writes its settings in another form; give it another name or place")
    return config


def run_training(config: Config, log: Log, force: bool = False) -> tuple[str, TrainingResult]:
    """Train on this rank; how it ended, and what it came to. With `force` an earlier run in the folder is deleted first."""
    from ingot.compat.gpt_simple.files import RunFiles, refuse_live_original, refuse_strangers
    from ingot.compat.gpt_simple.foreign import take_over
    from ingot.compat.gpt_simple.reporter import GptSimpleReporter, newest_name
    from ingot.train.start import run

    ranks = ranks_from_environment()
    refuse_live_original(Path(config.training.output_dir))
    refuse_strangers(Path(config.training.output_dir))
    if not force:
        take_over(config, ranks, log.info, log.warn)
    kept = None if force else kept_tokens(config)
    tokenizer = named_tokenizer(config)
    resolved = translate(config, ranks.world_size, kept, tokenizer)
    told: list[str] = []
    warnings(config, told.append)
    tell_batch(config, ranks.world_size, kept, told.append)
    # Whoever launched the ranks has checked the run.
    dataset = None if STARTED_AT in os.environ else check(config, resolved.config, ranks.world_size, told.append, force)
    spec = tokenizer.spec() if tokenizer is not None else None
    files = RunFiles(Path(config.training.output_dir), config.to_dict(), spec, log.warn, process_start())
    reporter = GptSimpleReporter(config, resolved.config, log, files, told)
    try:
        result = run(resolved, reporter, began=process_start(), force=force, files=THEIR_FILES, dataset=dataset)
    except Exception as error:
        files.failed(error)
        raise
    if files.failure is not None:
        raise files.failure
    last = reporter.interval_loss if reporter.interval_loss is not None else result.final_loss
    path = reporter.checkpoint or (result.checkpoint_path and newest_name(result.checkpoint_path))
    final_loss, checkpoint = last if last is not None else math.inf, str(path) if path is not None else ""
    return result.status, TrainingResult(final_loss, checkpoint, result.total_tokens, result.total_steps)


def check(config: Config, resolved: IngotConfig, world_size: int, told: Callable[[str], None], force: bool) -> Dataset | None:
    """Refuse a run that cannot go well; gives the data, if it had to be opened."""
    from ingot.preflight.validate import check_before_training

    workers, mismatch = config.data.num_workers, config.data.allow_budget_mismatch
    words = {"name": key_name, "advise": advice}
    return check_before_training(resolved, world_size, told, workers=workers, allow_mismatch=mismatch, fresh=force, **words)


def _launch(config: Config, options: Namespace, words: Sequence[str], log: Log) -> int:
    """Start the ranks; a mistake is told once, before any of them."""
    from ingot.compat.gpt_simple.files import refuse_live_original
    from ingot.console.launch import launch
    from ingot.train.start import open_data

    refuse_live_original(Path(config.training.output_dir))
    world_size = options.nproc_per_node * options.nnodes
    resolved = translate(config, world_size, None if options.force else kept_tokens(config)).config
    open_data(resolved, world_size, check(config, resolved, world_size, log.warn, options.force))
    return launch(
        options.nproc_per_node,
        words,
        nnodes=options.nnodes,
        node_rank=options.node_rank,
        master_addr=options.master_addr,
        master_port=options.master_port or (PORT if options.nnodes > 1 else None),
        module=MODULE,
    )
