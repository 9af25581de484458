"""`ingot train`: train or continue a run."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.doors.cli.options import AsJson, ConfigFile, RecipeName, SettingsCommand, given_settings
from ingot.doors.entry import STARTED_AT, process_start, warn
from ingot.doors.output import print_columns, print_json
from ingot.errors import ConfigError

if TYPE_CHECKING:
    from ingot.runs.result import TrainingResult


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("train", cls=SettingsCommand)(train)


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
    stop_exit_code: Annotated[
        int,
        typer.Option(
            "--stop-exit-code", metavar="N", min=0, max=255, help="Exit code of a run that was stopped and is to be continued."
        ),
    ] = 0,
    as_json: AsJson = False,
) -> int:
    """Train a model, or continue the run in training.output_dir."""
    from ingot.doors.cli.configs import resolve
    from ingot.runtime.ranks import ranks_from_environment

    ranks = ranks_from_environment()
    if nproc_per_node is not None and "RANK" not in os.environ:
        resolved = resolve(recipe, config, given_settings(ctx), nproc_per_node * nnodes)
        from ingot.doors.launch import launch
        from ingot.plan.validate import check_before_training
        from ingot.train.start import open_data

        world_size = nproc_per_node * nnodes
        dataset = check_before_training(resolved.config, world_size, warn)
        open_data(resolved.config, world_size, dataset)  # a mistake is told once, not by every rank
        return launch(
            nproc_per_node, sys.argv[1:], nnodes=nnodes, node_rank=node_rank, master_addr=master_addr, master_port=master_port
        )
    if nnodes > 1 and "RANK" not in os.environ:
        raise ConfigError("--nnodes needs --nproc-per-node: how many ranks each machine starts")
    from ingot.doors.display import make_reporter

    resolved = resolve(recipe, config, given_settings(ctx), ranks.world_size, warn if ranks.first else None)
    with make_reporter() as reporter:
        from ingot.plan.validate import check_before_training  # here: a second of imports that is seen to be one
        from ingot.train.start import run

        reporter.waiting("checking the run")
        dataset = None
        if STARTED_AT not in os.environ:  # else whoever launched the ranks has checked it
            dataset = check_before_training(resolved.config, ranks.world_size, reporter.message)
        result = run(resolved, reporter, began=process_start(), dataset=dataset)
    if ranks.first:
        print_json(result) if as_json else _print(result)
        return stop_exit_code if result.status == "stopped" else 0
    return 0


def _print(result: TrainingResult) -> None:
    """The summary a person wants: where it is, how good it is, how fast it went, what it writes."""
    from ingot.runs.report import by_rows

    status = f"{result.status} ({result.stop_reason})" if result.stop_reason else result.status
    rows = [("run folder", str(result.run_dir)), ("status", status), ("steps", f"{result.total_steps:,}")]
    rows.append(("tokens", f"{result.total_tokens:,} in {result.training_seconds:.1f} s of training"))
    rows.append(("tokens/s", f"{result.tokens_per_second:,.0f}"))
    if result.final_loss is not None:
        rows.append(("train loss", f"{result.final_loss:.4f}"))
    if result.val_bpb is not None and result.val_loss is not None:
        part = by_rows(result.val_rows, result.val_rows_of)
        rows += [("val loss", f"{result.val_loss:.4f}{part}"), ("val_bpb", f"{result.val_bpb:.4f}{part}")]
        rows += [(name, f"{value:.4f}") for name, value in result.val_other.items()]
    if result.artifact_path is not None:
        rows.append(("artifact", f"{result.artifact_path} ({result.artifact_bytes:,} bytes)"))
    if result.artifact_bpb is not None:
        rows.append(("artifact bpb", f"{result.artifact_bpb:.4f}{by_rows(result.artifact_rows, result.val_rows_of)}"))
    if result.sample:
        print(f"\n{result.sample.strip()}\n")
    print_columns(rows)
    if result.status == "stopped":
        print("\nContinue with the same command and --training.output_dir", result.run_dir)
    elif result.checkpoint_path is not None:
        print(f"\nLet it write more: ingot generate {result.run_dir}")
