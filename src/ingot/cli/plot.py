"""`ingot plot`: the curves of runs, in the terminal or as a picture."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ingot.cli.options import AsJson
from ingot.cli.verbs import app
from ingot.console.charts import Line, Panel
from ingot.console.output import for_reader, print_json, visible
from ingot.console.progress import is_terminal
from ingot.errors import CheckpointError
from ingot.runs.view import run_names

if TYPE_CHECKING:
    from ingot.runs.series import Curves
    from ingot.runs.view import Run

PICTURE = "--output"


@app.command("plot")
def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, drawn together.")],
    output: Annotated[
        Path | None, typer.Option(PICTURE, "-o", metavar="FILE", help="Draw a picture, .png or .svg, instead of text.")
    ] = None,
    axis: Annotated[
        Literal["steps", "tokens", "seconds"], typer.Option("--x", help="What is counted from left to right.")
    ] = "steps",
    sample: Annotated[bool, typer.Option("--sample", help="Show what the first run wrote last beside its curves.")] = False,
    as_json: AsJson = False,
) -> None:
    """Draw training loss, bits per byte and accuracies on tasks of runs, those that go on included."""
    from ingot.runs.series import curves_of
    from ingot.runs.view import Run
    from ingot.runtime.files import check_picture

    if output is not None:
        check_picture(output, PICTURE)
    opened = [Run.open(path) for path in runs]
    curves = {name: curves_of(run.metrics()[0], axis) for name, run in zip(run_names(runs), opened, strict=True)}
    if empty := [name for name, found in curves.items() if not found.loss and not found.val_bpb]:
        raise CheckpointError(f"{empty[0]} has no step to draw yet; leave it out or wait for its first")
    text = _last_sample(opened[0]) if sample else ""
    if output is not None:
        from ingot.console.charts import draw_panels

        draw_panels(panels_of(curves, axis), visible(text), output, PICTURE)
    if as_json:
        drawn = {name: {"loss": found.loss, "val_bpb": found.val_bpb, "tasks": found.tasks} for name, found in curves.items()}
        print_json({"x": axis, "runs": drawn, "picture": output})
    elif output is not None:
        print(output)
    else:
        _print(panels_of(curves, axis), text)


def panels_of(curves: Mapping[str, Curves], axis: str) -> list[Panel]:
    """Loss, bits per byte and, where tasks were scored, accuracies of runs, each in a panel."""
    losses = [Line(name, found.loss) for name, found in curves.items() if found.loss]
    scores = [Line(name, found.val_bpb) for name, found in curves.items() if found.val_bpb]
    scored = [(run, task, points) for run, found in curves.items() for task, points in found.tasks.items() if points]
    tasks = [Line(task if len(curves) == 1 else f"{run} {task}", points) for run, task, points in scored]
    panels = [
        Panel("training loss, nats per token", axis, losses),
        Panel("validation, bits per byte", axis, scores),
        Panel("tasks, part of the answers that are right", axis, tasks),
    ]
    return [panel for panel in panels if panel.lines]


def _last_sample(run: Run) -> str:
    samples = run.samples()
    if not samples:
        raise CheckpointError(f"{run.path} has no samples; leave --sample out, or train with --evaluation.sample_tokens 400")
    return run.sample(max(samples)).strip()


def _print(panels: Sequence[Panel], text: str) -> None:
    from ingot.console.charts import panel_lines

    width = shutil.get_terminal_size().columns
    for number, panel in enumerate(panels):
        print("\n" * bool(number) + "\n".join(panel_lines(panel, width, colours=shows_colours(), braille=shows_braille())))
    if text:
        print(f"\n{for_reader(text)}")


def shows_colours() -> bool:
    """Whether the output shall have colours."""
    return is_terminal(sys.stdout) and "NO_COLOR" not in os.environ


def shows_braille() -> bool:
    """Whether the output can show dots of braille."""
    try:
        "⠿┤".encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
