"""Commands that inspect runs by their folders: status, stop, plot, report, compare and ui.

None of them takes a lock or waits for a run, and `ingot status` loads neither torch nor pydantic.
"""

from __future__ import annotations

import math
import os
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from ingot.cli.options import AsJson, DeviceName, ScoreOption
from ingot.console.charts import Line, Page, Panel, panel_lines
from ingot.console.output import check_target, columns, for_reader, print_columns, print_json, visible
from ingot.console.progress import draw_lines, duration, is_terminal
from ingot.errors import CheckpointError, ConfigError, IngotError, RunError
from ingot.runs.view import RUNS, Run, run_names, runs_below

if TYPE_CHECKING:
    from ingot.experiments.compare import Comparison, Side
    from ingot.runs.series import Curves, Series, Timing

WATCH_SECONDS = 1.0
MAX_CPU_SHARE = 0.02  # share of one core: watching a run must not slow it down
MAX_WAIT_SECONDS = 30.0
MAX_WATCHED_STALLS, MAX_REPORTED_STALLS = 3, 5
MAX_SAMPLE_CHARACTERS = 4000


# ingot status


def status(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Run folders, or folders of runs. Default: runs/.", show_default=False),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep showing the runs, with their curves, until none of them is running.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show how runs are doing. One run: step, loss, throughput and remaining budget. Several: a table with their best scores."""
    shown_runs = _runs_to_show(runs or [])
    if watch:
        _watch(shown_runs, as_json)
    elif as_json:
        print_json(_status_records(shown_runs))
    else:
        print("\n".join(_status_lines(_status_records(shown_runs))))


def _runs_to_show(paths: Sequence[Path]) -> list[Run]:
    if not paths:
        return runs_below(RUNS)
    runs: list[Run] = []
    for path in paths:
        try:
            runs.append(Run.open(path))
        except CheckpointError as error:
            try:
                runs += runs_below(path)
            except CheckpointError:
                raise error from None
    return runs


def _status_records(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the record of each run; several runs are compared by their best scores."""
    records = [run.record() for run in runs]
    if len(records) == 1:
        return records
    for record, run in zip(records, runs, strict=True):
        best: dict[str, Any] = {}
        with suppress(IngotError):  # a damaged file of one run must not hide the others
            best = run.series.read().best or {}
        record |= {"best_val_bpb": best.get("val_bpb"), "best_step": best.get("step"), "data": _data_path(run), "best": False}
    scored = [record for record in records if record["best_val_bpb"] is not None]
    for data in {record["data"] for record in scored}:  # bits per byte of different texts do not compare
        same_data = [record for record in scored if record["data"] == data]
        min(same_data, key=lambda record: record["best_val_bpb"])["best"] = True
    return records


@cache
def _data_path(run: Run) -> str | None:
    try:
        return run.config.data.path
    except IngotError:  # the settings of another version
        return None


def _status_lines(records: Sequence[dict[str, Any]]) -> list[str]:
    """Format one run as a list of facts, several as a table."""
    facts = [_status_facts(record) for record in records]
    if len(facts) == 1:
        return columns([(name, value) for name, value in facts[0].items() if value])
    names = [name for name in facts[0] if name not in ("checkpoint", "process", "error")]
    return columns([names, *([one[name] or "-" for name in names] for one in facts)])


def _status_facts(record: dict[str, Any]) -> dict[str, str]:
    def number(name: str, form: str) -> str:
        return format(record[name], form) if record[name] is not None else ""

    reason = f" ({record['stop_reason']})" if record["stop_reason"] else ""
    left = [number("steps_left", ",") + " steps" if record["steps_left"] is not None else ""]
    left.append(f"{duration(record['budget_seconds_left'])} of training" if record["budget_seconds_left"] is not None else "")
    facts = {
        "run": record["run"],
        "status": f"{record['status']}{reason}",
        "step": number("step", ","),
        "left": " or ".join(part for part in left if part),
        "loss": number("loss", ".4f"),
        "val_bpb": number("val_bpb", ".4f"),
    }
    if "best_val_bpb" in record:
        facts["best"] = number("best_val_bpb", ".4f") + (" <- best" if record["best"] else "")
    facts |= {
        "tokens/s": number("tokens_per_second", ",.0f"),
        "checkpoint": record["checkpoint"] or "",
        "last heard": f"{duration(record['last_heard_seconds'])} ago" if record["last_heard_seconds"] is not None else "",
        "process": f"{record['pid']} on {record['host']}" if record["pid"] is not None else "",
        "error": record["error"] or "",
    }
    return facts | ({"data": record["data"] or ""} if "data" in record else {})


def _watch(runs: Sequence[Run], as_json: bool) -> None:
    """Show runs until none is running or Ctrl-C: redrawn in place on a terminal, elsewhere printed when they have changed."""
    drawn, previous = 0, None
    in_place = is_terminal(sys.stdout) and not as_json
    try:
        while True:
            began = time.process_time() if previous else math.inf  # the first look reads all there is
            records = _status_records(runs)
            running = any(record["status"] == "running" for record in records)
            facts = [{name: value for name, value in record.items() if name != "last_heard_seconds"} for record in records]
            if in_place:
                drawn = draw_lines(screen(runs, records), drawn)
            elif facts != previous and as_json:
                print_json(records)
            elif facts != previous:
                print("\n".join(_status_lines(records) if running else screen(runs, records)))
            sys.stdout.flush()
            previous = facts
            if not running:
                return
            time.sleep(max(WATCH_SECONDS, min(MAX_WAIT_SECONDS, (time.process_time() - began) / MAX_CPU_SHARE)))
    except KeyboardInterrupt:
        return  # the usual way to end it; the last screen stays


def screen(runs: Sequence[Run], records: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of `ingot status --watch`: status, curves, and the time of a step."""
    series = {name: run.series.read() for name, run in zip(run_names([run.path for run in runs]), runs, strict=True)}
    width, height = shutil.get_terminal_size()
    lines = [*_status_lines(records), ""]
    panels = panels_of({name: run_series.curves() for name, run_series in series.items()}, "steps")
    panel_height = max(4, (height - len(lines) - len(runs) - 2) // max(1, len(panels)) - 4 - len(runs))
    for panel in panels:
        lines += [*panel_lines(panel, width, min(12, panel_height), shows_colours(), shows_braille()), ""]
    for name, run_series in series.items():
        timing = run_series.timing()
        if timing.percentiles:
            times = ", ".join(f"{share} {seconds:.4f} s" for share, seconds in timing.percentiles.items())
            lines.append(f"{name}: a step takes {times}; stalls: {_stalls(timing, MAX_WATCHED_STALLS)}")
    return lines


def _stalls(timing: Timing, limit: int) -> str:
    stalls = [f"{stall.seconds:.1f} s before step {stall.step:,}" for stall in timing.stalls[:limit]]
    more = len(timing.stalls) - len(stalls)
    return ", ".join(stalls) + (f" and {more} more" if more > 0 else "") or "none"


# ingot stop


def stop(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)],
    force: Annotated[
        bool, typer.Option("--force", help="Also send SIGTERM to its process, which has to be on this host.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Ask a run to save and stop, from any host that sees its folder. `ingot train RUN` resumes it."""
    seen = Run.open(run, begun=False).stop()
    if seen is None:
        if force:
            raise RunError(f"{run} was asked to stop; it is still starting, so the process to signal is not known yet")
        if as_json:
            print_json({"run": str(run), "host": None, "pid": None, "step": 0, "signalled": False})
        else:
            print(f"{run} is starting; it was asked to stop before its first step")
        return
    state = seen.state
    if force:
        if not seen.here:
            raise RunError(f"{run} was asked to stop; its process {state.pid} is on {state.host}: use --force there")
        try:
            os.kill(state.pid, signal.SIGTERM)
        except ProcessLookupError:
            pass  # it has just ended
        except PermissionError:
            raise RunError(f"{run} was asked to stop; process {state.pid} belongs to another user and gets no signal") from None
    if as_json:
        print_json({"run": str(run), "host": state.host, "pid": state.pid, "step": state.step, "signalled": force})
        return
    signalled = f", and SIGTERM was sent to process {state.pid}" if force else ""
    folder = shlex.quote(str(run))
    print(f"{run} was asked at step {state.step} to save and stop{signalled}; watch it stop: ingot status {folder} --watch")


# ingot ui


def ui(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUNS]...", help="Run folders, or folders of runs. Default: runs/.", show_default=False),
    ] = None,
    port: Annotated[int, typer.Option(metavar="N", help="Port to listen on; 0 takes any free port.", min=0, max=65535)] = 8080,
    device: DeviceName = "cpu",
    allow_custom_models: Annotated[
        bool, typer.Option("--allow-custom-models", help="Let the page open models that run a Python file (model.file).")
    ] = False,
) -> None:
    """Show runs live in a browser, with curves, settings, samples and a prompt. Needs the extra `ui`."""
    try:
        from ingot.serve.app import serve_until_stopped
        from ingot.ui.app import make_app
    except ImportError:
        raise ConfigError("ingot ui needs the packages fastapi and uvicorn", advice="pip install 'ingot-lm[ui]'") from None
    from ingot.cli.use import listen
    from ingot.runtime.machine import cache_root
    from ingot.ui.watcher import Watcher

    for path in runs or ():
        if not path.is_dir():
            raise CheckpointError(f"there is no folder {path}; name run folders, or a folder of runs")
    folders = runs or [RUNS]
    listening = listen("127.0.0.1", port)
    token = secrets.token_hex(8)
    app = make_app(Watcher(folders, cache_root() / "ui"), token, device, allow_custom_models)
    print(f"showing the runs of {', '.join(map(str, folders))} at http://127.0.0.1:{listening.getsockname()[1]}; Ctrl-C ends it")
    print(f"to stop a run or open a model from the page, give it this token: {token}", flush=True)
    serve_until_stopped(app, listening)


# ingot plot


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders to draw together.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write a picture, .png or .svg, instead of text.")
    ] = None,
    axis: Annotated[Literal["steps", "tokens", "seconds"], typer.Option("--x", help="The horizontal axis.")] = "steps",
    sample: Annotated[bool, typer.Option("--sample", help="Show the first run's last sample beside its curves.")] = False,
    as_json: AsJson = False,
) -> None:
    """Draw loss, bits per byte and task accuracies of runs, in the terminal or as a picture."""
    from ingot.runtime.files import check_picture

    if output is not None:
        check_picture(output, "--output")
    opened = [Run.open(path) for path in runs]
    curves = {name: run.series.read().curves(axis) for name, run in zip(run_names(runs), opened, strict=True)}
    if empty := [name for name, curve in curves.items() if not curve.loss and not curve.val_bpb]:
        raise CheckpointError(f"{empty[0]} has no step to draw yet; leave it out or wait for its first")
    text = _last_sample(opened[0]) if sample else ""
    panels = panels_of(curves, axis)
    if output is not None:
        from ingot.console.charts import draw_panels

        draw_panels(panels, visible(text), output, "--output")
    if as_json:
        points = {name: {"loss": curve.loss, "val_bpb": curve.val_bpb, "tasks": curve.tasks} for name, curve in curves.items()}
        print_json({"x": axis, "runs": points, "picture": output})
    elif output is not None:
        print(output)
    else:
        width = shutil.get_terminal_size().columns
        blocks = ["\n".join(panel_lines(panel, width, colours=shows_colours(), braille=shows_braille())) for panel in panels]
        print("\n\n".join([*blocks, *([for_reader(text)] if text else [])]))


