"""Line charts, in a terminal or as a picture; what is drawn is a list of panels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """A curve with its name."""

    name: str
    points: Points


@dataclass(frozen=True)
class Panel:
    """Lines over one axis; those without points are left out by whoever makes it."""

    title: str
    axis: str  # what is counted from left to right
    lines: Sequence[Line]

    @property
    def bounds(self) -> tuple[float, float, float, float]:
        """Left, right, bottom and top of all lines."""
        xs = [x for line in self.lines for x, _ in line.points]
        ys = [y for line in self.lines for _, y in line.points]
        return min(xs), max(xs), min(ys), max(ys)
