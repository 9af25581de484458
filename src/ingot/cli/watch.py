"""`ingot watch`: runs as they go on, in the terminal: how they are doing, and their curves."""

from __future__ import annotations

import math
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot.cli.verbs import app
from ingot.console.progress import is_terminal

if TYPE_CHECKING:
    from ingot.runs.metrics import Mark
    from ingot.runs.view import Run

MOST_STALLS = 3
SHARE = 0.02  # of a core that looks take at most: the run may need all of them
LONGEST_WAIT = 30.0  # seconds


@app.command("watch")
def watch(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN]...", help="Run folders. Default: those below runs/.", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option(metavar="X", help="Between looks.", min=0.1, max=3600)] = 2.0,
) -> None:
    """Watch runs until none is running: status, what is left, curves, seconds per step. Not on a terminal: once."""
    from ingot.cli.plot import shows_colours
    from ingot.cli.showing import draw
    from ingot.runs.view import RUNS, Run, runs_below

    found = [Run.open(path) for path in runs] if runs else runs_below(RUNS)
    watched = [Watched(run) for run in found]
    drawn, in_place = 0, is_terminal(sys.stdout)
    try:
        while True:
            began = time.process_time() if drawn else math.inf  # the first look reads all there is
            running = any(run.status().status == "running" for run in found)
            lines = screen(watched, colours=shows_colours())
            if not in_place:
                print("\n".join(lines))
                return
            drawn = draw(lines, drawn)
            if not running:
                return
            time.sleep(max(seconds, min(LONGEST_WAIT, (time.process_time() - began) / SHARE)))
    except KeyboardInterrupt:
        return  # the way to end it; what was shown last stays


class Watched:
    """A run whose records are kept: what it has added is read at each look, or a long run would be read anew every time."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._mark: Mark | None = None
        self._records: list[dict[str, Any]] = []

    def records(self) -> list[dict[str, Any]]:
        """All records up to now."""
        more, self._mark = self.run.metrics(self._mark)
        if not self._mark.start:  # the file was replaced, and these are all there are
            self._records.clear()
        self._records += more
        return self._records


def screen(watched: list[Watched], colours: bool = False) -> list[str]:
    """What is shown: a table of the runs, their curves, and how long steps take."""
    from ingot.cli.plot import panels_of, shows_braille
    from ingot.cli.showing import status_lines
    from ingot.console.charts import panel_lines
    from ingot.runs.series import curves_of, step_times
    from ingot.runs.view import run_names

    runs = [one.run for one in watched]
    records = dict(zip(run_names([run.path for run in runs]), (one.records() for one in watched), strict=True))
    curves = {name: curves_of(found) for name, found in records.items()}
    width, height = shutil.get_terminal_size()
    lines = [*status_lines(runs), ""]
    panels = panels_of(curves, "steps")
    room = max(4, (height - len(lines) - len(runs) - 2) // max(1, len(panels)) - 4 - len(runs))
    for panel in panels:
        lines += [*panel_lines(panel, width, min(12, room), colours, shows_braille()), ""]
    for name, found in records.items():
        timing = step_times(found)
        if timing.percentiles:
            told = ", ".join(f"{share} {seconds:.4f} s" for share, seconds in timing.percentiles.items())
            stalls = ", ".join(f"{stall.seconds:.1f} s before step {stall.step:,}" for stall in timing.stalls[:MOST_STALLS])
            lines.append(f"{name}: a step takes {told}; stalls: {stalls or 'none'}")
    return lines
