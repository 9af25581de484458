from ingot.runs.series import step_times


def records(times, session=1, every=1):
    elapsed, found = 0.0, []
    for number, seconds in enumerate(times, 1):
        elapsed += seconds
        found.append({"kind": "train", "session": session, "step": number * every, "elapsed_seconds": elapsed})
    return found


def test_percentiles_are_of_single_steps_whatever_the_records_leave_out():
    timing = step_times(records([1.0] * 90 + [2.0] * 10, every=10))
    assert timing.percentiles == {"p50": 0.1, "p95": 0.2, "p99": 0.2}
    assert timing.stalls == []


def test_a_stall_is_told_with_the_step_it_came_before_and_what_it_cost():
    timing = step_times(records([1.0] * 20 + [9.0] + [1.0] * 20 + [5.0]))
    assert [(stall.step, stall.seconds) for stall in timing.stalls] == [(21, 8.0), (42, 4.0)]


def test_the_time_between_sessions_is_no_step():
    first, second = records([1.0] * 5), records([1.0] * 5, session=2)
    later = [{**record, "step": record["step"] + 5, "elapsed_seconds": record["elapsed_seconds"] + 500} for record in second]
    timing = step_times([*first, *later])
    assert timing.percentiles["p99"] == 1.0 and timing.stalls == []


def test_records_that_say_nothing_of_time_are_passed_over():
    assert step_times([]).percentiles == {}
    assert step_times([{"kind": "evaluation"}, {"kind": "train", "step": 1}, {"kind": "train", "step": None}]).stalls == []
