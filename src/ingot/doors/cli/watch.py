"""`ingot watch`: runs as they go on, in the terminal: how they are doing, and their curves."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ingot.doors.status_line import is_terminal

if TYPE_CHECKING:
    from ingot.runs.run import Run

MOST_STALLS = 3


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("watch")(watch)


def watch(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN]...", help="Run folders. Default: those below runs/.", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option(metavar="X", help="Between looks.", min=0.1, max=3600)] = 2.0,
) -> None:
    """Watch runs until none is running: status, what is left, curves, seconds per step. Not on a terminal: once."""
    from ingot.doors.cli.showing import draw
    from ingot.doors.facts import RUNS, runs_below
    from ingot.runs.run import Run

    found = [Run.open(path) for path in runs] if runs else runs_below(RUNS)
    drawn, in_place = 0, is_terminal(sys.stdout)
    try:
        while True:
            running = any(run.status().status == "running" for run in found)
            lines = screen(found, colours=in_place)
            if not in_place:
                print("\n".join(lines))
                return
            drawn = draw(lines, drawn)
            if not running:
                return
            time.sleep(seconds)
    except KeyboardInterrupt:
        return  # the way to end it; what was shown last stays


def screen(runs: list[Run], colours: bool = False) -> list[str]:
    """What is shown: a table of the runs, their curves, and how long steps take."""
    from ingot.doors.charts.terminal import panel_lines
    from ingot.doors.cli.plot import panels_of, shows_braille
    from ingot.doors.cli.showing import status_lines
    from ingot.doors.facts import run_names
    from ingot.runs.curves import read_curves
    from ingot.runs.timing import step_times

    names = run_names([run.path for run in runs])
    curves = {name: read_curves(run) for name, run in zip(names, runs, strict=True)}
    width, height = shutil.get_terminal_size()
    lines = [*status_lines(runs), ""]
    panels = panels_of(curves, "steps")
    room = max(4, (height - len(lines) - len(runs) - 2) // max(1, len(panels)) - 4 - len(runs))
    for panel in panels:
        lines += [*panel_lines(panel, width, min(12, room), colours, shows_braille()), ""]
    for name, run in zip(names, runs, strict=True):
        timing = step_times(run.metrics()[0])
        if timing.percentiles:
            told = ", ".join(f"{share} {seconds:.4f} s" for share, seconds in timing.percentiles.items())
            stalls = ", ".join(f"{stall.seconds:.1f} s before step {stall.step:,}" for stall in timing.stalls[:MOST_STALLS])
            lines.append(f"{name}: a step takes {told}; stalls: {stalls or 'none'}")
    return lines
