"""`ingot train`, `ingot sweep` and `ingot validate`: start runs, or check one before it starts."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from ingot.cli.arguments import AsJson, ConfigFile, RecipeName, ScoreOption, StopExitCode, given_settings, resolve_config
from ingot.console.entry import STARTED_AT, process_start, warn
from ingot.console.output import for_reader, print_columns, print_json
from ingot.console.progress import duration, make_reporter, work_line
from ingot.errors import Change, ConfigError, RunError
from ingot.runtime.files import is_url, user_path

if TYPE_CHECKING:
    from ingot.config.loading import ResolvedConfig
    from ingot.experiments.sweep import ArmSummary, Trial
    from ingot.runs.state import TrainingResult


def train(
    ctx: typer.Context,
    config: ConfigFile = None,
    recipe: RecipeName = None,
    nproc_per_node: Annotated[int | None, Option("--nproc-per-node", metavar="N", help="Start N ranks on this machine.")] = None,
    nnodes: Annotated[str, Option("--nnodes", metavar="N", help="Number of machines, or MIN:MAX with --max-restarts.")] = "1",
    max_restarts: Annotated[int, Option("--max-restarts", metavar="R", help="Resume up to R times if ranks fail.")] = 0,
    node_rank: Annotated[int, Option("--node-rank", metavar="K", help="Zero-based index of this machine.")] = 0,
    master_addr: Annotated[str, Option("--master-addr", metavar="HOST", help="Address of machine 0.")] = "127.0.0.1",
    master_port: Annotated[int | None, Option("--master-port", metavar="PORT", help="Port that machine 0 listens on.")] = None,
    stop_exit_code: StopExitCode = 0,
    resume: Annotated[str | None, Option("--resume", metavar="RUN", help="Resume this run, as `ingot train RUN` does.")] = None,
    force: Annotated[bool, Option("--force", help="Delete the run in training.output_dir and start from scratch.")] = False,
    as_json: AsJson = False,
) -> int:
    """Train a model. If RUN or training.output_dir names an unfinished run, resume it."""
    from ingot.console.launch import launch
    from ingot.runtime.ranks import ranks_from_environment

    ranks = ranks_from_environment()
    force = force and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"  # a restart must not delete the run it continues
    launching = nproc_per_node is not None and "RANK" not in os.environ
    if not re.fullmatch(r"\d+(:\d+)?", nnodes):
        raise ConfigError(f"--nnodes {nnodes} must be a number or a range such as 1:3")
    least, most = int(nnodes.split(":")[0]), int(nnodes.split(":")[-1])
    world_size = (nproc_per_node or 1) * most if launching else ranks.world_size
    word = ctx.args[0] if ctx.args and not ctx.args[0].startswith("-") else None
    settings = given_settings(ctx, skip=int(word is not None))
    if word is not None and resume is not None:
        raise ConfigError(f"--resume {resume} and {word} both name a run; keep one")
    if word is not None and not is_url(word) and not Path(word).is_dir():
        raise ConfigError(f"{word} is not a run folder; did you mean the recipe --recipe {word}, or the file --config {word}?")
    run_folder = word if word is not None else resume
    if run_folder is not None:
        if config is not None or recipe is not None:
            option = "--config" if config is not None else "--recipe"
            raise ConfigError(f"{run_folder} is resumed with the settings in its config.yaml; leave {option} out")
        speaks = node_rank == 0 if launching else ranks.first and STARTED_AT not in os.environ  # warn once, not on every rank
        resolved = _settings_of_run(run_folder, settings, warn if speaks else lambda line: None)
    elif recipe == "auto":
        from ingot.config.loading import Sources
        from ingot.preflight.auto import resolve_auto

        resolved = resolve_auto(Sources("auto", config, settings), world_size, warn, fresh=force)
    else:
        resolved = resolve_config(recipe, config, settings, world_size, warn if ranks.first and not launching else None)
    limit = resolved.config.budget.artifact_bytes
    if not force:
        from ingot.train.resume import COMPLETE, completed_result, fetch_runs

        fetch_runs(resolved.config)
        if (result := completed_result(resolved.config)) is not None:
            if ranks.first:
                print_json(result) if as_json else _print_result(result, limit)
                warn(f"{COMPLETE.format(result.run_dir)} with --force")
            return 0
    if nproc_per_node is not None and launching:
        from ingot.preflight.validate import check_before_training
        from ingot.train.start import open_data

        # Check the run before starting the ranks, which would all report the same error.
        open_data(resolved.config, world_size, check_before_training(resolved.config, world_size, warn, fresh=force))
        where: dict[str, Any] = {"node_rank": node_rank, "master_addr": master_addr, "master_port": master_port}
        where |= {"nnodes": most, "min_nodes": least, "max_restarts": max_restarts}
        if not max_restarts:
            return launch(nproc_per_node, sys.argv[1:], **where)
        from ingot.runs.state import read_state

        folder = _folder_of_restarts(resolved, most, force)
        fixed = [] if resolved.config.training.output_dir else [f"--training.output_dir={folder}"]
        code = launch(nproc_per_node, [*sys.argv[1:], *fixed, "--stop-exit-code=0"], **where)
        state = read_state(folder)
        return code or (0 if state is not None and state.status in ("completed", "halted") else stop_exit_code)
    if (most > 1 or max_restarts) and "RANK" not in os.environ:
        raise ConfigError("--nnodes and --max-restarts need --nproc-per-node: the number of ranks each machine starts")
    with make_reporter() as reporter:
        from ingot.preflight.validate import check_before_training  # the import takes a second: show the progress line first
        from ingot.train.start import run

        reporter.waiting("checking the run")
        dataset = None
        if STARTED_AT not in os.environ:  # otherwise the launcher has already checked the run
            dataset = check_before_training(resolved.config, world_size, reporter.message, fresh=force)
        result = run(resolved, reporter, began=process_start(), force=force, dataset=dataset)
    if not ranks.first:
        return 0
    print_json(result) if as_json else _print_result(result, limit)
    return stop_exit_code if result.status == "stopped" else 0


def _folder_of_restarts(resolved: ResolvedConfig, nnodes: int, force: bool) -> Path:
    """Return the run folder that the ranks use after every restart; create one if training.output_dir is not set."""
    from ingot.runs.folder import new_run_dir
    from ingot.runtime.remote import local_path

    folder, resume = resolved.config.training.output_dir, resolved.config.training.resume
    if resume == "never" or (nnodes > 1 and (force or folder is None)):
        raise ConfigError(
            "--max-restarts excludes training.resume=never; with --nnodes, it needs training.output_dir and excludes --force"
        )
    return local_path(folder) if folder is not None else new_run_dir(resolved.recipe)


def _settings_of_run(name: str, given: Mapping[str, Any], report: Callable[[str], None]) -> ResolvedConfig:
    """Return the settings of a run with overrides applied; report edits to its config.yaml since the newest checkpoint."""
    from ingot.config.loading import load_config
    from ingot.runs.folder import RunFolder
    from ingot.runs.mirror import local_run
    from ingot.runs.view import Run
    from ingot.runtime.files import file_sha256
    from ingot.train.resume import decisive_settings, saved_config

    own = {"training.output_dir": name, "training.resume": "auto"}
    for setting in own.keys() & given.keys():
        raise ConfigError(f"{setting} cannot be set when {name} is resumed; leave out either {setting} or the run")
    folder = local_run(name)
    run = Run.open(folder)
    last = RunFolder(folder).environment()
    besides = last.get("besides_config")  # settings of the last session that are not in a config.yaml written by a user
    overrides = {**(besides if isinstance(besides, dict) else {}), **given, **own}
    resolved = load_config(file=run.config_path, overrides=overrides)
    if (saved := saved_config(folder)) is not None:
        before, now = decisive_settings(saved), decisive_settings(resolved.config)
        changed = [name for name in before.keys() & now.keys() - given.keys() if before[name] != now[name]]
        if changes := "; ".join(Change(name, before[name], now[name]).render() for name in sorted(changed)):
            report(f"{run.config_path} has changed since the newest checkpoint: {changes}")
    wrote_config = last.get("config_sha256") == file_sha256(run.config_path)  # the file has not been edited
    return replace(resolved, files=()) if wrote_config else resolved


def _print_result(result: TrainingResult, limit: int | None) -> None:
    status = f"{result.status} ({result.stop_reason})" if result.stop_reason else result.status
    rows = [("run folder", str(result.run_dir)), ("status", status), ("steps", f"{result.total_steps:,}")]
    rows.append(("tokens", f"{result.total_tokens:,} in {result.training_seconds:.1f} s of training"))
    rows.append(("tokens/s", f"{result.tokens_per_second:,.0f}"))
    if result.final_loss is not None:
        rows.append(("train loss", f"{result.final_loss:.4f}"))
    if result.val_bpb is not None and result.val_loss is not None:
        part = f"  at step {result.val_step:,}" if result.val_step not in (None, result.total_steps) else ""
        rows += [("val loss", f"{result.val_loss:.4f}{part}"), ("val_bpb", f"{result.val_bpb:.4f}{part}")]
        rows += [(name, f"{value:.4f}") for name, value in result.val_other.items()]
    if result.artifact_path is not None and (size := result.artifact_bytes) is not None:
        over = f", {size - limit:,} more than budget.artifact_bytes" if limit is not None and size > limit else ""
        rows.append(("artifact", f"{result.artifact_path} ({size:,} bytes{over})"))
    if result.artifact_bpb is not None:
        rows.append(("artifact bpb", f"{result.artifact_bpb:.4f}"))
    if result.sample:
        print(f"\n{for_reader(result.sample.strip())}\n")
    print_columns(rows)
    folder = shlex.quote(str(result.run_dir))
    if result.status == "stopped":
        begun = (result.run_dir / "config.yaml").is_file()
        print(f"\nResume with: ingot train {folder}" if begun else "\nTraining had not started; rerun the command to start it.")
    elif result.checkpoint_path is not None:
        print(f"\nGenerate more text with: ingot generate {folder}")


def sweep(
    ctx: typer.Context,
    config: ConfigFile = None,
    recipe: RecipeName = None,
    vary: Annotated[
        list[str] | None,
        Option(metavar="SETTING=VALUE,VALUE", help="Values to try for a setting; several --vary form a grid."),
    ] = None,
    arms: Annotated[Path | None, Option("--arms", metavar="FILE", help="YAML file with the settings of each arm.")] = None,
    seeds: Annotated[str, Option("--seeds", metavar="N,N", help="Train every arm with each of these seeds.")] = "1,2,3",
    output: Annotated[
        Path, Option("--output", "-o", metavar="DIR", help="Folder for the runs (DIR/ARM/seed-N). An existing sweep is resumed.")
    ] = Path("runs/sweep"),
    score: ScoreOption = "val_bpb",
    stop_exit_code: StopExitCode = 0,
    as_json: AsJson = False,
) -> int:
    """Train each arm (a set of settings) with every seed, and compare the scores of each arm with those of the first arm."""
    from ingot.config.loading import load_config
    from ingot.experiments.sweep import make_arms, plan_trials, read_seeds, refuse_fixed, run_trials, summarise

    given = given_settings(ctx)
    refuse_fixed(given, "a sweep")

    def resolve(settings: Mapping[str, Any]) -> ResolvedConfig:
        resolved = load_config(recipe, config, given, sweep=settings)
        chosen, origins, defaults = resolved.config, resolved.origins, dict[str, Any]()
        if chosen.evaluation.final_rows == "auto" and origins["evaluation.final_rows"] not in ("command line", "sweep"):
            defaults["evaluation.final_rows"] = None  # all rows: "auto" would score a slow trial on only part of the text
        if origins["artifact.write"] == "default" and chosen.budget.artifact_bytes is None and score != "artifact_bpb":
            defaults["artifact.write"] = False  # skip the export, which takes seconds: this sweep compares no artifacts
        return load_config(recipe, config, given, sweep={**defaults, **settings}) if defaults else resolved

    trials = plan_trials(make_arms(vary or [], arms), read_seeds(seeds), user_path(output), resolve, score)
    began: dict[Path, float] = {}
    try:
        with work_line("sweep", "runs") as (say, show):

            def tick(trial: Trial) -> None:
                began.setdefault(trial.folder, time.monotonic())
                if show is not None:
                    show("sweep", trials.index(trial), len(trials), f"{trial.arm}, seed {trial.seed}")

            def end_trial(trial: Trial, error: str | None) -> None:
                last = summarise([trial], score)[0].trials[0]
                outcome = error or (f"{score} {last.score:.4f}" if last.score is not None else last.status)
                number, seconds = trials.index(trial) + 1, time.monotonic() - began[trial.folder]
                say(f"{number}/{len(trials)}  {trial.arm}  seed {trial.seed}  {outcome}  ({seconds:.1f} s)")

            errors = run_trials(trials, tick, end_trial)
    except KeyboardInterrupt:
        warn("the current run has saved and stopped; the same command resumes the sweep")
        raise
    summary = summarise(trials, score, errors)
    print_json({"output": output, "score": score, "arms": summary}) if as_json else print_columns(table(summary))
    if errors:
        folder, error = next(iter(errors.items()))
        raise RunError(f"{len(errors)} of {len(trials)} runs failed ({folder}: {error}); the same command tries them again")
    incomplete = sum(trial.status != "completed" for arm in summary for trial in arm.trials)
    if incomplete:
        warn(f"{incomplete} of {len(trials)} runs are not complete; the same command resumes them")
    return stop_exit_code if incomplete else 0


def table(arms: Sequence[ArmSummary]) -> list[Sequence[str]]:
    """Return the rows of a sweep's table; the last column lists unfinished and failed seeds and marks the best arm."""
    rows: list[Sequence[str]] = [("arm", "n", "mean", "std", "vs first", "p", "tok/s", "")]
    for arm in arms:
        speeds = [trial.tokens_per_second for trial in arm.trials if trial.tokens_per_second]
        speed = sum(speeds) / len(speeds) if speeds else None
        running = [f"seed {trial.seed}: {duration(trial.training_seconds)}" for trial in arm.trials if trial.status == "running"]
        ended = [trial for trial in arm.trials if trial.status not in ("running", "completed", "waiting")]
        notes = [*running, *(f"seed {trial.seed}: {trial.status}" for trial in ended), *(["<- best"] if arm.best else [])]
        numbers = ((arm.mean, ".4f"), (arm.std, ".4f"), (arm.difference, "+.4f"), (arm.p, ".2g"), (speed, ",.0f"))
        cells = ("-" if value is None else format(value, form) for value, form in numbers)
        rows.append((arm.arm, f"{arm.n}/{len(arm.trials)}", *cells, ", ".join(notes)))
    return rows


