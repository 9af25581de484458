"""Bins of numbers: what they say of any count of lines, in whatever pieces these come."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.runs.series import MOST_BINS, Bins


def pushed(columns, cuts=()):
    bins = Bins(("step", "loss"))
    for part in np.split(columns, sorted(cuts), axis=1):
        if part.shape[1]:
            bins.push(part)
    return bins


def numbers(count):
    return np.stack([np.arange(count, dtype=float), np.sin(np.arange(count))])


@pytest.mark.parametrize("count", [1, MOST_BINS - 1, MOST_BINS, MOST_BINS + 1, 5 * MOST_BINS + 7])
def test_a_bin_tells_the_lowest_the_mean_and_the_highest_of_its_lines(count):
    columns = numbers(count)
    bins = pushed(columns)
    assert bins.used == -(-count // bins.stride) <= MOST_BINS
    for place in (0, bins.used // 2, bins.used - 1):
        lines = columns[:, place * bins.stride : (place + 1) * bins.stride]
        np.testing.assert_array_equal(bins.low[:, place], lines.min(axis=1))
        np.testing.assert_array_equal(bins.high[:, place], lines.max(axis=1))
        np.testing.assert_allclose(bins.mean[:, place], lines.mean(axis=1))


@given(st.integers(0, 4000), st.lists(st.integers(0, 4000), max_size=6))
@settings(max_examples=30)
def test_the_pieces_in_which_lines_come_change_nothing(count, cuts):
    whole, pieces = pushed(numbers(count)), pushed(numbers(count), [min(cut, count) for cut in cuts])
    assert (whole.lines, whole.stride) == (pieces.lines, pieces.stride)
    np.testing.assert_allclose(whole.pack(), pieces.pack())


def test_the_first_bin_that_changed_is_told():
    bins = pushed(numbers(MOST_BINS - 2))
    assert bins.push(numbers(1)) == MOST_BINS - 2
    assert bins.push(numbers(5)) == 0  # pairs were joined
    assert bins.push(numbers(1)) == (MOST_BINS + 4) // 2


def test_numbers_that_are_not_finite_count_as_none():
    columns = np.array([[1.0, 2.0, 3.0], [np.nan, np.nan, np.nan]])
    bins = pushed(columns)
    assert np.isnan(bins.mean[1, :3]).all() and np.isnan(bins.low[1, :3]).all() and bins.mean[0, 2] == 3.0
