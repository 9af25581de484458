"""Whether scores of some seeds differ by more than their noise: Student's t, for one sample and, as Welch has it, for two.

Welch's degrees of freedom are not whole numbers, so the distribution is computed by the incomplete beta function.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

TOLERANCE = 1e-15
MOST_SEEDS = 1000  # of a side that are thought of: beyond that a difference is not worth its seeds


@dataclass(frozen=True)
class Welch:
    """What Welch's test says of two samples."""

    t: float
    freedom: float
    p: float  # how likely a difference this large is, either way, if the true means are equal


def welch(a: Sequence[float], b: Sequence[float]) -> Welch:
    """The test of two samples of at least two numbers each, whose spreads may differ."""
    difference = statistics.fmean(b) - statistics.fmean(a)
    return _welch(difference, statistics.variance(a), len(a), statistics.variance(b), len(b))


def seeds_needed(a: Sequence[float], b: Sequence[float], level: float) -> int | None:
    """How many numbers each sample needs for p below a level, if its mean and spread stay what they are; one may have more now.

    None: more than MOST_SEEDS, or the means are equal.
    """
    difference, spreads = statistics.fmean(b) - statistics.fmean(a), (statistics.variance(a), statistics.variance(b))

    def p(n: int) -> float:
        return _welch(difference, spreads[0], max(n, len(a)), spreads[1], max(n, len(b))).p

    return next((n for n in range(2, MOST_SEEDS + 1) if p(n) < level), None)


def one_sample_p(scores: Sequence[float], reference: float) -> float:
    """How likely scores with a mean this low are if the true mean is the reference: the one-sided t-test."""
    below, std = reference - statistics.fmean(scores), statistics.stdev(scores)
    if std == 0:
        return 0.0 if below > 0 else 1.0 if below < 0 else 0.5
    return student_tail(below / (std / math.sqrt(len(scores))), len(scores) - 1)


def student_tail(t: float, freedom: float) -> float:
    """The probability of more than t in Student's distribution."""
    tail = incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t)) / 2
    return tail if t > 0 else 1 - tail


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction in Lentz's way."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly, that of the other side is quick
        return 1 - incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300  # instead of a division by 0
    c, d, fraction, m, change = 1.0, 0.0, 1.0, 0, math.inf
    while abs(change - 1) > TOLERANCE and m < 10_000:
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)) if m else 1.0
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for numerator in (even, odd):
            d = 1 / ((1 + numerator * d) or tiny)
            c = (1 + numerator / c) or tiny
            change = c * d
            fraction *= change
        m += 1
    return front * (fraction - 1)


def _welch(difference: float, spread_a: float, size_a: int, spread_b: float, size_b: int) -> Welch:
    a, b = spread_a / size_a, spread_b / size_b
    if a + b == 0:
        return Welch(math.copysign(math.inf, difference) if difference else 0.0, math.inf, 0.0 if difference else 1.0)
    t, freedom = difference / math.sqrt(a + b), (a + b) ** 2 / (a**2 / (size_a - 1) + b**2 / (size_b - 1))
    return Welch(t, freedom, 2 * student_tail(abs(t), freedom))