def validate(
    ctx: typer.Context,
    config: ConfigFile = None,
    recipe: RecipeName = None,
    world_size: Annotated[int, Option("--world-size", metavar="N", help="Number of ranks that will train together.")] = 1,
    strict: Annotated[bool, Option("--strict", help="Exit with code 1 even if there are only warnings.")] = False,
    probe: Annotated[bool, Option("--probe", help="Also take one training step on this machine and discard it.")] = False,
    gpu: Annotated[
        str | None, Option("--gpu", metavar="NAME", help="Also simulate a step on this GPU, as `ingot plan` does.")
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Check a run's settings, data and folder before it starts. Exit code: 0 = no warnings, 2 = warnings, 1 = it cannot start."""
    from ingot.preflight.data_checks import BLOCKED
    from ingot.preflight.validate import add_probe, report_lines, report_record
    from ingot.preflight.validate import validate as validate_config
    from ingot.runtime.ranks import ranks_from_environment

    try:
        resolved = resolve_config(recipe, config, given_settings(ctx), max(1, world_size), warn)
    except ConfigError as error:
        error.exit_code = BLOCKED  # the exit code of `validate` for a run that cannot start
        raise
    report = validate_config(resolved.config, world_size, began=process_start())
    if gpu is not None and not report.findings.blocked:
        from ingot.preflight.plan import add_plan

        add_plan(report, gpu)
    if probe and not report.findings.blocked:
        add_probe(report)
    if ranks_from_environment().first:
        print_json(report_record(report, strict)) if as_json else print("\n".join(report_lines(report)))
    return report.findings.exit_code(strict)
