"""`ingot report`: a self-contained HTML page about runs, without external resources or scripts."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.arguments import AsJson
from ingot.console.charts import describe_stalls, figure, run_panels
from ingot.console.output import check_target, print_json, visible
from ingot.errors import CheckpointError, ConfigError
from ingot.runs.view import Run, run_names

if TYPE_CHECKING:
    from ingot.runs.series import Series

MAX_STALLS = 5
MAX_SAMPLE_CHARACTERS = 4000
HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>TITLE</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
th, td { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; }
th { border-bottom: 1px solid #999; } td { border-bottom: 1px solid #eee; font-variant-numeric: tabular-nums; }
pre { background: #f6f6f6; padding: 1rem; white-space: pre-wrap; } img { max-width: 100%; } h2 { margin-top: 2rem; }
@media (prefers-color-scheme: dark) {
  body { background: #181818; color: #ddd; } pre { background: #242424; } td { border-color: #333; } img { background: #fff; }
}
</style></head><body>
<h1>TITLE</h1>
"""


@dataclass(frozen=True)
class ReportedRun:
    """A run as shown on the page."""

    name: str
    run: Run
    status: dict[str, Any]
    result: dict[str, Any]
    settings: dict[str, Any]
    series: Series


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, also of runs that are still running.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page to write.")] = Path("report.html"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write an HTML page about runs. It has differing settings, curves, speed, stalls, samples, artifacts and seed statistics."""
    from ingot.runtime.files import check_picture, write_atomically, writing_output
    from ingot.train.resume import decisive_settings

    if output.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--output {output} is not a name for a page; give one that ends in .html")
    check_target(output, False, force)
    check_picture(output.with_suffix(".png"), "ingot report")
    reported = []
    for name, path in zip(run_names(runs), runs, strict=True):
        run = Run.open(path)
        if not run.series.read().curves().loss:
            raise CheckpointError(f"{path} has no step to report yet; leave it out or wait for its first")
        reported.append(ReportedRun(name, run, run.record(), run.result() or {}, decisive_settings(run.config), run.series))
    page = _page(reported)
    with writing_output(output):
        write_atomically(output.resolve(), page)
    if as_json:
        print_json({"report": str(output), "bytes": len(page.encode()), "runs": [run.name for run in reported]})
    else:
        print(output)


def _page(runs: Sequence[ReportedRun]) -> str:
    from ingot.experiments.compare import SeedRun, over_seeds, settings_table, tested
    from ingot.runs.series import STALL_FACTOR
    from ingot.runtime.files import to_json
    from ingot.runtime.machine import made_by

    parts = [HEAD.replace("TITLE", escape(f"Runs: {', '.join(run.name for run in runs)}"[:200]))]

    def section(title: str, note: str = "") -> None:
        parts.append(f"<h2>{escape(title)}</h2>\n" + (f"<p>{escape(note)}</p>\n" if note else ""))

    def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
        lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
        parts.append(f"<table>\n{''.join(f'<tr>{line}</tr>{chr(10)}' for line in lines)}</table>\n")

    section("Results", f"Written by {made_by()}.")
    table(("run", "status", "steps", "tokens", "tokens/s", "loss", "val_bpb", "val_bpb, sliding"), list(map(_results, runs)))
    settings = settings_table([run.settings for run in runs])
    if len(runs) > 1:
        section("Settings that differ", "" if settings else "None that change what is trained.")
    else:
        section("Settings that are not the defaults")
    table(("setting", *(run.name for run in runs)), settings)

    section("Curves")
    curves, png = {run.name: run.series.curves() for run in runs}, io.BytesIO()
    figure(run_panels(curves, "steps", speed=True)).savefig(png, format="png", dpi=110)
    words = "training loss, bits per byte and tokens per second of the runs"
    parts.append(f'<img alt="{words}" src="data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}">\n')

    scored = [(run, record) for run in runs for record in [one for one in run.series.evaluations if one["tasks"]][-1:]]
    if scored:
        section("Tasks", "Accuracies of the last evaluation; acc_norm is by log-probability per character.")
        rows = []
        for run, last in scored:
            for name, task in last["tasks"].items():
                metrics = [_number(task.get(metric), ".4f") for metric in ("acc", "acc_stderr", "acc_norm")]
                rows.append([run.name, _number(last.get("step"), ","), name, *metrics, _number(task.get("items"), ",")])
        table(("run", "step", "task", "acc", "standard error", "acc_norm", "items"), rows)

    if arms := over_seeds([SeedRun(run.name, run.run.path, run.settings, run.status.get("val_bpb")) for run in runs]):
        section("Over seeds", "Runs that differ in nothing but their seeds.")
        rows = [[arm.name, str(arm.n), _number(arm.mean, ".5f"), _number(arm.std, ".5f")] for arm in arms]
        table(("runs", "n", "val_bpb", "std"), rows)
        for test in tested(arms):
            table(("A", "B", "B against A"), [[test.a.runs[0].name, test.b.runs[0].name, test.said]])

    section("Seconds per step", f"A stall is a stretch of steps that took more than {STALL_FACTOR:g} times the median.")
    rows = []
    for run in runs:
        timing = run.series.timing()
        times = [_number(timing.percentiles.get(name), ".4f") for name in ("p50", "p95", "p99")]
        rows.append([run.name, *times, describe_stalls(timing, MAX_STALLS)])
    table(("run", "median", "p95", "p99", "stalls"), rows)

    artifacts = [(run.name, run.result) for run in runs if _number(run.result.get("artifact_bytes"), ",")]
    if artifacts:
        section("Artifacts")
        rows = []
        for name, result in artifacts:
            size, score = _number(result["artifact_bytes"], ","), _number(result.get("artifact_bpb"), ".4f")
            rows.append([name, str(result.get("artifact_path") or ""), size, score])
        table(("run", "file", "bytes", "bits per byte of the file"), rows)

    section("Samples", "The last sample of each run.")
    for run in runs:
        for step in sorted(run.run.samples())[-1:]:
            try:
                text = run.run.sample(step, MAX_SAMPLE_CHARACTERS)
            except CheckpointError as error:  # the rest of the page is still useful
                text = str(error)
            parts.append(f"<h3>{escape(run.name)}, step {step:,}</h3>\n<pre>{escape(visible(text.strip()))}</pre>\n")
    data = to_json({name: vars(curve) for name, curve in curves.items()}).replace("<", "\\u003c")
    parts.append(f'<script type="application/json" id="ingot-report">{data}</script>\n</body></html>\n')
    return "".join(parts)


def _number(value: object, form: str) -> str:
    """Format a number from a run's files; return an empty text if it is missing, as in a damaged file."""
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
