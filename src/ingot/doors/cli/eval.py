"""`ingot eval`: how good a trained model is."""

from __future__ import annotations

from typing import Annotated

import typer

from ingot.doors.cli.generate import DeviceName, ModelPath, Which
from ingot.doors.cli.options import AsJson
from ingot.doors.cli.output import print_columns, print_json


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("eval")(evaluate)


def evaluate(
    path: ModelPath,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="DIR", help="Prepared folder; its validation split is scored. Default: the run's."),
    ] = None,
    rows: Annotated[int | None, typer.Option("--rows", metavar="N", help="Score N rows spread over the split.", min=1)] = None,
    which: Which = "latest",
    device: DeviceName = "auto",
    as_json: AsJson = False,
) -> None:
    """Score a trained model on a validation split: loss and bits per byte."""
    from ingot.api import load
    from ingot.doors.cli.progress import progress_bar

    model = load(path, which=which, device=device)
    with progress_bar("evaluating") as progress:
        score = model.evaluate(data, rows, progress)
    if as_json:
        print_json(
            {
                "model": str(model.source),
                "val_loss": score.loss,
                "val_bpb": score.bits_per_byte,
                "tokens": score.tokens,
                "bytes": score.bytes,
            }
        )
        return
    print_columns(
        [
            ("model", str(model.source)),
            ("val loss", f"{score.loss:.4f}"),
            ("val_bpb", f"{score.bits_per_byte:.4f}"),
            ("tokens", f"{score.tokens:,}"),
            ("bytes", f"{score.bytes:,}"),
        ]
    )
