"""One line at the bottom of a terminal that says how far a piece of work is; everything else is printed above it.

The cursor is never hidden: whatever ends the program, kill -9 included, the terminal stays usable. A line is always shorter than
the terminal is wide, so it never wraps, and what matters least is left out first.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self, TextIO

TICK_SECONDS = 0.25  # the line is drawn this often by itself, so that the time moves where nothing else does
REDRAW_SECONDS = 0.1  # and at most this often for numbers that change fast
BAR, NARROW_BAR, WIDE = 24, 12, 100  # cells of the bar; the wide one where there are at least so many columns
NOTEBOOK_COLUMNS = 100  # of a cell, whose width nobody tells
START_OF_LINE, ERASE, UP = "\r", "\x1b[K", "\x1b[A"


def is_terminal(stream: TextIO) -> bool:
    """Whether it is a terminal whose lines can be erased."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def is_notebook(stream: TextIO) -> bool:
    """Whether text goes to the output of a notebook's cell: a carriage return begins the line anew and nothing erases it."""
    return type(stream).__module__.partition(".")[0] == "ipykernel"


def can_redraw(stream: TextIO) -> bool:
    """Whether a line can be drawn over and over there."""
    return is_terminal(stream) or is_notebook(stream)


@dataclass(frozen=True)
class Part:
    """A piece of the line; where there is no room, the part of the smallest weight goes first."""

    text: str
    weight: int


def fit(parts: Iterable[Part], width: int) -> str:
    """The parts that have room in `width` cells, in their order."""
    kept = [part for part in parts if part.text]
    while len(kept) > 1 and len("  ".join(part.text for part in kept)) > width:
        kept.remove(min(kept, key=lambda part: part.weight))
    return "  ".join(part.text for part in kept)[:width]


def bar(fraction: float, width: int) -> Part:
    """A bar that is filled up to a fraction, for a line of `width` cells."""
    cells = BAR if width >= WIDE else NARROW_BAR
    full = int(min(max(fraction, 0.0), 1.0) * cells)
    return Part("━" * full + "─" * (cells - full), 40)


def percent(fraction: float) -> Part:
    """How far something is."""
    return Part(f"{100 * min(max(fraction, 0.0), 1.0):3.0f}%", 80)


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class Work:
    """What is being done: a name, how much of it, and since when."""

    def __init__(self, what: str, unit: str = "rows"):
        self.what, self.done, self.total = what, 0, 0
        self._unit, self._since = unit, time.monotonic()

    def update(self, done: int, total: int) -> None:
        """So much is done of so much; a total of 0 is not known."""
        self.done, self.total = done, total

    def parts(self, width: int) -> list[Part]:
        """The work as parts of a line."""
        seconds = time.monotonic() - self._since
        if not self.total:
            return [Part(self.what, 100), Part(duration(seconds), 60)]
        fraction = self.done / self.total
        left = f"about {duration(seconds * (1 / fraction - 1))}" if 0 < fraction < 1 else ""
        name, amount = Part(self.what, 100), Part(self._amount(), 50)
        return [name, bar(fraction, width), percent(fraction), amount, Part(left, 60)]

    def _amount(self) -> str:
        if self._unit == "bytes":
            return f"{self.done / 1e6:,.1f} of {self.total / 1e6:,.1f} MB"
        return f"{self.done:,} of {self.total:,} {self._unit}".rstrip()


class StatusLine:
    """Draws what `render` gives for a width, until it is closed. A context; lines of others go above it meanwhile."""

    def __init__(self, render: Callable[[int], str]):
        self._render = render
        self._stream = sys.stderr
        self._in_notebook = is_notebook(sys.stderr)
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="status line", daemon=True)
        self._drawn, self._columns, self._drawn_at = 0, 0, 0.0
        self._ends_open = False  # somebody wrote half a line, which is not drawn over
        self._replaced: list[tuple[str, Any]] = []

    def __enter__(self) -> Self:
        for name in ("stderr", "stdout"):
            stream = getattr(sys, name)
            if can_redraw(stream):
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
        """Draw the line as it is now; of what comes `often` only a few times a second."""
        with self._lock:
            if self._ends_open or self._over.is_set() or (often and time.monotonic() - self._drawn_at < REDRAW_SECONDS):
                return
            before, columns = self._erased(), self._columns
            text = self._render(columns - 1)
            self._write(f"{before}{text}")
            self._drawn, self._drawn_at = len(text), time.monotonic()

    def above(self, text: str, stream: TextIO | None = None) -> None:
        """Print text above the line."""
        with self._lock:
            before = "" if self._ends_open else self._erased()
            self._ends_open = not text.endswith("\n")
            self._write(before)
            self._write(text, stream)
            self.draw()

    def _erased(self) -> str:
        """What takes the line off the screen; finds out how wide the terminal is now."""
        if self._in_notebook:
            drawn, self._drawn, self._columns = self._drawn, 0, NOTEBOOK_COLUMNS
            return f"{START_OF_LINE}{' ' * drawn}{START_OF_LINE}"
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            columns = 80
        # A terminal that has become narrower has broken the line into several rows (few do not: xterm is one).
        rows = max(0, self._drawn - 1) // columns if columns < self._columns else 0
        self._drawn, self._columns = 0, columns
        return f"{START_OF_LINE}{ERASE}{UP}" * rows + f"{START_OF_LINE}{ERASE}"

    def _write(self, text: str, stream: TextIO | None = None) -> None:
        with suppress(OSError, ValueError):  # the terminal may be gone; the work goes on
            target = stream or self._stream
            target.write(text)
            target.flush()

    def _tick(self) -> None:
        while not self._over.wait(TICK_SECONDS):
            self.draw()


class _Above:
    """A stream that stands for another and prints above the line."""

    def __init__(self, stream: TextIO, line: StatusLine):
        self._stream, self._line = stream, line

    def write(self, text: str) -> int:
        if text:
            self._line.above(text, self._stream)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
