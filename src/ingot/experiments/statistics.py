"""Significance tests for scores over seeds: Student's one-sample t-test and Welch's two-sample t-test.

Welch's degrees of freedom are not integers, so the distribution is computed from the incomplete beta function.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

TOLERANCE = 1e-15
MOST_SEEDS = 1000  # if a difference needs more seeds per side than this, it is not worth testing


@dataclass(frozen=True)
class Welch:
    """The result of Welch's t-test on two samples."""

    t: float
    freedom: float
    p: float  # two-sided p-value: probability of a difference at least this large if the true means are equal


def welch(a: Sequence[float], b: Sequence[float], at_least: int = 2) -> Welch:
    """Run Welch's t-test on two samples of at least two numbers each, as if both had `at_least` numbers."""
    difference = statistics.fmean(b) - statistics.fmean(a)
    size_a, size_b = max(at_least, len(a)), max(at_least, len(b))
    error_a, error_b = statistics.variance(a) / size_a, statistics.variance(b) / size_b
    total = error_a + error_b
    if total == 0:
        return Welch(math.copysign(math.inf, difference) if difference else 0.0, math.inf, 0.0 if difference else 1.0)
    t, freedom = difference / math.sqrt(total), total**2 / (error_a**2 / (size_a - 1) + error_b**2 / (size_b - 1))
    return Welch(t, freedom, 2 * student_tail(abs(t), freedom))


def seeds_needed(a: Sequence[float], b: Sequence[float], level: float) -> int | None:
    """Return how many seeds each sample needs for p < `level` at these means and variances; None if above MOST_SEEDS."""
    return next((n for n in range(2, MOST_SEEDS + 1) if welch(a, b, n).p < level), None)


def one_sample_p(scores: Sequence[float], reference: float) -> float:
    """Return the one-sided p-value: the probability of a mean this low if the true mean is the reference."""
    below, std = reference - statistics.fmean(scores), statistics.stdev(scores)
    if std == 0:
        return 0.0 if below > 0 else 1.0 if below < 0 else 0.5
    return student_tail(below / (std / math.sqrt(len(scores))), len(scores) - 1)


def student_tail(t: float, freedom: float) -> float:
    """Return the upper tail probability of Student's t-distribution, P(T > t)."""
    tail = incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t)) / 2
    return tail if t > 0 else 1 - tail


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularised incomplete beta function, computed with Lentz's continued fraction."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):  # by symmetry; the fraction converges faster there
        return 1 - incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300  # replaces zero denominators
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
