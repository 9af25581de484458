"""`ingot status`: how runs are doing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ingot.cli.options import AsJson
from ingot.cli.showing import show
from ingot.cli.verbs import app


@app.command("status")
def status(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN]...", help="Run folders. Default: those below runs/.", show_default=False)
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every second, until none of them is running.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show how runs are doing: status, step, loss, speed, what is left, and when they were last heard of."""
    show(runs or [], watch, as_json)
