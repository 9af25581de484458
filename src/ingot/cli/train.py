"""`ingot train`: train or continue a run."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.options import AsJson, ConfigFile, RecipeName, SettingsCommand, StopExitCode, first_word, given_settings
from ingot.cli.verbs import app
from ingot.console.entry import STARTED_AT, process_start, warn
from ingot.console.output import for_reader, print_columns, print_json
from ingot.errors import Change, ConfigError

if TYPE_CHECKING:
    from ingot.config.loading import ResolvedConfig
    from ingot.config.schema import Config
    from ingot.runs.state import TrainingResult


@app.command("train", cls=SettingsCommand)
def train(
    ctx: typer.Context,
    config: ConfigFile = None,
    recipe: RecipeName = None,
    nproc_per_node: Annotated[
        int | None,
        typer.Option("--nproc-per-node", metavar="N", help="Start N ranks on this machine and train with all of them."),
    ] = None,
    nnodes: Annotated[int, typer.Option("--nnodes", metavar="N", help="Machines that train together.")] = 1,
    node_rank: Annotated[int, typer.Option("--node-rank", metavar="K", help="Which of the machines this is, from 0.")] = 0,
    master_addr: Annotated[str, typer.Option("--master-addr", metavar="HOST", help="Address of machine 0.")] = "127.0.0.1",
    master_port: Annotated[int | None, typer.Option("--master-port", metavar="PORT", help="Free port on machine 0.")] = None,
    stop_exit_code: StopExitCode = 0,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="RUN", help="Continue this run with all its settings; `ingot train RUN` is the same."),
    ] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Begin anew: delete what an earlier run left in training.output_dir, and nothing else."),
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Train a model, or continue the run in training.output_dir."""
    from ingot.cli.configs import resolve
    from ingot.runtime.ranks import ranks_from_environment

    ranks = ranks_from_environment()
    launching = nproc_per_node is not None and "RANK" not in os.environ
    world_size = (nproc_per_node or 1) * nnodes if launching else ranks.world_size
    settings = given_settings(ctx, skip=int(first_word(ctx) is not None))
    if (run_folder := _run_folder(ctx, resume)) is not None:
        speaks = node_rank == 0 if launching else ranks.first and STARTED_AT not in os.environ  # once, before ranks are launched
        refused = {"--config": config, "--recipe": recipe}
        resolved = _settings_of(run_folder, settings, refused, warn if speaks else lambda line: None)
    elif recipe == "auto":
        resolved = _measured(config, settings, world_size, force)
    else:
        resolved = resolve(recipe, config, settings, world_size, warn if ranks.first and not launching else None)
    if not force and _tell_complete(resolved.config, as_json):
        return 0
    if nproc_per_node is not None and launching:
        from ingot.console.launch import launch

        _check_once(resolved.config, world_size, force)
        return launch(
            nproc_per_node, sys.argv[1:], nnodes=nnodes, node_rank=node_rank, master_addr=master_addr, master_port=master_port
        )
    if nnodes > 1 and "RANK" not in os.environ:
        raise ConfigError("--nnodes needs --nproc-per-node: how many ranks each machine starts")
    result = _run(resolved, world_size, force)
    if ranks.first:
        print_json(result) if as_json else _print(result, resolved.config.budget.artifact_bytes)
        return stop_exit_code if result.status == "stopped" else 0
    return 0


def _measured(file: Path | None, settings: Mapping[str, Any], world_size: int, force: bool) -> ResolvedConfig:
    """The config of --recipe auto, by what this machine and the data are."""
    from ingot.config.loading import Sources
    from ingot.preflight.auto import resolve_auto

    return resolve_auto(Sources("auto", file, settings), world_size, warn, fresh=force)


def _check_once(config: Config, world_size: int, force: bool) -> None:
    """Find mistakes before ranks are started: each is told once, not by every rank."""
    from ingot.preflight.validate import check_before_training
    from ingot.train.start import open_data

    open_data(config, world_size, check_before_training(config, world_size, warn, fresh=force))


def _run(resolved: ResolvedConfig, world_size: int, force: bool) -> TrainingResult:
    """Train as one of the ranks."""
    from ingot.console.progress import make_reporter

    with make_reporter() as reporter:
        from ingot.preflight.validate import check_before_training  # here: a second of imports that is seen to be one
        from ingot.train.start import run

        reporter.waiting("checking the run")
        dataset = None
        if STARTED_AT not in os.environ:  # else whoever launched the ranks has checked it
            dataset = check_before_training(resolved.config, world_size, reporter.message, fresh=force)
        return run(resolved, reporter, began=process_start(), force=force, dataset=dataset)


