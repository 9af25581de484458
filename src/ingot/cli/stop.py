"""`ingot stop`: ask a run to save and stop, from whichever host sees its folder."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path
from typing import Annotated

import typer

from ingot.cli.options import AsJson
from ingot.cli.verbs import app
from ingot.console.output import print_json
from ingot.errors import RunError


@app.command("stop")
def stop(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)],
    force: Annotated[
        bool, typer.Option("--force", help="Also send SIGTERM to its process, which has to be on this host.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Ask a run to save and stop; it goes on by the command it was started with."""
    from ingot.runs.view import Run

    found = Run.open(run, begun=False).stop()
    if found is None:
        if force:
            raise RunError(f"{run} was asked to stop; it is only starting, and its process is known when it has begun")
        if as_json:
            print_json({"run": str(run), "host": None, "pid": None, "step": 0, "signalled": False})
            return
        print(f"{run} is starting; it was asked to stop before its first step")
        return
    state = found.state
    if force:
        if not found.here:
            raise RunError(f"{run} was asked to stop; its process {state.pid} is on {state.host}: use --force there")
        try:
            os.kill(state.pid, signal.SIGTERM)
        except ProcessLookupError:
            pass  # it has just ended
        except PermissionError:
            raise RunError(f"{run} was asked to stop; process {state.pid} is somebody else's and cannot be signalled") from None
    if as_json:
        print_json({"run": str(run), "host": state.host, "pid": state.pid, "step": state.step, "signalled": force})
        return
    how = f", and process {state.pid} was sent SIGTERM" if force else ""
    print(
        f"{run} was asked at step {state.step} to save and stop{how}; see it stop: ingot status {shlex.quote(str(run))} --watch"
    )
