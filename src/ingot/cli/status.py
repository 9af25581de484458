"""Commands that work on the folders of runs: status, stop, plot, compare and ui.

None of them takes a lock or waits for a run, and `ingot status` of one run loads neither torch nor numpy.
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
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option

from ingot.cli.arguments import AsJson, DeviceName, ScoreOption
from ingot.console.charts import describe_stalls, figure, panel_lines, run_panels
from ingot.console.output import columns, for_reader, print_columns, print_json, visible
from ingot.console.progress import draw_lines, duration, is_terminal
from ingot.errors import CheckpointError, ConfigError, IngotError
from ingot.runs.folder import INDEX
from ingot.runs.view import RUNS, Run, find_runs, run_names
from ingot.runtime.files import read_json

WATCH_SECONDS = 1.0
MAX_CPU_SHARE = 0.02  # fraction of a CPU core: watching a run must not slow the run down
MAX_WAIT_SECONDS = 30.0
MAX_WATCHED_STALLS = 3
_runs = typer.Argument(metavar="[RUN]...", help="Run folders, or folders that contain runs. Default: runs/.", show_default=False)
RunsOrFolders = Annotated[list[Path] | None, _runs]


def status(
    runs: RunsOrFolders = None,
    watch: Annotated[bool, Option("--watch", help="Keep showing the runs, with their curves, until all have ended.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the status of runs: step, loss, throughput and remaining budget; for several runs, a table with their best scores."""
    opened: list[Run] = []
    for path in runs or [RUNS]:
        found = [Run(place) for place in sorted(find_runs([path]).values())]
        if not found and not runs:
            raise CheckpointError(f"there are no runs in {RUNS}/; specify another folder")
        opened += found or [Run.open(path)]
    if watch:
        _watch(opened, as_json)
    elif as_json:
        print_json(_status_records(opened))
    else:
        print("\n".join(_status_lines(_status_records(opened))))


