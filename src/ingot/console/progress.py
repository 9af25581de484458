"""Progress on stderr: a live line on a terminal, otherwise plain lines or nothing."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Self, TextIO

from ingot.console.entry import warn
from ingot.errors import shown
from ingot.runs.reporter import BeginReport, EvaluationReport, LineReporter, Reporter, StepReport
from ingot.runtime.ranks import ranks_from_environment

TICK_SECONDS = 0.25  # time between redraws while there is no progress, so that the displayed times advance
REDRAW_SECONDS = 0.1  # minimum time between redraws
BAR, NARROW_BAR, WIDE = 24, 12, 100  # bar widths in cells; lines narrower than WIDE get the narrow bar
START_OF_LINE, ERASE, UP = "\r", "\x1b[K", "\x1b[A"
COLOUR_OR_CELL = re.compile(r"\x1b\[[\d;]*m|.")


def is_terminal(stream: TextIO) -> bool:
    """Return True if the stream is a terminal that can erase lines."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def draw_lines(lines: Sequence[str], drawn: int) -> int:
    """Draw lines on stdout over the `drawn` lines of the last call, truncated to the terminal's size; return the number drawn."""
    width, height = os.get_terminal_size(sys.stdout.fileno())  # (0, 0) if the terminal does not report its size
    shown_lines = []
    for line in lines[: max(1, (height or 24) - 1)]:
        room, kept = max(1, (width or 80) - 1), []
        for part in COLOUR_OR_CELL.findall(line):  # colour codes take no cells; all are kept, so that every colour is reset
            room -= len(part) == 1
            kept += [part] if room >= 0 or len(part) > 1 else []
        shown_lines.append("".join(kept))
    over = UP * drawn + "".join(f"{START_OF_LINE}{ERASE}{line}\n" for line in shown_lines)
    spare = max(0, drawn - len(shown_lines))
    sys.stdout.write(over + f"{START_OF_LINE}{ERASE}\n" * spare + UP * spare)
    sys.stdout.flush()
    return len(shown_lines)


def fit(parts: Sequence[str], width: int) -> str:
    """Join as many leading parts as fit into `width` cells; parts are in order of importance."""
    kept = [part for part in parts if part]
    while len(kept) > 1 and len("  ".join(kept)) > width:
        kept.pop()
    return "  ".join(kept)[:width]


def bar(fraction: float, width: int) -> str:
    """Format a fraction as a bar and a percentage for a line of `width` cells."""
    fraction, cells = min(max(fraction, 0.0), 1.0), BAR if width >= WIDE else NARROW_BAR
    full = int(fraction * cells)
    return f"{'━' * full}{'─' * (cells - full)}  {100 * fraction:3.0f}%"


def duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours, depending on its length."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class Work:
    """A task in progress: its name, how much is done, and when it started."""

    def __init__(self, what: str, unit: str = "rows"):
        self.what, self.done, self.total = what, 0, 0  # a total of 0 means unknown
        self._unit, self._since = unit, time.monotonic()

    def parts(self, width: int) -> list[str]:
        seconds = time.monotonic() - self._since
        if not self.total:
            return [self.what, duration(seconds)]
        fraction = self.done / self.total
        left = f"about {duration(seconds * (1 / fraction - 1))}" if 0 < fraction < 1 else ""
        amount = f"{self.done:,} of {self.total:,} {self._unit}".rstrip()
        if self._unit == "bytes":
            amount = f"{self.done / 1e6:,.1f} of {self.total / 1e6:,.1f} MB"
        return [self.what, bar(fraction, width), left, amount]


class StatusLine:
    """A context manager for a live line at the bottom of the terminal, drawn by `render`; all other output goes above it."""

    def __init__(self, render: Callable[[int], str]):
        self._render = render
        self._stream = sys.stderr
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="status line", daemon=True)
        self._drawn_cells, self._columns, self._drawn_at = 0, 0, 0.0
        self._ends_open = False  # True if the last printed line is incomplete and must not be overwritten
        self._replaced: list[tuple[str, Any]] = []

    def __enter__(self) -> Self:
        for name in ("stderr", "stdout"):
            stream = getattr(sys, name)
            if is_terminal(stream):
                self._replaced.append((name, stream))
                setattr(sys, name, _Above(stream, self))
        self.draw()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        with self._lock:
            self._write(self._erased())
        for name, stream in self._replaced:
            setattr(sys, name, stream)

    def draw(self, often: bool = False) -> None:
        """Draw the status line; with `often`, do nothing if less than REDRAW_SECONDS have passed since the last redraw."""
        with self._lock:
            if self._ends_open or self._over.is_set() or (often and time.monotonic() - self._drawn_at < REDRAW_SECONDS):
                return
            before, columns = self._erased(), self._columns
            text = self._render(columns - 1)
            self._write(f"{before}{text}")
            self._drawn_cells, self._drawn_at = len(text), time.monotonic()

    def above(self, text: str, stream: TextIO | None = None) -> None:
        with self._lock:
            before = "" if self._ends_open else self._erased()
            self._ends_open = not text.endswith("\n")
            self._write(before)
            self._write(text, stream)
            self.draw()

    def _erased(self) -> str:
        """Return the characters that erase the line, after updating the terminal's width."""
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            columns = 80
        # When a terminal becomes narrower, most terminals wrap the line into several rows (xterm does not).
        rows = max(0, self._drawn_cells - 1) // columns if columns < self._columns else 0
        self._drawn_cells, self._columns = 0, columns
        return f"{START_OF_LINE}{ERASE}{UP}" * rows + f"{START_OF_LINE}{ERASE}"

    def _write(self, text: str, stream: TextIO | None = None) -> None:
        with suppress(OSError, ValueError):  # the terminal may be closed; the work continues
            target = stream or self._stream
            target.write(text)
            target.flush()

    def _tick(self) -> None:
        while not self._over.wait(TICK_SECONDS):
            self.draw()


