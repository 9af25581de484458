"""How a run looks while it goes on: a live line on a terminal, plain lines anywhere else. All of it goes to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ingot.runs.report import BeginReport, EvaluationReport, LineReporter, Reporter, StepReport, begin_line, evaluation_line


@contextmanager
def make_reporter() -> Iterator[Reporter]:
    """The reporter that fits stderr."""
    if not sys.stderr.isatty():
        yield LineReporter(_to_stderr)
        return
    live = LiveReporter()
    try:
        yield live
    finally:
        live.close()


def _to_stderr(line: str) -> None:
    with suppress(OSError, ValueError):  # whoever read the lines may have left; log.txt has them all
        print(line, file=sys.stderr, flush=True)


class LiveReporter(Reporter):
    """A progress bar with the numbers that matter, and lines above it for what is worth keeping."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(stderr=True, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("training", total=1.0, numbers="")
        self._bpb = ""

    def begin(self, report: BeginReport) -> None:
        self._say(begin_line(report))

    def primed(self, step: int, steps: int) -> None:
        if step == steps:
            self._say(f"primed with {steps} steps")
        self._progress.start()

    def step(self, report: StepReport, log: bool) -> None:
        mfu = f"  mfu {100 * report.mfu:.1f}%" if report.mfu is not None else ""
        left = f"  {_minutes(report.elapsed_seconds * (1 / report.spent - 1))} left" if report.spent > 0 else ""
        numbers = f"step {report.step}  loss {report.loss:.4f}{self._bpb}  {report.tokens_per_second:,.0f} tok/s{mfu}{left}"
        self._progress.update(self._task, completed=report.spent, numbers=numbers)

    def evaluation(self, report: EvaluationReport) -> None:
        self._bpb = f"  bpb {report.val_bpb:.4f}"
        self._say(evaluation_line(report))

    def saved(self, path: Path) -> None:
        self._say(f"saved {path}")

    def message(self, text: str) -> None:
        self._say(text)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._progress.stop()

    def _say(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._console.print(text, markup=False, soft_wrap=True)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


@contextmanager
def progress_bar(what: str, in_bytes: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal; the function it gives takes what is done and how much there is."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    amount = DownloadColumn() if in_bytes else TaskProgressColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
