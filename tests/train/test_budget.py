from __future__ import annotations

from ingot.train.stop import Clock, fits


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_clock_counts_from_what_earlier_sessions_spent():
    time = Time()
    clock = Clock(spent=7.0, now=time)
    assert clock.elapsed == 7.0
    clock.start()
    time.now += 2
    assert clock.elapsed == 9.0


def test_the_clock_stands_still_before_it_starts_and_after_it_stops():
    time = Time()
    clock = Clock(now=time)
    time.now += 5
    clock.start()
    time.now += 1
    clock.stop()
    time.now += 5
    assert clock.elapsed == 1.0


def test_paused_work_does_not_count_even_when_it_fails():
    time = Time()
    clock = Clock(now=time)
    clock.start()
    time.now += 1
    try:
        with clock.paused():
            time.now += 50
            raise OSError
    except OSError:
        pass
    time.now += 2
    assert clock.elapsed == 3.0


def test_pausing_inside_a_pause_does_not_wake_the_clock():
    time = Time()
    clock = Clock(now=time)
    clock.start()
    with clock.paused():
        with clock.paused():
            time.now += 1
        time.now += 1
    assert clock.elapsed == 0.0


def test_pausing_a_clock_that_does_not_run_does_not_start_it():
    time = Time()
    clock = Clock(now=time)
    with clock.paused():
        time.now += 1
    time.now += 1
    assert clock.elapsed == 0.0


def test_starting_twice_counts_once():
    time = Time()
    clock = Clock(now=time)
    clock.start()
    time.now += 1
    clock.start()
    assert clock.elapsed == 1.0


def test_a_step_fits_when_it_would_end_inside_the_budget():
    assert fits(8.0, 2.0, 10.0)
    assert not fits(8.5, 2.0, 10.0)
    assert fits(1e9, 1e9, None)


def test_a_step_that_may_overshoot_fits_when_it_begins_inside_the_budget():
    assert fits(9.9, 2.0, 10.0, overshoot=True)
    assert not fits(10.0, 0.0, 10.0, overshoot=True)
