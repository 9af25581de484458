"""`ingot report`: what runs came to, as one page to keep or to send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.options import AsJson
from ingot.cli.verbs import app
from ingot.console.output import print_json, visible
from ingot.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from ingot.console.charts import Page, Panel
    from ingot.runs.series import Timing
    from ingot.runs.view import Run

MOST_STALLS, MOST_SAMPLE = 5, 4000  # lines of stalls per run, characters of a sample


@dataclass(frozen=True)
class Reported:
    """All that the page says of a run."""

    name: str
    run: Run
    status: dict[str, Any]
    result: dict[str, Any]
    settings: dict[str, Any]
    records: list[dict[str, Any]]
    timing: Timing


@app.command("report")
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, those that go on included.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.html", help="The page to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write one page on runs: settings that differ, curves, speed, stalls, samples, artifacts, statistics over seeds."""
    from ingot.cli.export import check_target
    from ingot.runtime.files import check_picture, write_atomically, writing_output

    if output.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--output {output} is not a name for a page; give one that ends in .html")
    check_target(output, False, force)
    check_picture(output.with_suffix(".png"), "ingot report")
    found = _read(runs)
    page = _page(found)
    with writing_output(output):
        write_atomically(output.resolve(), page)
    if as_json:
        print_json({"report": str(output), "bytes": len(page.encode()), "runs": [one.name for one in found]})
    else:
        print(output)


def _read(paths: Sequence[Path]) -> list[Reported]:
    from ingot.runs.series import step_times
    from ingot.runs.view import Run, run_names, run_record
    from ingot.train.resume import compared

    found = []
    for name, path in zip(run_names(paths), paths, strict=True):
        run = Run.open(path)
        records, _ = run.metrics()
        if not any(record.get("kind") == "train" for record in records):
            raise CheckpointError(f"{path} has no step to report yet; leave it out or wait for its first")
        settings = compared(run.config)
        found.append(Reported(name, run, run_record(run), run.result() or {}, settings, records, step_times(records)))
    return found


def _page(found: Sequence[Reported]) -> str:
    from ingot.console.charts import Page
    from ingot.runtime.files import to_json
    from ingot.runtime.machine import made_by

    page = Page(f"Runs: {', '.join(one.name for one in found)}"[:200])
    page.section("Results", f"Written by {made_by()}.")
    page.table(
        ("run", "status", "steps", "tokens", "tokens/s", "loss", "val_bpb", "val_bpb, sliding"), [_result(one) for one in found]
    )
    _settings(page, found)
    page.section("Curves")
    drawn, data = _curves(found)
    page.picture(drawn, "training loss, bits per byte and tokens per second of the runs")
    _tasks(page, found)
    _statistics(page, found)
    _speed(page, found)
    _artifacts(page, found)
    page.section("Samples", "What each run wrote last.")
    for one in found:
        samples = one.run.samples()
        if samples:
            step = max(samples)
            page.text(f"{one.name}, step {step:,}", visible(_sample(one.run, step).strip()))
    page.data("ingot-report", to_json(data))
    return page.render()


def _sample(run: Run, step: int) -> str:
    try:
        return run.sample(step, MOST_SAMPLE)
    except CheckpointError as error:  # the rest of the page is worth having
        return str(error)


def _number(value: object, form: str) -> str:
    """A number of a run's files as it is shown; nothing where there is none, as in a damaged file."""
    from ingot.runs.metrics import is_number

    return format(value, form) if is_number(value) else ""


def _result(one: Reported) -> list[str]:
    def number(name: str, form: str) -> str:
        return _number(one.status.get(name), form)

    speed = _number(one.result.get("tokens_per_second") or one.status.get("tokens_per_second"), ",.0f")
    shown = [one.name, one.status["status"], number("step", ","), number("tokens", ","), speed]
    score, stride = number("val_bpb", ".4f"), _number(one.result.get("val_stride"), ",")
    if (at := one.result.get("val_step")) not in (None, one.result.get("total_steps")):
        score += f" at step {_number(at, ',')}"
    return [*shown, number("loss", ".4f"), *(("", f"{score} (stride {stride})") if stride else (score, ""))]