def panels_of(curves: Mapping[str, Curves], axis: str) -> list[Panel]:
    """Return a panel each for the loss, the bits per byte and, where tasks were scored, the accuracies of runs."""
    losses = [Line(name, curve.loss) for name, curve in curves.items() if curve.loss]
    scores = [Line(name, curve.val_bpb) for name, curve in curves.items() if curve.val_bpb]
    scored = [(run, task, points) for run, curve in curves.items() for task, points in curve.tasks.items() if points]
    tasks = [Line(task if len(curves) == 1 else f"{run} {task}", points) for run, task, points in scored]
    panels = [
        Panel("training loss, nats per token", axis, losses),
        Panel("validation, bits per byte", axis, scores),
        Panel("tasks, accuracy", axis, tasks),
    ]
    return [panel for panel in panels if panel.lines]


def _last_sample(run: Run) -> str:
    samples = run.samples()
    if not samples:
        raise CheckpointError(f"{run.path} has no samples; leave --sample out, or train with --evaluation.sample_tokens 400")
    return run.sample(max(samples)).strip()


def shows_colours() -> bool:
    """Return True where stdout is a terminal and colours are wanted."""
    return is_terminal(sys.stdout) and "NO_COLOR" not in os.environ


def shows_braille() -> bool:
    """Return True where the encoding of stdout has the characters of a curve."""
    try:
        "⠿┤".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


