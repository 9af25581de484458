"""`ingot eval`: how good a trained model is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ingot.doors.cli.generate import DeviceName, OptionalModelPath, Which
from ingot.doors.cli.options import AsJson
from ingot.doors.output import print_columns, print_json
from ingot.errors import CheckpointError, ConfigError


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("eval")(evaluate)


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
        int | None,
        typer.Option("--stride", metavar="N", help="Tokens from one row to the next. Default: as in its training.", min=1),
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", metavar="N", help="Tokens of a row. Default: as in its training.", min=1)
    ] = None,
    which: Which = "latest",
    device: DeviceName = "auto",
    as_json: AsJson = False,
    tell_rows: Annotated[bool, typer.Option("--tell-rows", hidden=True, help="For programs: a line per batch.")] = False,
) -> None:
    """Score a trained model on a validation split: loss and bits per byte."""
    from ingot.api import load
    from ingot.doors.display import progress_bar
    from ingot.eval.evaluator import bucket_record

    if (path is None) == (artifact is None):
        raise ConfigError("give a run folder or checkpoint, or --artifact FILE; one of them")
    if artifact is not None and not artifact.is_file():
        raise CheckpointError(f"there is no file {artifact}")
    chosen = artifact or path
    assert chosen is not None
    with progress_bar("loading"):
        model = load(chosen, which=which, device=device, data=data)
    with progress_bar("evaluating", unit="rows") as progress:
        score = model.evaluate(data, rows, _tell if tell_rows else progress, stride=stride, seq_len=seq_len)
    by = model.scored_by(stride, seq_len)
    size = {"artifact_bytes": artifact.stat().st_size} if artifact is not None else {}
    buckets = {name: bucket_record(one) for name, one in score.buckets.items()}
    if as_json:
        found = {"val_loss": score.loss, "val_bpb": score.bits_per_byte, **score.other}
        print_json(
            {
                "model": str(model.weights.path),
                **found,
                "tokens": score.tokens,
                "bytes": score.bytes,
                "rows": score.rows,
                "rows_of": score.rows_of,
                "seq_len": by.data.seq_len,
                "stride": by.stride,
                "bytes_by": score.rule,
                **({"buckets": buckets} if buckets else {}),
                **size,
            }
        )
        return
    print_columns(
        [
            ("model", str(model.weights.path)),
            ("val loss", f"{score.loss:.4f}"),
            ("val_bpb", f"{score.bits_per_byte:.4f}"),
            *((name, f"{value:.4f}") for name, value in score.other.items()),
            ("tokens", f"{score.tokens:,}"),
            ("bytes", f"{score.bytes:,}, of the {score.rule}"),
            ("rows", f"{score.rows:,} of {score.rows_of:,}, {by.data.seq_len:,} tokens long, {by.stride:,} apart"),
            *((f"val_bpb {name}", f"{one['val_bpb']:.4f}") for name, one in buckets.items() if "val_bpb" in one),
            *(("artifact", f"{count:,} bytes") for count in size.values()),
        ]
    )


def _tell(done: int, total: int) -> None:
    """How far it is, for the program that waits for the score."""
    print(f"rows {done} of {total}", file=sys.stderr, flush=True)
