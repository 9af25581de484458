"""Student's t and Welch's test, against tables, closed forms and worked examples."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.experiments.statistics import one_sample_p, seeds_needed, student_tail, welch


@pytest.mark.parametrize(
    ("t", "freedom", "tail"),
    [
        (1.0, 1, 0.25), (6.313752, 1, 0.05), (31.820516, 1, 0.01), (2.919986, 2, 0.05), (9.924843, 2, 0.005),
        (5.840909, 3, 0.005), (3.746947, 4, 0.01), (2.015048, 5, 0.05), (1.812461, 10, 0.05), (2.763769, 10, 0.01),
        (1.646379, 1000, 0.05), (0.0, 7, 0.5),
    ],
)  # fmt: skip
def test_students_tail_is_that_of_the_tables(t: float, freedom: int, tail: float) -> None:
    assert student_tail(t, freedom) == pytest.approx(tail, rel=2e-6)


@given(st.floats(-1e6, 1e6), st.integers(1, 60))
def test_students_tails_add_up_to_one_and_stay_probabilities(t: float, freedom: int) -> None:
    assert student_tail(t, freedom) + student_tail(-t, freedom) == pytest.approx(1)
    assert 0 <= student_tail(t, freedom) <= 1


def test_one_sided_p_is_small_for_scores_below_the_reference_and_large_above() -> None:
    scores = [1.20143, 1.19945, 1.20320]
    assert one_sample_p(scores, 1.2244) == pytest.approx(0.00109, abs=2e-4)
    assert one_sample_p(scores, 1.18) > 0.99
    assert (one_sample_p([1.0, 1.0], 2.0), one_sample_p([1.0, 1.0], 0.5)) == (0.0, 1.0)


def finite_sum(t: float, freedom: int) -> float:
    """The tail for whole degrees of freedom, by the sum that it has there."""
    cosine, odd = 1 / math.sqrt(1 + t * t / freedom), freedom % 2
    sine, term, total = t / math.sqrt(freedom) * cosine, cosine if odd else 1.0, 0.0
    for k in range(1 + odd, freedom, 2):
        total, term = total + term, term * cosine * cosine * k / (k + 1)
    return (1 - ((math.atan2(sine, cosine) + sine * total) * 2 / math.pi if odd else sine * total)) / 2


@given(st.floats(-20, 20), st.integers(1, 60))
def test_students_tail_is_the_finite_sum_of_whole_degrees_of_freedom(t: float, freedom: int) -> None:
    assert student_tail(t, freedom) == pytest.approx(finite_sum(t, freedom), rel=1e-7, abs=1e-13)


@pytest.mark.parametrize(("t", "freedom"), [(2.0, 2.5), (0.3, 1.2), (4.1, 7.77), (2.46, 25.02), (1.0, 300.5)])
def test_students_tail_is_the_integral_of_the_density_for_any_degrees_of_freedom(t: float, freedom: float) -> None:
    log_front = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2

    def density(x: float) -> float:
        return math.exp(log_front - (freedom + 1) / 2 * math.log1p(x * x / freedom))

    n, width = 2000, t / 2000  # Simpson's rule from 0 to t
    inside = sum(density(i * width) * (1 if i in (0, n) else 4 if i % 2 else 2) for i in range(n + 1)) * width / 3
    assert student_tail(t, freedom) == pytest.approx(0.5 - inside, rel=1e-9)


# A worked example that is often printed: 2.46, 25.0 and 0.021.
A1 = [27.5, 21.0, 19.0, 23.6, 17.0, 17.9, 16.9, 20.1, 21.9, 22.6, 23.1, 19.6, 19.0, 21.7, 21.4]
B1 = [27.1, 22.0, 20.8, 23.4, 23.4, 23.5, 25.8, 22.0, 24.8, 20.2, 21.9, 22.1, 22.9, 20.5, 24.4]


def test_welchs_test_is_that_of_a_worked_example() -> None:
    found = welch(A1, B1)
    assert found.t == pytest.approx(2.46, abs=0.005)
    assert found.freedom == pytest.approx(25.0, abs=0.05)
    assert found.p == pytest.approx(0.021, abs=0.0005)
    turned = welch(B1, A1)
    assert (turned.t, turned.p) == (pytest.approx(-found.t), pytest.approx(found.p))


def test_samples_of_equal_size_and_spread_have_the_degrees_of_freedom_of_a_plain_test() -> None:
    assert welch([1.0, 2.0, 3.0], [2.0, 3.0, 4.0]).freedom == pytest.approx(4)


def test_scores_without_any_spread_are_told_apart_or_equal() -> None:
    assert welch([1.0, 1.0], [2.0, 2.0]).p == 0.0
    assert welch([1.0, 1.0], [1.0, 1.0]).p == 1.0


def test_as_many_seeds_as_are_needed_make_p_small_and_one_less_does_not() -> None:
    a, b = [1.0, 1.2, 1.1], [1.15, 1.3, 1.2]
    assert welch(a, b).p > 0.01
    n = seeds_needed(a, b, 0.01)
    assert n is not None and n > 3

    def drawn(middle: float, spread: float, size: int) -> list[float]:
        """Numbers with this mean and this standard deviation."""
        pairs, away = size // 2, spread * math.sqrt((size - 1) / (size - size % 2))
        return [middle] * (size % 2) + [middle + away, middle - away] * pairs

    sides = [(sum(side) / 3, math.sqrt(sum((x - sum(side) / 3) ** 2 for x in side) / 2)) for side in (a, b)]
    for size, small in ((n, True), (n - 1, False)):
        assert (welch(*(drawn(middle, spread, size) for middle, spread in sides)).p < 0.01) is small


def test_no_number_of_seeds_tells_equal_means_apart() -> None:
    assert seeds_needed([1.0, 2.0], [2.0, 1.0], 0.01) is None
