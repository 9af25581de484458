"""Panels as lines of text: curves of braille dots, a letter at the end of each, and the names and last values below.

A cell of braille holds two dots by four, so that a panel of 12 lines has 48 heights. Where the output cannot show braille, a cell
that is touched is a star.
"""

from __future__ import annotations

from string import ascii_lowercase

from ingot.doors.charts import Panel, Points

BRAILLE = 0x2800
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # by column, from the top
COLOURS = ("36", "33", "35", "32", "34", "31")
NARROWEST = 20  # cells of a curve, however narrow the terminal is


def panel_lines(panel: Panel, width: int, height: int = 12, colours: bool = False, braille: bool = True) -> list[str]:
    """A panel for a terminal of `width` cells, with `height` lines for the curves."""
    left, right, bottom, top = panel.bounds
    labels = _labels(bottom, top, height)
    margin = max(map(len, labels))
    canvas = _Canvas(max(NARROWEST, width - margin - 3), height, braille)
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
    """Cells of dots, each with the number of the curve that touched it last, and letters over them."""

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
        """The lines from the top; colours only where there is something to see."""
        found = []
        for row in range(self.height):
            texts = [self._text(row, column) for column in range(self.width)]
            if colours:
                owner = self._owner[row]
                texts = [_coloured(text, owner[column]) if text != " " else text for column, text in enumerate(texts)]
            found.append("".join(texts).rstrip())
        return found

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
    """Points as dots of a canvas."""
    left, right, bottom, top = bounds
    across, up = 2 * canvas.width - 1, 4 * canvas.height - 1
    wide, high = right - left or 1.0, top - bottom or 1.0
    return [(round((x - left) / wide * across), round((y - bottom) / high * up)) for x, y in points]


def _labels(bottom: float, top: float, height: int) -> list[str]:
    """What stands at the axis from the top: the largest, the middle and the smallest value."""
    labels = [""] * height
    labels[0], labels[height // 2], labels[-1] = f"{top:.3f}", f"{(top + bottom) / 2:.3f}", f"{bottom:.3f}"
    return labels


def _letter(number: int) -> str:
    return ascii_lowercase[number % len(ascii_lowercase)]


def _coloured(text: str, number: int) -> str:
    return f"\x1b[{COLOURS[number % len(COLOURS)]}m{text}\x1b[0m"
