"""Panels as a picture, side by side, with a text beside them where there is one."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from ingot.doors.charts import Panel
from ingot.runtime.pictures import save_picture

WIDTH, HEIGHT = 4.6, 3.6  # inches of a panel
FEW = 20  # points, each of which is marked
TEXT_LINES, TEXT_COLUMNS = 17, 52  # of a text in its panel


def draw_panels(panels: Sequence[Panel], text: str, file: Path, option: str) -> None:
    """Draw panels into a file; `option` is how the user named it."""
    save_picture(_figure(panels, text), file, option)


def panels_png(panels: Sequence[Panel]) -> bytes:
    """Panels as the bytes of a PNG."""
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
            axes.plot(xs, ys, label=f" {line.name}", linewidth=1.5, marker="o" if len(xs) < FEW else None, markersize=3)
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
    """As much of a text as has room in a panel, with long lines broken."""
    lines = [part for line in text.strip().splitlines() for part in wrap(line, TEXT_COLUMNS) or [""]]
    return "\n".join(lines[:TEXT_LINES])
