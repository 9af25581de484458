"""Line charts of runs, for terminals and image files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from string import ascii_lowercase
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ingot.runs.series import Curves, Timing

Points = Sequence[tuple[float, float]]
WIDTH, HEIGHT = 4.6, 3.6  # panel size of an image, in inches
MAX_MARKED_POINTS = 20  # in an image, lines with fewer points get a marker at each point
TEXT_LINES, TEXT_COLUMNS = 17, 52  # size of the text panel in lines and characters
BRAILLE = 0x2800
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # the bit of each braille dot: left and right column, top to bottom
COLOURS = ("36", "33", "35", "32", "34", "31")
MIN_WIDTH = 20  # minimum width of a plot in cells


class Panel(NamedTuple):
    """A chart of one or more named lines, each with at least one point."""

    title: str
    axis: str  # label of the horizontal axis
    lines: Sequence[tuple[str, Points]]


def run_panels(curves: Mapping[str, Curves], axis: str, speed: bool = False) -> list[Panel]:
    """Return panels for loss, bits per byte, task accuracy and, with `speed`, tokens per second; each shows all runs."""
    tasks = [(run, task, points) for run, curve in curves.items() for task, points in curve.tasks.items()]
    panels = {
        "training loss, nats per token": [(name, curve.loss) for name, curve in curves.items()],
        "validation, bits per byte": [(name, curve.val_bpb) for name, curve in curves.items()],
        "tasks, accuracy": [(task if len(curves) == 1 else f"{run} {task}", points) for run, task, points in tasks],
        "tokens per second": [(name, curve.tokens_per_second) for name, curve in curves.items() if speed],
    }
    drawn = {title: [(name, points) for name, points in lines if points] for title, lines in panels.items()}
    return [Panel(title, axis, lines) for title, lines in drawn.items() if lines]


def figure(panels: Sequence[Panel], text: str = "") -> Any:
    """Draw panels side by side in a matplotlib figure, with an optional text panel on the right."""
    from matplotlib.figure import Figure

    count = len(panels) + bool(text)
    drawn = Figure(figsize=(WIDTH * count, HEIGHT), layout="constrained")
    for number, panel in enumerate(panels, 1):
        axes = drawn.add_subplot(1, count, number)
        for name, points in panel.lines:
            xs, ys = zip(*points, strict=True)
            marker = "o" if len(xs) < MAX_MARKED_POINTS else None
            # Labels start with a space, because matplotlib hides labels that start with an underscore.
            axes.plot(xs, ys, label=f" {name}", linewidth=1.5, marker=marker, markersize=3)
        axes.set_title(panel.title, parse_math=False, fontsize=10)
        axes.set_xlabel(panel.axis)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(alpha=0.3)
        for words in axes.legend(fontsize=8).get_texts():
            words.set_parse_math(False)
    if text:
        axes = drawn.add_subplot(1, count, count)
        axes.set_axis_off()
        axes.set_title("what it writes", fontsize=10)
        lines = [part for line in text.strip().splitlines() for part in wrap(line, TEXT_COLUMNS) or [""]]
        axes.text(0, 1, "\n".join(lines[:TEXT_LINES]), family="monospace", fontsize=8, va="top", parse_math=False)
    return drawn


def panel_lines(panel: Panel, width: int, height: int = 12, colours: bool = False) -> list[str]:
    """Render a panel as lines of text, `width` cells wide: braille curves, each ending in a letter, and their legend."""

    def coloured(text: str, number: int) -> str:
        return f"\x1b[{COLOURS[number % len(COLOURS)]}m{text}\x1b[0m" if colours else text

    xs, ys = ([point[axis] for _, points in panel.lines for point in points] for axis in (0, 1))
    left, right, bottom, top = min(xs), max(xs), min(ys), max(ys)
    labels = [""] * height
    labels[0], labels[height // 2], labels[-1] = f"{top:.3f}", f"{(top + bottom) / 2:.3f}", f"{bottom:.3f}"
    margin = max(map(len, labels))
    columns = max(MIN_WIDTH, width - margin - 3)
    dots: dict[tuple[int, int], int] = defaultdict(int)  # cell (row, column) -> bits of its braille character
    owner: dict[tuple[int, int], int] = {}  # cell (row, column) -> index of the curve drawn last in that cell
    letters: dict[tuple[int, int], str] = {}
    wide, high = right - left or 1.0, top - bottom or 1.0
    for number, (_, points) in enumerate(panel.lines):
        places = [
            (round((x - left) / wide * (2 * columns - 1)), round((y - bottom) / high * (4 * height - 1))) for x, y in points
        ]
        for (x, y), (to_x, to_y) in zip(places, places[1:] or places, strict=False):
            steps = max(abs(to_x - x), abs(to_y - y), 1)
            for step in range(steps + 1):
                dot_x, dot_y = x + round((to_x - x) * step / steps), y + round((to_y - y) * step / steps)
                cell = height - 1 - dot_y // 4, dot_x // 2
                dots[cell] |= DOTS[dot_x % 2][3 - dot_y % 4]
                owner[cell] = number
        end = height - 1 - places[-1][1] // 4, places[-1][0] // 2
        while end in letters and end[1]:  # move the letter left if its cell has another letter
            end = end[0], end[1] - 1
        letters[end], owner[end] = ascii_lowercase[number % 26], number
    lines = [panel.title]
    for row, label in enumerate(labels):
        cells = [(row, column) for column in range(columns)]
        texts = [
            coloured(letters.get(cell) or chr(BRAILLE + dots[cell]), owner[cell]) if cell in owner else " " for cell in cells
        ]
        lines.append(f"{label:>{margin}} {'┤' if label else '│'}{''.join(texts).rstrip()}")
    lines.append(f"{'':>{margin}} └{'─' * columns}")
    first, last = f"{left:,.0f}", f"{right:,.0f} {panel.axis}"
    lines.append(f"{'':>{margin}}  {first}{last:>{columns - len(first)}}")
    names = max(len(name) for name, _ in panel.lines)
    for number, (name, points) in enumerate(panel.lines):
        lines.append(f"{coloured(ascii_lowercase[number % 26], number)} {name:<{names}}  {points[-1][1]:.4f}")
    return lines


def describe_stalls(timing: Timing, limit: int) -> str:
    """Describe the `limit` longest stalls of a run and count the rest."""
    longest = [f"{seconds:.1f} s lost up to step {step:,}" for step, seconds in timing.stalls[:limit]]
    more = len(timing.stalls) - len(longest)
    return ", ".join(longest) + (f" and {more} more" if more > 0 else "") or "none"
