from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.config.schema import Config
from ingot.optim.schedules import fraction_spent, learning_rate_scale, muon_decay_scale, muon_momentum


def config_of(max_steps=None, seconds=None, **optimizer):
    return Config(optimizer=optimizer, training={"max_steps": max_steps}, budget={"seconds": seconds})


def scale(config, step, elapsed=0.0):
    return learning_rate_scale(config, step, elapsed)


@st.composite
def runs(draw, schedules=("constant", "cosine", "wsd", "budget", "warmdown")):
    """A config with any schedule that fits, a budget by steps, by seconds or by both."""
    schedule = draw(st.sampled_from(schedules))
    by_steps = schedule in ("cosine", "wsd") or draw(st.booleans())
    max_steps = draw(st.integers(2, 500)) if by_steps else None
    seconds = draw(st.floats(0.1, 1e6)) if max_steps is None or draw(st.booleans()) else None
    warmup = draw(st.integers(0, (max_steps or 50) - 1))
    decay = draw(st.none() | st.integers(warmup + 1, 1000)) if schedule in ("cosine", "wsd") else None
    decay = draw(st.integers(1, 1000)) if schedule == "warmdown" else decay
    return config_of(
        max_steps,
        seconds,
        schedule=schedule,
        warmup_steps=warmup,
        decay_steps=decay,
        floor=draw(st.floats(0, 1)),
        decay_fraction=draw(st.just(0.0) | st.floats(1e-3, 1)),
    )


@st.composite
def journeys(draw, schedules=("constant", "cosine", "wsd", "budget", "warmdown")):
    """A run and the places it passes: neither steps nor seconds ever go back."""
    config = draw(runs(schedules))
    steps = sorted(draw(st.lists(st.integers(0, 1200), min_size=2, max_size=20)))
    times = sorted(draw(st.lists(st.floats(0, 2e6), min_size=len(steps), max_size=len(steps))))
    return config, list(zip(steps, times, strict=True))


@pytest.mark.parametrize(
    ("step", "rate"), [(0, 2.9985e-7), (1999, 5.997e-4), (2000, 6e-4), (301_000, 3.3e-4), (600_001, 6e-5), (10**9, 6e-5)]
)
def test_cosine_is_nanogpts(step, rate):
    config = config_of(600_000, schedule="cosine", warmup_steps=2000, decay_steps=600_000, floor=0.1)
    assert 6e-4 * scale(config, step) == pytest.approx(rate, rel=1e-4)


def test_cosine_ends_at_the_last_step_unless_told():
    config = config_of(100, schedule="cosine", floor=0.0)
    assert [scale(config, step) for step in (0, 50, 100)] == pytest.approx([1.0, 0.5, 0.0])


def test_wsd_holds_and_then_falls_in_a_line():
    config = config_of(100, schedule="wsd", warmup_steps=9, decay_steps=40, floor=0.2)
    assert [scale(config, step) for step in (0, 4, 9, 30, 60)] == pytest.approx([0.1, 0.5, 1, 1, 1])
    assert [scale(config, step) for step in (70, 80, 100)] == pytest.approx([0.8, 0.6, 0.2])


def test_wsd_falls_over_the_last_fifth_unless_told():
    config = config_of(100, schedule="wsd", floor=0.0)
    assert [scale(config, step) for step in (80, 90, 100)] == pytest.approx([1.0, 0.5, 0.0])


