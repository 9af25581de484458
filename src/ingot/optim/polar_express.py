"""Polar Express: for each iteration of an orthogonalisation the polynomial that suits what the iterations before it leave."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

Polynomial = tuple[float, float, float]  # a, b, c of ax + bx³ + cx⁵

LOWEST = 1e-3  # smallest singular value that Polar Express brings to one
# Rounding may leave a value above the interval it was computed to lie in, where a polynomial shoots off; each but the last is
# stretched by this much.
SAFETY = 1.01
# The best polynomial for a very wide interval comes close to zero inside it, and rounding drowns what it puts there. Below this
# part of the interval values are lifted by the slope alone.
CUSHION = 0.024


@lru_cache
def polar_express(iterations: int) -> tuple[Polynomial, ...]:
    """For each iteration the polynomial that is nearest to one on what the iterations before leave (Amsel et al., 2025).

    Five bring 0.001 .. 1 to 0.87 .. 1.13. An iteration lifts small values four times: with fewer of them the set is made for
    values four times as large per missing one, which it brings to 0.85 .. 1.15. Dropping the last of five instead would spread
    all values over 0.43 .. 1.57.
    """
    low, high = LOWEST * 4.0 ** max(0, 5 - iterations), 1.0
    found = []
    for i in range(iterations):
        (a, b, c), error = nearest_to_one(max(low, CUSHION * high), high)
        s = SAFETY if i < iterations - 1 else 1.0
        a, b, c = a / s, b / s**3, c / s**5
        found.append((a, b, c))
        low, high = min(a * low + b * low**3 + c * low**5, 1 - error), 1 + error
    return tuple(found)


def nearest_to_one(low: float, high: float) -> tuple[Polynomial, float]:
    """The odd quintic whose largest distance from one on low .. high is smallest, and that distance (Remez's exchange)."""
    if low > 0.99 * high:  # too narrow to solve for; the Taylor polynomial is within 1e-6
        m = (low + high) / 2
        a, b, c = 1.875 / m, -1.25 / m**3, 0.375 / m**5
        return (a, b, c), max(abs(a * x + b * x**3 + c * x**5 - 1) for x in (low, high))
    inner, outer = (3 * low + high) / 4, (low + 3 * high) / 4
    for _ in range(20):  # it doubles its digits each time
        x = np.array([low, inner, outer, high])
        # The best one misses by the same error, under and over in turn, at the ends and at its two extrema.
        a, b, c, error = (float(v) for v in np.linalg.solve(np.stack([x, x**3, x**5, [1, -1, 1, -1]], axis=1), np.ones(4)))
        root = math.sqrt(9 * b * b - 20 * a * c)
        inner, outer = math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))
    return (a, b, c), abs(error)