def _settings(page: Page, found: Sequence[Reported]) -> None:
    """What tells the runs apart; of one alone, what is not the default."""
    from ingot.experiments.compare import settings_table

    rows = settings_table([one.settings for one in found])
    if len(found) > 1:
        page.section("Settings that differ", "" if rows else "None of those that decide what a run comes to.")
    else:
        page.section("Settings that are not the defaults")
    if rows:
        page.table(("setting", *(one.name for one in found)), rows)


def _curves(found: Sequence[Reported]) -> tuple[bytes, dict[str, Any]]:
    from ingot.cli.plot import panels_of
    from ingot.console.charts import Line, Panel, panels_png
    from ingot.runs.series import curves_of, read_line

    curves = {one.name: curves_of(one.records) for one in found}
    speeds = {one.name: read_line(one.records, "tokens_per_second") for one in found}
    lines = [Line(name, points) for name, points in speeds.items() if points]
    panels: list[Panel] = [*panels_of(curves, "steps"), *([Panel("tokens per second", "steps", lines)] if lines else [])]
    data = {
        name: {"loss": curve.loss, "val_bpb": curve.val_bpb, "tasks": curve.tasks, "tokens_per_second": speeds[name]}
        for name, curve in curves.items()
    }
    return panels_png(panels), data


def _tasks(page: Page, found: Sequence[Reported]) -> None:
    """What the last evaluation that scored tasks found."""
    from ingot.runs.reporter import scored_tasks

    rows = []
    for one in found:
        scored = [record for record in one.records if record.get("kind") == "evaluation" and scored_tasks(record)]
        for name, task in scored_tasks(scored[-1]).items() if scored else ():
            told = [_number(task.get(metric), ".4f") for metric in ("acc", "acc_stderr", "acc_norm")]
            rows.append([one.name, _number(scored[-1].get("step"), ","), name, *told, _number(task.get("items"), ",")])
    if rows:
        page.section("Tasks", "Accuracies by the last evaluation; acc_norm is by log-probability per character.")
        page.table(("run", "step", "task", "acc", "standard error", "acc_norm", "items"), rows)


def _statistics(page: Page, found: Sequence[Reported]) -> None:
    """Runs that differ in nothing but their seeds, together; where two such groups have seeds enough, the test between them."""
    from ingot.experiments.compare import Known, over_seeds, tested

    arms = over_seeds([Known(one.name, one.run.path, one.settings, one.status.get("val_bpb")) for one in found])
    if not arms:
        return
    page.section("Over seeds", "Runs that differ in nothing but their seeds.")

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.5f}"

    page.table(("runs", "n", "val_bpb", "std"), [[arm.name, str(arm.n), number(arm.mean), number(arm.std)] for arm in arms])
    for test in tested(arms):
        page.table(("A", "B", "B against A"), [[test.a.runs[0].name, test.b.runs[0].name, test.said]])


def _speed(page: Page, found: Sequence[Reported]) -> None:
    from ingot.runs.series import STALL

    page.section("Seconds per step", f"A stall is a stretch of steps that took more than {STALL:g} times the median.")
    rows = []
    for one in found:
        times = [f"{one.timing.percentiles[name]:.4f}" if one.timing.percentiles else "" for name in ("p50", "p95", "p99")]
        stalls = [f"{stall.seconds:.1f} s before step {stall.step:,}" for stall in one.timing.stalls[:MOST_STALLS]]
        more = len(one.timing.stalls) - len(stalls)
        rows.append([one.name, *times, "; ".join(stalls) + (f" and {more} more" if more > 0 else "") or "none"])
    page.table(("run", "median", "p95", "p99", "stalls"), rows)


def _artifacts(page: Page, found: Sequence[Reported]) -> None:
    rows = []
    for one in found:
        size, score = _number(one.result.get("artifact_bytes"), ","), _number(one.result.get("artifact_bpb"), ".4f")
        if size:
            rows.append([one.name, str(one.result.get("artifact_path") or ""), size, score])
    if rows:
        page.section("Artifacts")
        page.table(("run", "file", "bytes", "bits per byte of the file"), rows)