# ingot compare


class TwoSides(TyperCommand):
    """A command whose arguments are two groups with `--` between them; options may come before the first or after the last."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        second: list[str] = []
        if "--" in args:
            at = args.index("--")
            args, rest = args[:at], args[at + 1 :]
            end = next((i for i, word in enumerate(rest) if word.startswith("-")), len(rest))
            second, args = rest[:end], [*args, *rest[end:]]
        ctx.meta["second side"] = second
        return super().parse_args(ctx, args)


def compare(
    ctx: typer.Context,
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN... -- RUN...", help="Finished runs of one arm, two dashes, and those of another.")
    ],
    score: ScoreOption = "val_bpb",
    as_json: AsJson = False,
) -> None:
    """Compare the scores of two arms of finished runs. Prints mean, standard deviation, Welch's p and the seeds still needed."""
    from ingot.experiments.compare import compare as compare_runs

    second = [Path(word) for word in ctx.meta["second side"]]
    if not second:
        raise ConfigError("there is only one group of runs; put two dashes between the two arms: ingot compare a b -- c d")
    comparison = compare_runs(runs, second, score)
    print_json(_comparison_record(comparison, score)) if as_json else _print_comparison(comparison, score)


def _comparison_record(comparison: Comparison, score: str) -> dict[str, Any]:
    def side_record(side: Side) -> dict[str, Any]:
        runs = [{"run": str(run.path), "seed": run.seeds[0], score: run.score} for run in side.runs]
        return {"runs": runs, "n": len(runs), "mean": side.mean, "std": side.std}

    def finite(number: float) -> float | None:
        return number if math.isfinite(number) else None

    return {
        "score": score,
        "a": side_record(comparison.a),
        "b": side_record(comparison.b),
        "difference": comparison.difference,
        "t": finite(comparison.test.t),
        "degrees_of_freedom": finite(comparison.test.freedom),
        "p": comparison.test.p,
        "more_seeds": list(comparison.more) if comparison.more is not None else None,
        "differing": {name: list(values) for name, values in comparison.differing.items()},
        "notes": list(comparison.notes),
    }