class _Above:
    """A stream whose output goes above the live line."""

    def __init__(self, stream: TextIO, line: StatusLine):
        self._stream, self._line = stream, line

    def write(self, text: str) -> int:
        if text:
            self._line.above(text, self._stream)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def make_reporter() -> Iterator[Reporter]:
    """Yield a live reporter if stderr is a terminal, else one that prints lines; ranks other than the first report nothing."""
    if not ranks_from_environment().first:
        yield Reporter()
    elif not is_terminal(sys.stderr):
        yield LineReporter(warn)
    else:
        live = LiveReporter()
        with live.line:
            yield live


class LiveReporter(LineReporter):
    """A reporter that shows a progress bar with current metrics, and above it lines for evaluations, checkpoints and messages."""

    def __init__(self) -> None:
        self.line = StatusLine(self._render)
        super().__init__(lambda text: self.line.above(f"{shown(text)}\n"))
        self._work: Work | None = Work("starting")  # None while training
        self._step: StepReport | None = None
        self._left = ""  # text about the remaining budget
        self._bpb = ""

    def begin(self, report: BeginReport) -> None:
        self._left = _left(report.max_steps, report.resumed_at, report.budget_seconds, report.elapsed_seconds)
        model, data = f"{report.parameters:,} parameters on {report.device}", f"{report.train_tokens:,} train tokens"
        resumed = f"resumed_at step {report.resumed_at:,}" if report.resumed_at else ""
        self._write("  ".join(filter(None, (model, data, resumed, self._left))))  # kernels and micro-batch are only in log.txt

    def step(self, report: StepReport, log: bool) -> None:
        self._left = _left(report.max_steps, report.step, report.budget_seconds, report.elapsed_seconds)
        waited, self._work, self._step = self._work is not None, None, report
        self.line.draw(often=not waited)

    def waiting(self, what: str, done: int = 0, total: int = 0) -> None:
        work = self._work
        new = work is None or work.what != what or done < work.done
        if work is None or new:
            self._work = work = Work(what)
        work.done, work.total = done, total
        self.line.draw(often=not new and done < total)

    def evaluation(self, report: EvaluationReport) -> None:
        self._bpb = f"bpb {report.val_bpb:.4f}"
        self._work = None if self._step is not None else Work("training")
        super().evaluation(report)

    def phase(self, number: int, tokens: int) -> None:
        pass  # not shown: log.txt records it

    def end(self, result: Any) -> None:
        pass  # nothing to show: the command prints the result

    def _render(self, width: int) -> str:
        step = self._step
        if self._work is not None or step is None:
            left = "" if self._left.startswith("0 ") else self._left  # hide "0 s left": work after training is not in the budget
            return fit([*(self._work.parts(width) if self._work is not None else []), left], width)
        parts = ["training", bar(step.spent, width), self._left, f"loss {step.loss:.4f}", f"step {step.step:,}", self._bpb]
        parts += [f"{step.tokens_per_second:,.0f} tok/s", f"mfu {100 * step.mfu:.1f}%" if step.mfu is not None else ""]
        return fit(parts, width)


def _left(max_steps: int | None, step: int, budget_seconds: float | None, seconds: float) -> str:
    """Format the remaining steps or the remaining time, whichever runs out first."""
    by_steps = step / max_steps if max_steps else -1.0
    by_seconds = seconds / budget_seconds if budget_seconds else -1.0
    if max_steps and by_steps >= by_seconds:
        pace = f", {duration(seconds / step * max(0, max_steps - step))}" if step and seconds else ""
        return f"{max(0, max_steps - step):,} steps left{pace}"
    return f"{duration(max(0.0, budget_seconds - seconds))} left" if budget_seconds else ""


@contextmanager
def progress_bar(what: str, in_bytes: bool = False, unit: str = "") -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar if stderr is a terminal; yield a function that takes the amount done and the total."""
    with work_line(what, "bytes" if in_bytes else unit) as (_, show):
        yield partial(show, what) if show else lambda done, total: None


@contextmanager
def work_line(what: str, unit: str) -> Iterator[tuple[Callable[[str], None], Callable[..., None] | None]]:
    """Yield a function that prints lines, and a function that shows the progress of successive tasks (None without a terminal).

    The second function takes the task, the amount done, the total and, optionally, a name to show instead of the task.
    """
    if not is_terminal(sys.stderr):
        yield warn, None
        return
    work, part = Work(what, unit), what
    with StatusLine(lambda width: fit(work.parts(width), width)) as line:

        def show(what: str, done: int, total: int, name: str = "") -> None:
            nonlocal work, part
            if what != part:
                work, part = Work(what, unit), what
            often = work.total > 0 and work.what == (name or what) and done < total
            work.what = name or what
            work.done, work.total = done, total
            line.draw(often)

        yield lambda text: line.above(f"{shown(text)}\n"), show
