"""`ingot eval`: how good a trained model is."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.generate import DeviceName, OptionalModelPath, Which
from ingot.cli.options import AsJson
from ingot.cli.verbs import app
from ingot.console.output import print_columns, print_json
from ingot.errors import CheckpointError, ConfigError, RunError, Setting

if TYPE_CHECKING:
    from ingot.eval.evaluator import Score as TextScore
    from ingot.eval.tasks import Score
    from ingot.inference.model import LoadedModel


@app.command("eval")
def evaluate(
    path: OptionalModelPath = None,
    artifact: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Score the model in this file, as `ingot export` wrote it.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Prepared folder; its validation split is scored. Default: the run's."),
    ] = None,
    rows: Annotated[int | None, typer.Option(metavar="N", help="Score N rows spread over the split.", min=1)] = None,
    stride: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens from one row to the next. Default: as in its training.", min=1)
    ] = None,
    seq_len: Annotated[int | None, typer.Option(metavar="N", help="Tokens of a row. Default: as in its training.", min=1)] = None,
    self_test: Annotated[
        bool,
        typer.Option("--self-test", help="Do not score it: check that no token would see itself or the future, and the like."),
    ] = False,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Score it on hellaswag, lambada, arc_easy, arc_challenge, piqa, winogrande or blimp."),
    ] = None,
    task_data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder with the files of the tasks. Default: the hub.")
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", help="Tasks: the first N items of each file.", min=1)] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Tasks: cut what is too long at its beginning.")] = False,
    which: Which = "latest",
    device: DeviceName = "auto",
    as_json: AsJson = False,
    tell_rows: Annotated[bool, typer.Option("--tell-rows", hidden=True, help="For programs: a line per batch.")] = False,
) -> None:
    """Score a trained model on a validation split: loss and bits per byte; or on tasks: accuracies."""
    from ingot.api import load
    from ingot.cli.generate import open_any
    from ingot.compat.nanogpt import is_ckpt
    from ingot.console.progress import progress_bar

    chosen = _chosen(path, artifact)
    _check_together(tasks, bool(data or rows or stride or seq_len or self_test), bool(task_data or limit or truncate))
    if self_test and rows is not None:
        raise ConfigError("--self-test looks at some tokens of all rows; leave --rows out")
    if tasks is not None:
        _score_tasks(chosen, tasks, task_data, limit, truncate, which, device, as_json)
        return
    with progress_bar("loading"):
        model = open_any(chosen, device, None, None) if is_ckpt(chosen) else load(chosen, which=which, device=device, data=data)
    if self_test:
        _self_test(model, data, stride, seq_len, as_json)
        return
    with progress_bar("evaluating", unit="rows") as progress:
        score = model.evaluate(data, rows, _tell if tell_rows else progress, stride=stride, seq_len=seq_len)
    found = _record(model, score, stride, seq_len, artifact)
    print_json(found) if as_json else _print(found, list(score.other))


def _record(
    model: LoadedModel, score: TextScore, stride: int | None, seq_len: int | None, artifact: Path | None
) -> dict[str, Any]:
    """What was found, by the names that --json has."""
    from ingot.eval.evaluator import bucket_record

    by = model.scored_by(stride, seq_len)
    buckets = {name: bucket_record(one) for name, one in score.buckets.items()}
    return {
        "model": str(model.weights.path),
        "val_loss": score.loss,
        "val_bpb": score.bits_per_byte,
        **score.other,
        "tokens": score.tokens,
        "bytes": score.bytes,
        "rows": score.rows,
        "rows_of": score.rows_of,
        "seq_len": by.data.seq_len,
        "stride": by.stride,
        "sliding": score.stride is not None,
        "bytes_by": score.rule,
        **({"buckets": buckets} if buckets else {}),
        **({"artifact_bytes": artifact.stat().st_size} if artifact is not None else {}),
    }


def _chosen(path: Path | None, artifact: Path | None) -> Path:
    """The model that is scored."""
    chosen = artifact or path
    if chosen is None or (path is not None and artifact is not None):
        raise ConfigError("give a run folder or checkpoint, or --artifact FILE; one of them")
    if artifact is not None and not artifact.is_file():
        if artifact.is_dir():
            raise CheckpointError(f"--artifact {artifact} is a folder; give a file in it, or the folder without --artifact")
        raise CheckpointError(f"there is no file {artifact}; give one that ingot export wrote")
    return chosen


def _check_together(tasks: str | None, of_text: bool, of_tasks: bool) -> None:
    """Refuse options of scoring a text together with tasks, and options of tasks without any."""
    if tasks is not None and of_text:
        raise ConfigError(
            "--tasks are scored whole, from --task-data; leave --data, --rows, --stride, --seq-len and --self-test out"
        )
    if tasks is None and of_tasks:
        raise ConfigError("--task-data, --limit and --truncate are for --tasks; name some")


def _score_tasks(
    path: Path, words: str, folder: Path | None, limit: int | None, truncate: bool, which: str, device: str, as_json: bool
) -> None:
    from ingot.cli.generate import open_any
    from ingot.console.progress import progress_bar
    from ingot.eval.tasks import task_names
    from ingot.inference.scoring import read_items, score_tasks, task_rows

    with progress_bar("reading"):
        items = read_items(task_names(words), folder, limit)
    with progress_bar("loading"):
        model = open_any(path, device, None, None, which)
    tasks = task_rows(items, model.tokenizer, model.context, None if truncate else Setting("--truncate"))
    with progress_bar("scoring", unit="texts") as progress:
        scores = score_tasks(tasks, model.backend, progress)
    if as_json:
        print_json({"model": str(model.weights.path), "tasks": {name: score.record() for name, score in scores.items()}})
        return
    print_columns([(name, _told(score)) for name, score in scores.items()])


def _told(score: Score) -> str:
    """The metrics of a task in a line."""
    layout = {"perplexity": ".4g"}
    parts = []
    for name, (value, error) in score.metrics.items():
        shown = layout.get(name, ".4f")
        parts.append(f"{name} {value:{shown}}{'' if error is None else f' +- {error:{shown}}'}")
    return f"{', '.join(parts)} ({score.items:,} items)"


def _self_test(model: LoadedModel, data: str | None, stride: int | None, seq_len: int | None, as_json: bool) -> None:
    """Check how the model is scored; what fails is an error."""
    from ingot.console.progress import progress_bar

    with progress_bar("checking"):
        checks = model.self_test(data, stride=stride, seq_len=seq_len)
    if as_json:
        print_json({"model": str(model.weights.path), "checks": [asdict(check) for check in checks]})
    else:
        print_columns([(check.name, "passed" if check.passed else "FAILED", check.found) for check in checks])
    if failed := [check.name for check in checks if not check.passed]:
        raise RunError(f'a score of {model.weights.path} would not be one: it fails "{failed[0]}"; look at its forward pass')


def _print(found: Mapping[str, Any], other: Sequence[str]) -> None:
    from ingot.runs.reporter import by_rows

    rows = f"{found['rows']:,} of {found['rows_of']:,}, {found['seq_len']:,} tokens long, {found['stride']:,} apart"
    buckets = found.get("buckets", {}).items()
    sliding = by_rows(None, None, found["stride"] if found["sliding"] else None)
    print_columns(
        [
            ("model", found["model"]),
            ("val loss", f"{found['val_loss']:.4f}{sliding}"),
            ("val_bpb", f"{found['val_bpb']:.4f}{sliding}"),
            *((name, f"{found[name]:.4f}") for name in other),
            ("tokens", f"{found['tokens']:,}"),
            ("bytes", f"{found['bytes']:,}, of the {found['bytes_by']}"),
            ("rows", rows),
            *((f"val_bpb {name}", f"{one['val_bpb']:.4f}") for name, one in buckets if "val_bpb" in one),
            *(("artifact", f"{found[name]:,} bytes") for name in ("artifact_bytes",) if name in found),
        ]
    )


def _tell(done: int, total: int) -> None:
    """How far it is, for the program that waits for the score."""
    print(f"rows {done} of {total}", file=sys.stderr, flush=True)