def _print_comparison(comparison: Comparison, score: str) -> None:
    from ingot.experiments.compare import verdict

    rows: list[Sequence[str]] = [("", "n", score, "std", "runs")]
    for name, side in (("A", comparison.a), ("B", comparison.b)):
        paths = " ".join(str(run.path) for run in side.runs)
        rows.append((name, str(len(side.runs)), f"{side.mean:.5f}", f"{side.std:.5f}", paths))
    print_columns(rows)
    share = f" ({100 * comparison.difference / comparison.a.mean:+.2f}%)" if comparison.a.mean else ""
    print(f"\nB - A  {comparison.difference:+.5f}{share}, {verdict(comparison)}")
    for name, values in comparison.differing.items():
        print(f"differ in {name}: {values[0]} and {values[1]}")
    for note in comparison.notes:
        print(f"note: {note}")


# ingot report


@dataclass(frozen=True)
class ReportedRun:
    """A run as the page of `ingot report` shows it."""

    name: str
    run: Run
    status: dict[str, Any]
    result: dict[str, Any]
    settings: dict[str, Any]
    series: Series


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, also of runs that are still running.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.html", help="The page to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write an HTML page about runs. It has differing settings, curves, speed, stalls, samples, artifacts and seed statistics."""
    from ingot.runtime.files import check_picture, write_atomically, writing_output

    if output.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--output {output} is not a name for a page; give one that ends in .html")
    check_target(output, False, force)
    check_picture(output.with_suffix(".png"), "ingot report")
    reported = [_read_run(name, path) for name, path in zip(run_names(runs), runs, strict=True)]
    page = _page(reported)
    with writing_output(output):
        write_atomically(output.resolve(), page)
    if as_json:
        print_json({"report": str(output), "bytes": len(page.encode()), "runs": [run.name for run in reported]})
    else:
        print(output)


def _read_run(name: str, path: Path) -> ReportedRun:
    from ingot.train.resume import decisive_settings

    run = Run.open(path)
    if not run.series.read().curves().loss:
        raise CheckpointError(f"{path} has no step to report yet; leave it out or wait for its first")
    return ReportedRun(name, run, run.record(), run.result() or {}, decisive_settings(run.config), run.series)


def _page(runs: Sequence[ReportedRun]) -> str:
    from ingot.runtime.files import to_json
    from ingot.runtime.machine import made_by

    page = Page(f"Runs: {', '.join(run.name for run in runs)}"[:200])
    page.section("Results", f"Written by {made_by()}.")
    page.table(("run", "status", "steps", "tokens", "tokens/s", "loss", "val_bpb", "val_bpb, sliding"), list(map(_results, runs)))
    _add_settings(page, runs)
    page.section("Curves")
    picture, data = _curves(runs)
    page.picture(picture, "training loss, bits per byte and tokens per second of the runs")
    _add_tasks(page, runs)
    _add_seed_statistics(page, runs)
    _add_step_times(page, runs)
    _add_artifacts(page, runs)
    page.section("Samples", "The last sample of each run.")
    for run in runs:
        if samples := run.run.samples():
            step = max(samples)
            try:
                text = run.run.sample(step, MAX_SAMPLE_CHARACTERS)
            except CheckpointError as error:  # the rest of the page is worth having
                text = str(error)
            page.text(f"{run.name}, step {step:,}", visible(text.strip()))
    page.data("ingot-report", to_json(data))
    return page.render()


def _number(value: object, form: str) -> str:
    """Format a number from a run's files; nothing where there is none, as in a damaged file."""
    from ingot.runs.metrics import is_number

    return format(value, form) if is_number(value) else ""


