"""`ingot runs`: the runs of a folder, with the best score of each and the best of all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.options import AsJson
from ingot.cli.verbs import app
from ingot.console.output import print_columns, print_json
from ingot.console.progress import duration
from ingot.errors import IngotError
from ingot.runs.view import RUNS, run_record, runs_below

if TYPE_CHECKING:
    from ingot.runs.view import Run

OF_STATUS = ("run", "status", "stop_reason", "step", "tokens", "elapsed_seconds", "started_at", "loss", "val_bpb")


@app.command("runs")
def runs(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where the runs are, or one folder further down.")] = RUNS,
    as_json: AsJson = False,
) -> None:
    """List the runs of a folder: status, steps, score, the best score of each, and which is the best of its data."""
    records = [_listed(run) for run in runs_below(folder, deep=True)]
    _mark_best(records)
    print_json(records) if as_json else _print(records)


def _listed(run: Run) -> dict[str, Any]:
    known = run_record(run)
    best = _best(run)
    return {
        **{name: known[name] for name in OF_STATUS},
        "best_val_bpb": best["val_bpb"] if best is not None else None,
        "best_step": best["step"] if best is not None else None,
        "data": _data(run),
        "best": False,
    }


def _best(run: Run) -> dict[str, Any] | None:
    """The last evaluation that was the best so far, as the run itself compared them: by the same rows."""
    try:
        evaluations = [record for record in run.metrics()[0] if record.get("kind") == "evaluation"]
    except IngotError:  # a damaged line of metrics.jsonl is no reason to hide the other runs
        return None
    return next((record for record in reversed(evaluations) if record.get("best") and record.get("val_bpb") is not None), None)


def _data(run: Run) -> str | None:
    try:
        return run.config.data.path
    except IngotError:  # the settings of another version
        return None


def _mark_best(records: Sequence[dict[str, Any]]) -> None:
    """Mark the lowest score of each data: bits per byte of different texts do not compare."""
    scored = [record for record in records if record["best_val_bpb"] is not None]
    for data in {record["data"] for record in scored}:
        same = [record for record in scored if record["data"] == data]
        min(same, key=lambda record: record["best_val_bpb"])["best"] = True


def _print(records: Sequence[dict[str, Any]]) -> None:
    rows = [("run", "status", "step", "trained", "val_bpb", "best", "", "data")]
    for record in records:
        why = f" ({record['stop_reason']})" if record["stop_reason"] else ""
        rows.append(
            (
                record["run"],
                f"{record['status']}{why}",
                f"{record['step']:,}",
                duration(record["elapsed_seconds"]),
                _score(record["val_bpb"]),
                _score(record["best_val_bpb"]),
                "<- best" if record["best"] else "",
                record["data"] or "-",
            )
        )
    print_columns(rows)


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