def test_constant_stays_after_the_warm_up():
    config = config_of(100, schedule="constant", warmup_steps=4, floor=0.1)
    assert [scale(config, step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert {scale(config, step) for step in range(4, 1000)} == {1.0}


def test_a_budget_of_seconds_follows_the_clock_and_not_the_steps():
    config = config_of(seconds=90.0, schedule="budget", decay_fraction=0.5, floor=0.0)
    assert [scale(config, 7, elapsed) for elapsed in (0, 45, 67.5, 90)] == pytest.approx([1.0, 1.0, 0.5, 0.0])
    assert scale(config, 10_000, 10.0) == 1.0


def test_a_budget_of_steps_follows_the_steps_and_not_the_clock():
    config = config_of(100, schedule="budget", decay_fraction=0.4, floor=0.1)
    assert [scale(config, step, 1e9) for step in (0, 60, 80, 100)] == pytest.approx([1.0, 1.0, 0.55, 0.1])


def test_of_two_budgets_the_one_further_along_counts():
    config = config_of(100, seconds=10.0, schedule="budget", decay_fraction=1.0, floor=0.0)
    assert scale(config, 50, 1.0) == pytest.approx(0.5)
    assert scale(config, 10, 8.0) == pytest.approx(0.2)


def test_a_budget_without_decay_stays_up():
    config = config_of(100, schedule="budget", decay_fraction=0.0, floor=0.0)
    assert [scale(config, step) for step in (0, 99)] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("step", "milliseconds", "expected"),
    [
        (0, 5, 1.0),
        (6000, 392_924, 1.0),
        (7000, 459_048, 0.71646),
        (8000, 528_649, 0.35992),
        (9000, 595_074, 0.02483),
        (9092, 599_903, 0.00049),
        (1, 527, 0.37917),
        (100, 52_500, 0.34762),
    ],
)
def test_a_warm_down_by_time_is_golfs(step, milliseconds, expected):
    for max_steps in (None, 20_000):
        config = config_of(max_steps, seconds=600.0, schedule="warmdown", decay_steps=3000, floor=0.0)
        assert scale(config, step, milliseconds / 1000) == pytest.approx(expected, abs=1e-5)


def test_a_warm_down_by_steps_is_golfs():
    config = config_of(20_000, schedule="warmdown", decay_steps=3000, floor=0.0)
    found = [scale(config, step, 1e9) for step in (0, 17_000, 18_500, 19_999, 20_000, 30_000)]
    assert found == pytest.approx([1.0, 1.0, 0.5, 1 / 3000, 0.0, 0.0])


def test_without_a_warm_down_golfs_rate_stays_up():
    config = config_of(20_000, seconds=600.0, schedule="constant")
    assert {scale(config, *place) for place in [(0, 0.0), (10_000, 300.0), (19_999, 599.9)]} == {1.0}


def test_a_warm_down_ends_on_the_floor_and_stays_there():
    for config in (
        config_of(100, schedule="warmdown", decay_steps=10, floor=0.1),
        config_of(None, 60.0, schedule="warmdown", decay_steps=10, floor=0.1),
    ):
        assert scale(config, 95, 57.0) == pytest.approx(0.1 + 0.9 * 0.5)
        assert [scale(config, *place) for place in [(100, 60.0), (140, 90.0)]] == pytest.approx([0.1, 0.1])


def test_a_warm_down_longer_than_the_run_begins_below_the_peak():
    config = config_of(100, schedule="warmdown", decay_steps=400, floor=0.0)
    assert scale(config, 0) == pytest.approx(0.25)


def test_a_warm_down_has_a_first_step_before_the_clock_has_moved():
    assert scale(config_of(None, 60.0, schedule="warmdown", decay_steps=10), 0, 0.0) == 1.0


@pytest.mark.parametrize(("step", "momentum"), [(0, 0.92), (750, 0.955), (1499, 0.98995), (1500, 0.99), (10**6, 0.99)])
def test_muons_momentum_rises_as_golfs(step, momentum):
    config = config_of(20_000, muon_momentum=0.99, muon_momentum_start=0.92, muon_momentum_warmup_steps=1500)
    assert muon_momentum(config, step) == pytest.approx(momentum, abs=1e-5)


@pytest.mark.parametrize("ramp", [{}, {"muon_momentum_start": 0.5}, {"muon_momentum_warmup_steps": 100}])
def test_without_a_start_or_a_length_muons_momentum_stands(ramp):
    config = config_of(10, muon_momentum=0.9, **ramp)
    assert {muon_momentum(config, step) for step in range(200)} == {0.9}


@given(st.floats(0, 0.999), st.floats(0, 0.999), st.integers(1, 5000), st.integers(0, 10_000))
def test_muons_momentum_stays_between_its_ends(start, final, steps, step):
    config = config_of(10, muon_momentum=final, muon_momentum_start=start, muon_momentum_warmup_steps=steps)
    assert min(start, final) - 1e-12 <= muon_momentum(config, step) <= max(start, final) + 1e-12


@settings(deadline=None)
@given(journeys(("constant", "cosine", "wsd", "budget")))  # a warm-down by time rises when steps get faster
def test_the_learning_rate_never_rises_again_after_the_warm_up(journey):
    config, places = journey
    scales = [scale(config, *place) for place in places if place[0] >= config.optimizer.warmup_steps]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(scales))