def _run_folder(ctx: typer.Context, named: Path | None) -> Path | None:
    """The run that is to be continued with its own settings: the option's, or the first word."""
    word = first_word(ctx)
    if word is not None and named is not None:
        raise ConfigError(f"--resume {named} and {word} both name a run; keep one")
    if word is not None and not Path(word).is_dir():
        raise ConfigError(
            f"{word} is not a run folder; a recipe is named by --recipe {word}, a file of settings by --config {word}"
        )
    return Path(word) if word is not None else named


def _settings_of(
    folder: Path, given: Mapping[str, Any], refused: Mapping[str, Any], tell: Callable[[str], None]
) -> ResolvedConfig:
    """All settings of a run, with those given on top; `tell` hears what its config.yaml changes of how it was trained."""
    from ingot.config.loading import load_config
    from ingot.runs.folder import RunFolder
    from ingot.runs.view import Run
    from ingot.train.resume import compared, saved_config

    for option in (name for name, value in refused.items() if value):
        raise ConfigError(
            f"{option} does not go together with a run that is continued with its own settings; leave one of them out"
        )
    own = {"training.output_dir": str(folder), "training.resume": "auto"}
    for name in own.keys() & given.keys():
        raise ConfigError(f"{name} is given, and {folder} is continued where it is; leave {name} or the run out")
    run, known = Run.open(folder), RunFolder(folder)
    resolved = load_config(file=run.config_path, overrides={**known.besides_config(), **given, **own})
    if (saved := saved_config(folder)) is not None:
        was, now = compared(saved), compared(resolved.config)
        changed = [name for name in was.keys() & now.keys() - given.keys() if was[name] != now[name]]
        if changes := "; ".join(Change(name, was[name], now[name]).render() for name in sorted(changed)):
            tell(f"{run.config_path} has changed since the newest checkpoint: {changes}")
    return replace(resolved, files=()) if known.wrote_config() else resolved


def _tell_complete(config: Config, as_json: bool) -> bool:
    """Say what a run came to that is complete with these settings; whether there is one."""
    from ingot.runtime.ranks import ranks_from_environment
    from ingot.train.resume import COMPLETE, completed

    result = completed(config)
    if result is not None and ranks_from_environment().first:
        warn(f"{COMPLETE.format(result.run_dir)} with --force")
        print_json(result) if as_json else _print(result, config.budget.artifact_bytes)
    return result is not None


def _print(result: TrainingResult, limit: int | None) -> None:
    """The summary a person wants: where it is, how good it is, how fast it went, what it writes."""
    from ingot.runs.reporter import by_rows

    status = f"{result.status} ({result.stop_reason})" if result.stop_reason else result.status
    rows = [("run folder", str(result.run_dir)), ("status", status), ("steps", f"{result.total_steps:,}")]
    rows.append(("tokens", f"{result.total_tokens:,} in {result.training_seconds:.1f} s of training"))
    rows.append(("tokens/s", f"{result.tokens_per_second:,.0f}"))
    if result.final_loss is not None:
        rows.append(("train loss", f"{result.final_loss:.4f}"))
    if result.val_bpb is not None and result.val_loss is not None:
        part = by_rows(result.val_rows, result.val_rows_of, result.val_stride)
        part += f"  at step {result.val_step:,}" if result.val_step not in (None, result.total_steps) else ""
        rows += [("val loss", f"{result.val_loss:.4f}{part}"), ("val_bpb", f"{result.val_bpb:.4f}{part}")]
        rows += [(name, f"{value:.4f}") for name, value in result.val_other.items()]
    if result.artifact_path is not None and (size := result.artifact_bytes) is not None:
        over = f", {size - limit:,} more than budget.artifact_bytes" if limit is not None and size > limit else ""
        rows.append(("artifact", f"{result.artifact_path} ({size:,} bytes{over})"))
    if result.artifact_bpb is not None:
        part = by_rows(result.artifact_rows, result.val_rows_of, result.val_stride)
        rows.append(("artifact bpb", f"{result.artifact_bpb:.4f}{part}"))
    if result.sample:
        print(f"\n{for_reader(result.sample.strip())}\n")
    print_columns(rows)
    folder = shlex.quote(str(result.run_dir))
    if result.status == "stopped":
        begun = (result.run_dir / "config.yaml").is_file()
        print(f"\nContinue with: ingot train {folder}" if begun else "\nIt had not begun; the same command begins it.")
    elif result.checkpoint_path is not None:
        print(f"\nLet it write more: ingot generate {folder}")
