"""How work looks while it goes on: a live line on a terminal or in a notebook, plain lines or nothing elsewhere; on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from ingot.doors.status_line import Part, StatusLine, Work, bar, can_redraw, duration, fit, percent
from ingot.errors import shown
from ingot.runs.report import (
    BeginReport,
    EvaluationReport,
    LineReporter,
    Reporter,
    StepReport,
    begin_line,
    evaluation_line,
    saved_line,
)
from ingot.runs.steps import Kind
from ingot.runs.task_lines import tasks_line
from ingot.runtime.ranks import ranks_from_environment


@contextmanager
def make_reporter() -> Iterator[Reporter]:
    """The reporter that fits stderr; only the first rank has anything to say."""
    if not ranks_from_environment().first:
        yield Reporter()
    elif not can_redraw(sys.stderr):
        yield LineReporter(_to_stderr)
    else:
        live = LiveReporter()
        with live.line:
            yield live


def _to_stderr(line: str) -> None:
    with suppress(OSError, ValueError):  # whoever read the lines may have left; log.txt has them all
        print(shown(line), file=sys.stderr, flush=True)


class LiveReporter(Reporter):
    """A progress bar with the numbers that matter, and lines above it for what is worth keeping."""

    def __init__(self) -> None:
        self.line = StatusLine(self._render)
        self._work: Work | None = Work("starting")  # None while steps are taken
        self._step: StepReport | None = None
        self._left = ""  # of the budget
        self._bpb = ""

    def begin(self, report: BeginReport) -> None:
        self._left = _left(report.max_steps, report.resumed_at, report.budget_seconds, report.elapsed_seconds)
        self._say(begin_line(report))

    def primed(self, step: int, steps: int) -> None:
        if step == steps:
            self._say(f"primed with {steps} steps")

    def step(self, report: StepReport, log: bool) -> None:
        self._left = _left(report.max_steps, report.step, report.budget_seconds, report.elapsed_seconds)
        waited, self._work, self._step = self._work is not None, None, report
        self.line.draw(often=not waited)

    def waiting(self, what: str, done: int = 0, total: int = 0) -> None:
        work = self._work
        new = work is None or work.what != what or done < work.done
        if new:
            self._work = work = Work(what)
        assert work is not None
        work.update(done, total)
        self.line.draw(often=not new and done < total)

    def evaluation(self, report: EvaluationReport) -> None:
        self._bpb = f"bpb {report.val_bpb:.4f}"
        self._work = None if self._step is not None else Work("training")
        self._say(evaluation_line(report))
        if report.tasks:
            self._say(tasks_line(report.step, report.tasks))

    def saved(self, path: Path, kind: Kind = "regular") -> None:
        self._say(saved_line(path, kind))

    def message(self, text: str) -> None:
        self._say(text)

    def _say(self, text: str) -> None:
        self.line.above(f"{shown(text)}\n")

    def _render(self, width: int) -> str:
        work, step = self._work, self._step
        if work is not None or step is None:
            parts = work.parts(width) if work is not None else []
            left = "" if self._left.startswith("0 ") else self._left  # what follows the training takes its own time
            return fit([*parts, Part(left, 70)], width)
        return fit(
            [
                Part("training", 100),
                bar(step.spent, width),
                percent(step.spent),
                Part(self._left, 70),
                Part(f"step {step.step:,}", 30),
                Part(f"loss {step.loss:.4f}", 60),
                Part(self._bpb, 20),
                Part(f"{step.tokens_per_second:,.0f} tok/s", 10),
                Part(f"mfu {100 * step.mfu:.1f}%" if step.mfu is not None else "", 5),
            ],
            width,
        )


def _left(max_steps: int | None, step: int, budget_seconds: float | None, seconds: float) -> str:
    """What is left of the budget: of steps or seconds, whichever will be spent first."""
    by_steps = step / max_steps if max_steps else -1.0
    by_seconds = seconds / budget_seconds if budget_seconds else -1.0
    if max_steps and by_steps >= by_seconds:
        pace = f", {duration(seconds / step * max(0, max_steps - step))}" if step and seconds else ""
        return f"{max(0, max_steps - step):,} steps left{pace}"
    return f"{duration(max(0.0, budget_seconds - seconds))} left" if budget_seconds else ""


@contextmanager
def progress_bar(what: str, in_bytes: bool = False, unit: str = "") -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal or in a notebook; the function it gives takes what is done and how much there is."""
    with work_line(what, "bytes" if in_bytes else unit) as (_, show):
        yield partial(show, what) if show else lambda done, total: None


@contextmanager
def work_line(what: str, unit: str) -> Iterator[tuple[Callable[[str], None], Callable[..., None] | None]]:
    """Where lines and progress of one piece of work after the other go; without a terminal there are lines alone.

    Progress is what is being done, how much of it, of how much, and a name for it where that changes while it goes on.
    """
    if not can_redraw(sys.stderr):
        yield _to_stderr, None
        return
    work, part = Work(what, unit), what
    with StatusLine(lambda width: fit(work.parts(width), width)) as line:

        def show(what: str, done: int, total: int, name: str = "") -> None:
            nonlocal work, part
            if what != part:
                work, part = Work(what, unit), what
            often = work.total > 0 and work.what == (name or what) and done < total
            work.what = name or what
            work.update(done, total)
            line.draw(often)

        yield lambda text: line.above(f"{shown(text)}\n"), show
