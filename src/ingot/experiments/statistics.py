"""Significance tests for scores over seeds: Student's one-sample t-test and Welch's two-sample t-test.

Welch's degrees of freedom are not integers, so the tail of the distribution is integrated numerically.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_SEEDS = 1000  # if a difference needs more seeds per side than this, it is not worth testing


@dataclass(frozen=True)
class Welch:
    """The result of Welch's t-test on two samples."""

    t: float
    freedom: float
    p: float  # two-sided p-value: probability of a difference at least this large if the true means are equal


def welch(a: Sequence[float], b: Sequence[float], at_least: int = 2) -> Welch:
    """Run Welch's t-test on two samples of two or more numbers; smaller samples are treated as if they had `at_least` numbers."""
    difference = statistics.fmean(b) - statistics.fmean(a)
    size_a, size_b = max(at_least, len(a)), max(at_least, len(b))
    error_a, error_b = statistics.variance(a) / size_a, statistics.variance(b) / size_b
    total = error_a + error_b
    if total == 0:
        return Welch(math.copysign(math.inf, difference) if difference else 0.0, math.inf, 0.0 if difference else 1.0)
    t, freedom = difference / math.sqrt(total), total**2 / (error_a**2 / (size_a - 1) + error_b**2 / (size_b - 1))
    return Welch(t, freedom, 2 * student_tail(abs(t), freedom))


def seeds_needed(a: Sequence[float], b: Sequence[float], level: float) -> int | None:
    """Return how many seeds each sample needs for p < `level` if means and variances stay the same; None if above MOST_SEEDS."""
    return next((n for n in range(2, MOST_SEEDS + 1) if welch(a, b, n).p < level), None)


def one_sample_p(scores: Sequence[float], reference: float) -> float:
    """Return the one-sided p-value: the probability of a mean as low as that of `scores` if the true mean is `reference`."""
    below, std = reference - statistics.fmean(scores), statistics.stdev(scores)
    if std == 0:
        return 0.0 if below > 0 else 1.0 if below < 0 else 0.5
    return student_tail(below / (std / math.sqrt(len(scores))), len(scores) - 1)


def student_tail(t: float, freedom: float) -> float:
    """Return the upper tail probability of Student's t-distribution, P(T > t)."""
    if t < 0:
        return 1 - student_tail(-t, freedom)
    # Integrate the density from t to infinity by the trapezoidal rule, after substituting x = t + exp(pi/2 sinh(u)).
    u, width = np.linspace(-4.5, 4.5, 401, retstep=True)
    distance = np.exp(np.pi / 2 * np.sinh(u))
    front = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    density = front * (1 + (t + distance) ** 2 / freedom) ** (-(freedom + 1) / 2)
    return float((density * distance * np.cosh(u)).sum() * np.pi / 2 * width)
