"""`gpt-simple train` and `gpt-simple validate`: the original's keys, trained by our loop on one or more ranks."""

from __future__ import annotations

import math
import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.artifact.gpt_simple import RUN_STATE, STOP_FLAG, TOKENIZER
from ingot.compat.gpt_simple.config import GptSimpleConfig, advice, key_name, read_config, use_their_values
from ingot.compat.gpt_simple.reporter import GptSimpleReporter, Log, newest_name
from ingot.compat.gpt_simple.translate import (
    ALREADY_READ,
    kept_tokens,
    named_tokenizer,
    report_kept_batch,
    resume_setting,
    translate,
    warnings,
)
from ingot.console.entry import STARTED_AT, process_start, warn
from ingot.console.output import print_json
from ingot.errors import ConfigError, IngotError
from ingot.runtime.files import user_path
from ingot.runtime.ranks import ranks_from_environment

if TYPE_CHECKING:
    from ingot.config.schema import Config
    from ingot.data.store.dataset import Dataset

MODULE = "ingot.compat.gpt_simple"
PORT = 29500  # where machines meet if no port is given
# What --force deletes besides our files. Not config.json: it may be the very file that the run is started from.
THEIR_FILES = (
    TOKENIZER, RUN_STATE, STOP_FLAG, ".stop_chain", ALREADY_READ, "checkpoints/checkpoint-*", "checkpoints/final",
)  # fmt: skip


@dataclass
class GptSimpleResult:
    """gpt-simple's TrainingResult."""

    final_loss: float  # the mean of the last log line, else the last step's loss
    checkpoint_path: str
    total_tokens: int
    total_steps: int


def train(options: Namespace, overrides: Mapping[str, Any], words: Sequence[str]) -> int:
    """Train as a file and a command line say; return the exit code."""
    log = Log(options.verbose, options.quiet)
    config = read_options(options, overrides)
    try:
        if "RANK" not in os.environ and (options.nproc_per_node > 1 or options.nnodes > 1):
            return _launch(config, options, words, log)
        status, result = run_training(config, log, options.force)
    except IngotError as error:
        use_their_values(error, resume_setting(config), config.training.resume)
        raise
    if not ranks_from_environment().first:
        return 0  # a launcher treats any other code as a failure and kills the first rank before it is done
    if status == "completed":
        log.info(f"Training complete: {result.total_steps} steps, final loss {result.final_loss:.4f}")
    return options.stop_exit_code if status == "stopped" else 0


def validate(options: Namespace, overrides: Mapping[str, Any]) -> int:
    """Print a report on a run; return 0 for nothing or notes, 2 for warnings, 1 for what keeps a run from starting."""
    from ingot.preflight.findings import BLOCKED
    from ingot.preflight.validate import report_lines, report_record
    from ingot.preflight.validate import validate as preflight

    try:
        config = read_options(options, overrides)
        resolved = translate(config, options.world_size, kept_tokens(config)).config
    except ConfigError as error:
        error.exit_code = BLOCKED  # a config that cannot be read is a run that cannot start
        raise
    warnings(config, warn)
    workers, mismatch = config.data.num_workers, config.data.allow_budget_mismatch
    report = preflight(resolved, options.world_size, began=process_start(), workers=workers, allow_mismatch=mismatch)
    for finding in report.findings:
        use_their_values(finding.cause, resume_setting(config), config.training.resume)
    if options.json:
        print_json(report_record(report, options.strict, key_name, advice))
    else:
        print("\n".join(report_lines(report, key_name, advice)))
    return report.findings.exit_code(options.strict)


def read_options(options: Namespace, overrides: Mapping[str, Any]) -> GptSimpleConfig:
    """Return the config of a command: its file, the keys beside it, and the two flags that are keys."""
    flags = {f"data.{name}": True for name in ("allow_bucket_exhaustion", "allow_budget_mismatch") if getattr(options, name)}
    config = read_config(options.config, {**overrides, **flags})
    record = user_path(config.training.output_dir) / "config.yaml"
    if record.exists() and record.samefile(options.config):
        raise ConfigError(f"{options.config} is where the run writes our settings; give your config another name or folder")
    return config


def run_training(config: GptSimpleConfig, log: Log, force: bool = False) -> tuple[str, GptSimpleResult]:
    """Train on this rank; return the run's status and result. With `force`, delete an earlier run in the folder first."""
    from ingot.compat.gpt_simple.files import RunFiles, refuse_live_original, refuse_strangers
    from ingot.compat.gpt_simple.foreign import adopt_on_all_ranks
    from ingot.train.start import run

    ranks, folder = ranks_from_environment(), Path(config.training.output_dir)
    refuse_live_original(folder)
    refuse_strangers(folder)
    if not force:
        adopt_on_all_ranks(config, ranks, log.info, log.warn)
    kept = None if force else kept_tokens(config)
    tokenizer = named_tokenizer(config)
    resolved = translate(config, ranks.world_size, kept, tokenizer)
    messages: list[str] = []
    warnings(config, messages.append)
    report_kept_batch(config, ranks.world_size, kept, messages.append)
    # If a launcher started this rank, it has checked the run already.
    dataset = None if STARTED_AT in os.environ else _check(config, resolved.config, ranks.world_size, messages.append, force)
    spec = tokenizer.spec() if tokenizer is not None else None
    files = RunFiles(folder, config.to_dict(), spec, log.warn, process_start())
    reporter = GptSimpleReporter(config, resolved.config, log, files, messages)
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
    return result.status, GptSimpleResult(final_loss, checkpoint, result.total_tokens, result.total_steps)


def _check(
    config: GptSimpleConfig, resolved: Config, world_size: int, report: Callable[[str], None], force: bool
) -> Dataset | None:
    """Refuse a run that cannot succeed; return the data if they had to be opened."""
    from ingot.preflight.validate import check_before_training

    workers, mismatch = config.data.num_workers, config.data.allow_budget_mismatch
    words = {"name": key_name, "advise": advice}
    return check_before_training(resolved, world_size, report, workers=workers, allow_mismatch=mismatch, fresh=force, **words)


def _launch(config: GptSimpleConfig, options: Namespace, words: Sequence[str], log: Log) -> int:
    """Start the ranks, after checking the run once; return the exit code."""
    from ingot.compat.gpt_simple.files import refuse_live_original
    from ingot.console.launch import launch
    from ingot.train.start import open_data

    refuse_live_original(Path(config.training.output_dir))
    world_size = options.nproc_per_node * options.nnodes
    resolved = translate(config, world_size, None if options.force else kept_tokens(config)).config
    open_data(resolved, world_size, _check(config, resolved, world_size, log.warn, options.force))
    return launch(
        options.nproc_per_node,
        words,
        nnodes=options.nnodes,
        node_rank=options.node_rank,
        master_addr=options.master_addr,
        master_port=options.master_port or (PORT if options.nnodes > 1 else None),
        module=MODULE,
    )