def _results(run: ReportedRun) -> list[str]:
    score, stride = _number(run.status.get("val_bpb"), ".4f"), _number(run.result.get("val_stride"), ",")
    if (step := run.result.get("val_step")) not in (None, run.result.get("total_steps")):
        score += f" at step {_number(step, ',')}"
    return [
        run.name,
        run.status["status"],
        _number(run.status.get("step"), ","),
        _number(run.status.get("tokens"), ","),
        _number(run.result.get("tokens_per_second") or run.status.get("tokens_per_second"), ",.0f"),
        _number(run.status.get("loss"), ".4f"),
        *(("", f"{score} (stride {stride})") if stride else (score, "")),
    ]


def _add_settings(page: Page, runs: Sequence[ReportedRun]) -> None:
    """Add the settings that differ between runs, or those of a single run that are not the defaults."""
    from ingot.experiments.compare import settings_table

    rows = settings_table([run.settings for run in runs])
    if len(runs) > 1:
        page.section("Settings that differ", "" if rows else "None that change what is trained.")
    else:
        page.section("Settings that are not the defaults")
    if rows:
        page.table(("setting", *(run.name for run in runs)), rows)


def _curves(runs: Sequence[ReportedRun]) -> tuple[bytes, dict[str, Any]]:
    """Return the picture of all curves, and their points."""
    from ingot.console.charts import panels_png

    curves = {run.name: run.series.curves() for run in runs}
    lines = [Line(name, curve.tokens_per_second) for name, curve in curves.items() if curve.tokens_per_second]
    panels = [*panels_of(curves, "steps"), *([Panel("tokens per second", "steps", lines)] if lines else [])]
    return panels_png(panels), {name: vars(curve) for name, curve in curves.items()}


def _add_tasks(page: Page, runs: Sequence[ReportedRun]) -> None:
    """Add the accuracies of the last evaluation that scored tasks."""
    rows = []
    for run in runs:
        scored = run.series.scored or {"tasks": {}}
        for name, task in scored["tasks"].items():
            metrics = [_number(task.get(metric), ".4f") for metric in ("acc", "acc_stderr", "acc_norm")]
            rows.append([run.name, _number(scored.get("step"), ","), name, *metrics, _number(task.get("items"), ",")])
    if rows:
        page.section("Tasks", "Accuracies of the last evaluation; acc_norm is by log-probability per character.")
        page.table(("run", "step", "task", "acc", "standard error", "acc_norm", "items"), rows)


def _add_seed_statistics(page: Page, runs: Sequence[ReportedRun]) -> None:
    """Add mean and standard deviation of runs that differ only in their seeds, and Welch's test between such groups."""
    from ingot.experiments.compare import SeedRun, over_seeds, tested

    arms = over_seeds([SeedRun(run.name, run.run.path, run.settings, run.status.get("val_bpb")) for run in runs])
    if not arms:
        return
    page.section("Over seeds", "Runs that differ in nothing but their seeds.")
    rows = [[arm.name, str(arm.n), _number(arm.mean, ".5f"), _number(arm.std, ".5f")] for arm in arms]
    page.table(("runs", "n", "val_bpb", "std"), rows)
    for test in tested(arms):
        page.table(("A", "B", "B against A"), [[test.a.runs[0].name, test.b.runs[0].name, test.said]])


def _add_step_times(page: Page, runs: Sequence[ReportedRun]) -> None:
    from ingot.runs.series import STALL_FACTOR

    page.section("Seconds per step", f"A stall is a stretch of steps that took more than {STALL_FACTOR:g} times the median.")
    rows = []
    for run in runs:
        timing = run.series.timing()
        times = [_number(timing.percentiles.get(name), ".4f") for name in ("p50", "p95", "p99")]
        rows.append([run.name, *times, _stalls(timing, MAX_REPORTED_STALLS)])
    page.table(("run", "median", "p95", "p99", "stalls"), rows)


def _add_artifacts(page: Page, runs: Sequence[ReportedRun]) -> None:
    rows = []
    for run in runs:
        size, score = _number(run.result.get("artifact_bytes"), ","), _number(run.result.get("artifact_bpb"), ".4f")
        if size:
            rows.append([run.name, str(run.result.get("artifact_path") or ""), size, score])
    if rows:
        page.section("Artifacts")
        page.table(("run", "file", "bytes", "bits per byte of the file"), rows)