def _status_records(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a record for each run; if there are several, add their best scores and mark the best run on each dataset."""
    records = [run.record() for run in runs]
    if len(records) == 1:
        return records
    for record, run in zip(records, runs, strict=True):
        best: dict[str, Any] = {}
        with suppress(IngotError):  # one damaged run must not hide the others
            best = run.series.read().best or {}
        record |= {"best_val_bpb": best.get("val_bpb"), "best_step": best.get("step"), "best": False, **_data(run)}
    scored = [record for record in records if record["best_val_bpb"] is not None]
    for data in {record["data"] for record in scored}:  # bits per byte can only be compared on the same data
        same_data = [record for record in scored if record["data"] == data]
        min(same_data, key=lambda record: record["best_val_bpb"])["best"] = True
    return records


@cache
def _data(run: Run) -> dict[str, str | None]:
    """Return the data path of a run and the kind of tokenizer in its newest checkpoint; None for what cannot be read."""
    path = kind = None
    with suppress(IngotError):  # config.yaml may come from another version of Ingot
        path = run.config.data.path
    with suppress(IngotError, OSError, ValueError, LookupError, TypeError):
        kind = str(read_json(max(run.checkpoints().items())[1] / INDEX)["progress"]["tokenizer"]["kind"])
    return {"data": path, "tokenizer": kind}


def _status_lines(records: Sequence[dict[str, Any]]) -> list[str]:
    facts = list(map(_status_facts, records))
    if len(facts) == 1:
        return columns([(name, value) for name, value in facts[0].items() if value])
    names = [name for name in facts[0] if name not in ("checkpoint", "process", "error")]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    while True:
        lines = columns([names, *([row[name] or "-" for name in names] for row in facts)])
        dropped = next((name for name in ("data", "last heard", "best", "tokens/s") if name in names), None)
        if dropped is None or max(map(len, lines)) <= width:
            return lines
        names.remove(dropped)


def _status_facts(record: dict[str, Any]) -> dict[str, str]:
    def number(name: str, form: str, unit: str = "") -> str:
        return format(record[name], form) + unit if record.get(name) is not None else ""

    def seconds(name: str, unit: str) -> str:
        return f"{duration(record[name])} {unit}" if record[name] is not None else ""

    left = (number("steps_left", ",", " steps"), seconds("budget_seconds_left", "of training"))
    return {
        "run": record["run"],
        "status": record["status"] + (f" ({record['stop_reason']})" if record["stop_reason"] else ""),
        "step": number("step", ","),
        "left": " or ".join(filter(None, left)),
        "loss": number("loss", ".4f"),
        "val_bpb": number("val_bpb", ".4f"),
        "best": number("best_val_bpb", ".4f", " <- best" if record.get("best") else ""),
        "tokens/s": number("tokens_per_second", ",.0f"),
        "checkpoint": record["checkpoint"] or "",
        "last heard": seconds("last_heard_seconds", "ago"),
        "process": f"{record['pid']} on {record['host']}" if record["pid"] is not None else "",
        "error": record["error"] or "",
        "data": ", ".join(filter(None, (record.get("data"), record.get("tokenizer")))),
    }


def _watch(runs: Sequence[Run], as_json: bool) -> None:
    """Show runs until none is running or Ctrl-C is pressed: redraw them on a terminal; elsewhere, print them when they change."""
    drawn, previous = 0, None
    in_place = is_terminal(sys.stdout) and not as_json
    try:
        while True:
            began = time.process_time() if previous else math.inf  # inf: do not count the first round, which reads all files
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
        return  # Ctrl-C is the normal way to quit; the last screen stays visible


def screen(runs: Sequence[Run], records: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of `ingot status --watch`: status, curves, and step time."""
    series = {name: run.series.read() for name, run in zip(run_names([run.path for run in runs]), runs, strict=True)}
    width, height = shutil.get_terminal_size()
    lines = [*_status_lines(records), ""]
    panels = run_panels({name: run_series.curves() for name, run_series in series.items()}, "steps")
    panel_height = max(4, (height - len(lines) - len(runs) - 2) // max(1, len(panels)) - 4 - len(runs))
    for panel in panels:
        lines += [*panel_lines(panel, width, min(12, panel_height), shows_colours()), ""]
    for name, run_series in series.items():
        timing = run_series.timing()
        if timing.percentiles:
            times = ", ".join(f"{share} {seconds:.4f} s" for share, seconds in timing.percentiles.items())
            lines.append(f"{name}: a step takes {times}; stalls: {describe_stalls(timing, MAX_WATCHED_STALLS)}")
    return lines


def shows_colours() -> bool:
    """Return True if stdout is a terminal and colours are enabled."""
    return is_terminal(sys.stdout) and "NO_COLOR" not in os.environ


def stop(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run to stop.", show_default=False)],
    force: Annotated[bool, Option("--force", help="Also send SIGTERM to the run's process, which must be on this host.")] = False,
    as_json: AsJson = False,
) -> None:
    """Ask a run to save and stop, from any host that can access its folder. `ingot train RUN` resumes it."""
    opened = Run.open(run)
    state = opened.stop().state
    if force:
        opened.signal(signal.SIGTERM)
    if as_json:
        print_json({"run": str(run), "host": state.host, "pid": state.pid, "step": state.step, "signalled": force})
        return
    signalled = f", and SIGTERM was sent to process {state.pid}" if force else ""
    watching = f"watch it stop: ingot status {shlex.quote(str(run))} --watch"
    print(f"{run} was asked at step {state.step} to save and stop{signalled}; {watching}")


def ui(
    runs: RunsOrFolders = None,
    port: Annotated[int, Option(metavar="N", help="Port to listen on; 0 picks a free port.", min=0, max=65535)] = 8080,
    device: DeviceName = "cpu",
    allow_custom_models: Annotated[bool, Option("--allow-custom-models", help="Let the page run custom models' code.")] = False,
) -> None:
    """Show runs live in a browser, with curves, settings, samples and a prompt. Needs the extra `ui`."""
    try:
        from ingot.serve.app import listen, serve_until_stopped
        from ingot.ui.web import make_app
    except ImportError:
        raise ConfigError("ingot ui needs the packages fastapi and uvicorn", advice="pip install 'ingot-lm[ui]'") from None
    from ingot.ui.watcher import Watcher

    for path in runs or ():
        if not path.is_dir():
            raise CheckpointError(f"{path} is not a folder; name run folders, or a folder of runs")
    folders = runs or [RUNS]
    listening = listen("127.0.0.1", port)
    token = secrets.token_hex(8)
    app = make_app(Watcher(folders), token, device, allow_custom_models)
    print(f"showing the runs of {', '.join(map(str, folders))} at http://127.0.0.1:{listening.getsockname()[1]}; Ctrl-C to stop")
    print(f"to stop a run or open a model on the page, enter this token: {token}", flush=True)
    serve_until_stopped(app, listening)


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders to plot in the same charts.")],
    output: Annotated[Path | None, Option("--output", "-o", metavar="FILE", help="Save to this .png or .svg file.")] = None,
    axis: Annotated[Literal["steps", "tokens", "seconds"], Option("--x", help="Unit of the horizontal axis.")] = "steps",
    sample: Annotated[bool, Option("--sample", help="Also show the last text sample of the first RUN.")] = False,
    as_json: AsJson = False,
) -> None:
    """Draw loss, bits per byte and task accuracies of runs, in the terminal or as a picture."""
    from ingot.runtime.files import check_picture, save_picture

    if output is not None:
        check_picture(output, "--output")
    opened = [Run.open(path) for path in runs]
    curves = {name: run.series.read().curves(axis) for name, run in zip(run_names(runs), opened, strict=True)}
    if empty := [name for name, curve in curves.items() if not curve.loss and not curve.val_bpb]:
        raise CheckpointError(f"{empty[0]} has no step to draw yet; leave it out or wait for its first step")
    samples = opened[0].samples() if sample else {}
    if sample and not samples:
        raise CheckpointError(f"{runs[0]} has no samples; leave --sample out, or train with --evaluation.sample_tokens 400")
    text = opened[0].sample(max(samples)).strip() if sample else ""
    panels = run_panels(curves, axis)
    if output is not None:
        save_picture(figure(panels, visible(text)), output)
    if as_json:
        points = {name: {"loss": curve.loss, "val_bpb": curve.val_bpb, "tasks": curve.tasks} for name, curve in curves.items()}
        print_json({"x": axis, "runs": points, "picture": output})
    elif output is not None:
        print(output)
    else:
        width = shutil.get_terminal_size().columns
        blocks = ["\n".join(panel_lines(panel, width, colours=shows_colours())) for panel in panels]
        print("\n\n".join([*blocks, *([for_reader(text)] if text else [])]))


def compare(
    ctx: typer.Context,
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN... -- RUN...", help="Two groups of finished runs, separated by two dashes.")
    ],
    score: ScoreOption = "val_bpb",
    as_json: AsJson = False,
) -> None:
    """Compare the scores of two groups of finished runs: mean, std, Welch's p-value and how many more seeds are needed."""
    from ingot.experiments.compare import compare as compare_runs
    from ingot.experiments.compare import verdict

    if not ctx.meta["second side"]:
        raise ConfigError("there is only one group of runs; put two dashes between the two groups: ingot compare a b -- c d")
    comparison = compare_runs(runs, [Path(word) for word in ctx.meta["second side"]], score)
    sides, test = {"a": comparison.a, "b": comparison.b}, comparison.test
    if as_json:
        record: dict[str, Any] = {"score": score}
        for name, side in sides.items():
            of_runs = [{"run": run.path, "seed": run.seeds[0], score: run.score} for run in side.runs]
            record[name] = {"runs": of_runs, "n": len(of_runs), "mean": side.mean, "std": side.std}
        record |= {"difference": comparison.difference, "t": test.t, "degrees_of_freedom": test.freedom, "p": test.p}
        more = {"more_seeds": comparison.more, "differing": comparison.differing, "notes": comparison.notes}
        print_json({**record, **more})
        return
    rows: list[Sequence[str]] = [("", "n", score, "std", "runs")]
    for name, side in sides.items():
        paths = " ".join(str(run.path) for run in side.runs)
        rows.append((name.upper(), str(len(side.runs)), f"{side.mean:.5f}", f"{side.std:.5f}", paths))
    print_columns(rows)
    share = f" ({100 * comparison.difference / comparison.a.mean:+.2f}%)" if comparison.a.mean else ""
    print(f"\nB - A  {comparison.difference:+.5f}{share}, {verdict(comparison)}")
    for name, values in comparison.differing.items():
        print(f"the groups differ in {name}: {values[0]} and {values[1]}")
    for note in comparison.notes:
        print(f"note: {note}")