@settings(deadline=None)
@given(journeys())
def test_the_learning_rate_stays_between_nothing_and_its_peak(journey):
    config, places = journey
    for step, elapsed in places:
        found = scale(config, step, elapsed)
        assert 0 <= found <= 1 + 1e-12
        if step >= config.optimizer.warmup_steps:
            assert found >= config.optimizer.floor - 1e-12


@settings(deadline=None)
@given(runs(schedules=("cosine", "wsd", "budget", "warmdown")))
def test_a_decay_lands_on_the_floor_at_the_end_of_the_budget(config):
    o, max_steps = config.optimizer, config.training.max_steps
    ends = []
    if max_steps is not None:
        ends.append((max(max_steps, o.decay_steps or 0), 0.0))
    if o.schedule == "warmdown" and config.budget.seconds is not None:
        ends = [(1_000, config.budget.seconds)]
    if o.schedule == "budget" and config.budget.seconds is not None:
        ends.append((1_000 if max_steps is None else max_steps, config.budget.seconds))
    lands = o.schedule != "budget" or o.decay_fraction > 0
    for end in ends:
        assert scale(config, *end) == pytest.approx(o.floor if lands else 1.0, abs=1e-9)


@settings(deadline=None)
@given(runs(), st.integers(0, 1200), st.floats(0, 2e6))
def test_the_warm_up_rises_in_a_line_to_the_decay(config, step, elapsed):
    warmup = config.optimizer.warmup_steps
    without = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"warmup_steps": 0})})
    if config.optimizer.schedule != "cosine" and step < warmup:
        expected = scale(without, step, elapsed) * (step + 1) / (warmup + 1)
        assert scale(config, step, elapsed) == pytest.approx(expected, abs=1e-12)
    elif step == warmup and config.optimizer.schedule in ("constant", "cosine"):
        assert scale(config, step, elapsed) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    ("max_steps", "seconds", "part"),
    [(40, None, 0.25), (None, 30.0, 0.1), (40, 4.0, 0.75), (5, None, 1.0)],
)
def test_what_is_spent_is_the_further_of_steps_and_seconds(max_steps, seconds, part):
    assert fraction_spent(config_of(max_steps, seconds, schedule="constant"), 10, 3.0) == pytest.approx(part)


@pytest.mark.parametrize(
    ("schedule", "factors"), [("constant", [1, 1, 1, 1]), ("falling", [1, 0.75, 0.5, 0]), ("rising", [1, 0.625, 0.25, 1.25])]
)
def test_muons_decay_follows_its_own_schedule_over_the_budget(schedule, factors):
    config = config_of(seconds=100.0, schedule="budget", muon_weight_decay_schedule=schedule)
    assert [muon_decay_scale(config, 7, seconds) for seconds in (0, 25, 50, 100)] == pytest.approx(factors)
    by_steps = config_of(max_steps=8, muon_weight_decay_schedule=schedule)
    assert [muon_decay_scale(by_steps, step, 0.0) for step in (0, 2, 4, 8)] == pytest.approx(factors)
