"""`ingot report`: write a self-contained HTML page about runs, without JavaScript."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Annotated, Any

import typer

from ingot.cli.arguments import AsJson
from ingot.console.charts import describe_stalls, figure, run_panels
from ingot.console.output import check_target, print_json, visible
from ingot.errors import CheckpointError, ConfigError
from ingot.runs.view import Run, run_names

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


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders; the runs may still be in progress.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The HTML file to write.")] = Path("report.html"),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write an HTML page about runs: settings that differ, curves, step times, samples, artifacts and statistics over seeds."""
    from ingot.runtime.files import check_picture, write_atomically, writing_output

    if output.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--output {output} is not the name of an HTML file; give one that ends in .html")
    check_target(output, False, force)
    check_picture(output.with_suffix(".png"), "ingot report")
    opened = {name: Run.open(path) for name, path in zip(run_names(runs), runs, strict=True)}
    for run in opened.values():
        if not run.series.read().curves().loss:
            raise CheckpointError(f"{run.path} has no step to report yet; leave it out or wait for its first step")
    page = _page(opened)
    with writing_output(output):
        write_atomically(output.resolve(), page)
    print_json({"report": output, "bytes": len(page.encode()), "runs": list(opened)}) if as_json else print(output)


def _page(runs: Mapping[str, Run]) -> str:
    from ingot.experiments.compare import SeedRun, over_seeds, settings_table, tested
    from ingot.runs.series import STALL_FACTOR
    from ingot.runtime.files import to_json
    from ingot.runtime.machine import made_by
    from ingot.train.resume import decisive_settings

    statuses = {name: run.record() for name, run in runs.items()}
    results: dict[str, dict[str, Any]] = {name: run.result() or {} for name, run in runs.items()}
    settings = {name: decisive_settings(run.config) for name, run in runs.items()}
    parts = [HEAD.replace("TITLE", escape(f"Runs: {', '.join(runs)}"[:200]))]

    def section(title: str, note: str = "") -> None:
        parts.append(f"<h2>{escape(title)}</h2>\n" + (f"<p>{escape(note)}</p>\n" if note else ""))

    def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
        lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
        parts.append(f"<table>\n{''.join(f'<tr>{line}</tr>{chr(10)}' for line in lines)}</table>\n")

    section("Results", f"Written by {made_by()}.")
    rows = []
    for name, status in statuses.items():
        result = results[name]
        score, stride = _number(status["val_bpb"], ".4f"), _number(result.get("val_stride"), ",")
        if (step := result.get("val_step")) not in (None, result.get("total_steps")):
            score += f" at step {_number(step, ',')}"
        speed = _number(result.get("tokens_per_second") or status["tokens_per_second"], ",.0f")
        numbers = _number(status["step"], ","), _number(status["tokens"], ","), speed, _number(status["loss"], ".4f")
        rows.append([name, status["status"], *numbers, *(("", f"{score} (stride {stride})") if stride else (score, ""))])
    table(("run", "status", "steps", "tokens", "tokens/s", "loss", "val_bpb", "val_bpb, sliding"), rows)
    differing = settings_table(list(settings.values()))
    none = "No setting that affects training differs." if len(runs) > 1 and not differing else ""
    section("Settings that differ" if len(runs) > 1 else "Settings that differ from the defaults", none)
    table(("setting", *runs), differing)

    section("Curves")
    curves, png = {name: run.series.curves() for name, run in runs.items()}, io.BytesIO()
    figure(run_panels(curves, "steps", speed=True)).savefig(png, format="png", dpi=110)
    words = "training loss, bits per byte and tokens per second of the runs"
    parts.append(f'<img alt="{words}" src="data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}">\n')

    rows = []
    for name, run in runs.items():
        for last in [evaluation for evaluation in run.series.evaluations if evaluation["tasks"]][-1:]:
            for task, values in last["tasks"].items():
                metrics = [_number(values.get(metric), ".4f") for metric in ("acc", "acc_stderr", "acc_norm")]
                rows.append([name, _number(last.get("step"), ","), task, *metrics, _number(values.get("items"), ",")])
    if rows:
        section("Tasks", "Accuracies of the last evaluation; acc_norm ranks answers by log-probability per character.")
        table(("run", "step", "task", "acc", "standard error", "acc_norm", "items"), rows)

    if arms := over_seeds([SeedRun(name, run.path, settings[name], statuses[name]["val_bpb"]) for name, run in runs.items()]):
        section("Over seeds", "Runs that differ only in their seeds.")
        rows = [[arm.name, str(arm.n), _number(arm.mean, ".5f"), _number(arm.std, ".5f")] for arm in arms]
        table(("runs", "n", "val_bpb", "std"), rows)
        for a, b, said in tested(arms):
            table(("A", "B", "B against A"), [[a.runs[0].name, b.runs[0].name, said]])

    section("Seconds per step", f"Stalls are logging intervals with a mean over {STALL_FACTOR:g} times the median.")
    rows = []
    for name, run in runs.items():
        timing = run.series.timing()
        times = [_number(timing.percentiles.get(share), ".4f") for share in ("p50", "p95", "p99")]
        rows.append([name, *times, describe_stalls(timing, MAX_STALLS)])
    table(("run", "median", "p95", "p99", "stalls"), rows)

    rows = [
        [name, str(result.get("artifact_path") or ""), size, _number(result.get("artifact_bpb"), ".4f")]
        for name, result in results.items()
        if (size := _number(result.get("artifact_bytes"), ","))
    ]
    if rows:
        section("Artifacts")
        table(("run", "file", "bytes", "bits per byte of the artifact"), rows)

    section("Samples", "The last text sample of each run.")
    for name, run in runs.items():
        for step in sorted(run.samples())[-1:]:
            try:
                text = run.sample(step, MAX_SAMPLE_CHARACTERS)
            except CheckpointError as error:  # show the error in place of the sample
                text = str(error)
            parts.append(f"<h3>{escape(name)}, step {step:,}</h3>\n<pre>{escape(visible(text.strip()))}</pre>\n")
    data = to_json({name: vars(curve) for name, curve in curves.items()}).replace("<", "\\u003c")
    parts.append(f'<script type="application/json" id="ingot-report">{data}</script>\n</body></html>\n')
    return "".join(parts)


def _number(value: object, form: str) -> str:
    """Format a number from a run's files; return an empty string if it is missing or invalid."""
    from ingot.runs.metrics import is_number

    return format(value, form) if is_number(value) else ""
