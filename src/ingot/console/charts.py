"""Line charts for terminals and pictures, and HTML pages."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import ascii_lowercase
from textwrap import wrap
from typing import Any

from ingot.runtime.files import save_picture

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """A curve with its name."""

    name: str
    points: Points


@dataclass(frozen=True)
class Panel:
    """Lines over one axis; every line has points."""

    title: str
    axis: str  # label of the horizontal axis
    lines: Sequence[Line]

    @property
    def bounds(self) -> tuple[float, float, float, float]:
        """The smallest and largest x, then the smallest and largest y of all lines."""
        xs = [x for line in self.lines for x, _ in line.points]
        ys = [y for line in self.lines for _, y in line.points]
        return min(xs), max(xs), min(ys), max(ys)


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
th, td { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; }
th { border-bottom: 1px solid #999; } td { border-bottom: 1px solid #eee; font-variant-numeric: tabular-nums; }
pre { background: #f6f6f6; padding: 1rem; white-space: pre-wrap; } img { max-width: 100%; } h2 { margin-top: 2rem; }
@media (prefers-color-scheme: dark) {
  body { background: #181818; color: #ddd; } pre { background: #242424; } td { border-color: #333; } img { background: #fff; }
}
"""
HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>{style}</style></head><body>
<h1>{title}</h1>
"""


class Page:
    """An HTML page of tables, pictures and texts in one file; it fetches nothing and runs nothing."""

    def __init__(self, title: str) -> None:
        self._parts = [HEAD.format(title=escape(title), style=STYLE)]

    def section(self, title: str, note: str = "") -> None:
        """Begin a section."""
        self._parts.append(f"<h2>{escape(title)}</h2>\n" + (f"<p>{escape(note)}</p>\n" if note else ""))

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Add a table."""
        lines = [f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"]
        lines += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
        self._parts.append(f"<table>\n{chr(10).join(lines)}\n</table>\n")

    def picture(self, png: bytes, words: str) -> None:
        """Add a picture with its alternative text."""
        self._parts.append(f'<img alt="{escape(words)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">\n')

    def text(self, title: str, text: str) -> None:
        """Add preformatted text."""
        self._parts.append(f"<h3>{escape(title)}</h3>\n<pre>{escape(text)}</pre>\n")

    def data(self, name: str, record: str) -> None:
        """Add JSON for programs that read the page."""
        safe = record.replace("<", "\\u003c")
        self._parts.append(f'<script type="application/json" id="{escape(name)}">{safe}</script>\n')

    def render(self) -> str:
        """Return the whole file."""
        return "".join(self._parts) + "</body></html>\n"


WIDTH, HEIGHT = 4.6, 3.6  # size of a panel in inches
MAX_MARKED_POINTS = 20  # a line with fewer points has a marker at each
TEXT_LINES, TEXT_COLUMNS = 17, 52  # size of the text panel


def draw_panels(panels: Sequence[Panel], text: str, file: Path, option: str) -> None:
    """Write panels, side by side, and an optional text to a file; `option` names the file in error messages."""
    save_picture(_figure(panels, text), file, option)


def panels_png(panels: Sequence[Panel]) -> bytes:
    """Return panels as the bytes of a PNG."""
    image = io.BytesIO()
    _figure(panels, "").savefig(image, format="png", dpi=110)
    return image.getvalue()


def _figure(panels: Sequence[Panel], text: str) -> Any:
    from matplotlib.figure import Figure

    count = len(panels) + bool(text)
    figure = Figure(figsize=(WIDTH * count, HEIGHT), layout="constrained")
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(1, count, number)
        for line in panel.lines:
            xs, ys = zip(*line.points, strict=True)
            # A label that begins with _ would be left out of the legend.
            axes.plot(
                xs, ys, label=f" {line.name}", linewidth=1.5, marker="o" if len(xs) < MAX_MARKED_POINTS else None, markersize=3
            )
        axes.set_title(panel.title, parse_math=False, fontsize=10)
        axes.set_xlabel(panel.axis)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(alpha=0.3)
        for words in axes.legend(fontsize=8).get_texts():
            words.set_parse_math(False)
    if text:
        axes = figure.add_subplot(1, count, count)
        axes.set_axis_off()
        axes.set_title("what it writes", fontsize=10)
        axes.text(0, 1, cut(text), family="monospace", fontsize=8, va="top", parse_math=False)
    return figure


def cut(text: str) -> str:
    """Return as much of a text as fits a panel, with long lines wrapped."""
    lines = [part for line in text.strip().splitlines() for part in wrap(line, TEXT_COLUMNS) or [""]]
    return "\n".join(lines[:TEXT_LINES])


BRAILLE = 0x2800
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # bits of a braille cell, by column from the top
COLOURS = ("36", "33", "35", "32", "34", "31")
MIN_WIDTH = 20  # cells of a curve, however narrow the terminal is


def panel_lines(panel: Panel, width: int, height: int = 12, colours: bool = False, braille: bool = True) -> list[str]:
    """Return a panel as text for a terminal of `width` cells: braille curves with a letter at their end, and a legend."""
    left, right, bottom, top = panel.bounds
    labels = _labels(bottom, top, height)
    margin = max(map(len, labels))
    canvas = _Canvas(max(MIN_WIDTH, width - margin - 3), height, braille)
    for number, line in enumerate(panel.lines):
        canvas.curve(_scaled(line.points, (left, right, bottom, top), canvas), number)
    rows = canvas.rows(colours)
    lines = [panel.title]
    lines += [f"{label:>{margin}} {'┤' if label else '│'}{row}" for label, row in zip(labels, rows, strict=True)]
    lines.append(f"{'':>{margin}} └{'─' * canvas.width}")
    first, last = f"{left:,.0f}", f"{right:,.0f} {panel.axis}"
    lines.append(f"{'':>{margin}}  {first}{last:>{canvas.width - len(first)}}")
    names = max(len(line.name) for line in panel.lines)
    for number, line in enumerate(panel.lines):
        mark = _coloured(_letter(number), number) if colours else _letter(number)
        lines.append(f"{mark} {line.name:<{names}}  {line.points[-1][1]:.4f}")
    return lines if braille else [line.translate(PLAIN) for line in lines]


PLAIN = str.maketrans({"┤": "|", "│": "|", "└": "+", "─": "-"})


class _Canvas:
    """A grid of braille cells; each remembers the curve that touched it last."""

    def __init__(self, width: int, height: int, braille: bool) -> None:
        self.width, self.height, self._braille = width, height, braille
        self._dots = [[0] * width for _ in range(height)]
        self._owner = [[0] * width for _ in range(height)]
        self._letters: dict[tuple[int, int], str] = {}

    def curve(self, dots: list[tuple[int, int]], number: int) -> None:
        """Connect dots, counted from the left and the bottom, and put the letter of the curve at its end."""
        for (x, y), (to_x, to_y) in zip(dots, dots[1:] or dots, strict=False):
            steps = max(abs(to_x - x), abs(to_y - y), 1)
            for step in range(steps + 1):
                self._set(x + round((to_x - x) * step / steps), y + round((to_y - y) * step / steps), number)
        x, y = dots[-1]
        row, column = self._cell(x, y)
        while (row, column) in self._letters and column:  # several curves may end in one place
            column -= 1
        self._letters[row, column] = _letter(number)
        self._owner[row][column] = number

    def rows(self, colours: bool) -> list[str]:
        """Return the lines from the top; empty cells have no colour codes."""
        lines = []
        for row in range(self.height):
            texts = [self._text(row, column) for column in range(self.width)]
            if colours:
                owner = self._owner[row]
                texts = [_coloured(text, owner[column]) if text != " " else text for column, text in enumerate(texts)]
            lines.append("".join(texts).rstrip())
        return lines

    def _text(self, row: int, column: int) -> str:
        dots = self._dots[row][column]
        empty, touched = " ", chr(BRAILLE + dots) if self._braille else "*"
        return self._letters.get((row, column)) or (touched if dots else empty)

    def _set(self, x: int, y: int, number: int) -> None:
        row, column = self._cell(x, y)
        self._dots[row][column] |= DOTS[x % 2][3 - y % 4]
        self._owner[row][column] = number

    def _cell(self, x: int, y: int) -> tuple[int, int]:
        return self.height - 1 - y // 4, x // 2


def _scaled(points: Points, bounds: tuple[float, float, float, float], canvas: _Canvas) -> list[tuple[int, int]]:
    """Return points as dots of a canvas."""
    left, right, bottom, top = bounds
    across, up = 2 * canvas.width - 1, 4 * canvas.height - 1
    wide, high = right - left or 1.0, top - bottom or 1.0
    return [(round((x - left) / wide * across), round((y - bottom) / high * up)) for x, y in points]


def _labels(bottom: float, top: float, height: int) -> list[str]:
    """Return the labels of the vertical axis from the top: the largest, the middle and the smallest value."""
    labels = [""] * height
    labels[0], labels[height // 2], labels[-1] = f"{top:.3f}", f"{(top + bottom) / 2:.3f}", f"{bottom:.3f}"
    return labels


def _letter(number: int) -> str:
    return ascii_lowercase[number % len(ascii_lowercase)]


def _coloured(text: str, number: int) -> str:
    return f"\x1b[{COLOURS[number % len(COLOURS)]}m{text}\x1b[0m"
