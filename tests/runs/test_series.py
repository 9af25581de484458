"""metrics.jsonl as it grows: what is read of it, once, and what is kept for the next reader."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.runs import series as module
from ingot.runs.series import MAX_BINS, STEP_SECONDS, Bins, Series, parse_lines


def line(step, kind="train", **more):
    record = {"kind": kind, "session": 1, "step": step, "tokens": step * 100, "elapsed_seconds": step / 10, "loss": 1 / step}
    return json.dumps({**record, "grad_norm": 1.0, "learning_rate": 0.1, "tokens_per_second": 5.0, **more}) + "\n"


def column(series, name, kind="train"):
    bins = series.bins[kind]
    return bins.binned()["mean"][bins.names.index(name)].tolist()


@pytest.fixture
def path(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(line(step) for step in range(1, 6)))
    return tmp_path / "metrics.jsonl"


def test_what_is_new_is_read_from_the_byte_where_the_last_reading_ended(path):
    series = Series(path).read()
    with path.open("r+b") as file:  # what was read is not looked at again, but for its last line
        file.write(b"#" * 10)
    with path.open("a") as file:
        file.write(line(6))
    series.read()
    assert column(series, "step") == [1, 2, 3, 4, 5, 6] and series.damaged == 0
    np.testing.assert_allclose(column(series, "loss"), [1 / step for step in range(1, 7)])


def test_a_line_that_is_being_written_is_read_when_it_is_whole(path):
    with path.open("a") as file:
        file.write(line(6)[:30])
    series = Series(path).read()
    assert column(series, "step")[-1] == 5 and series.damaged == 0
    with path.open("a") as file:
        file.write(line(6)[30:])
    assert column(series.read(), "step")[-1] == 6


def test_damaged_lines_are_skipped_and_counted(path):
    with path.open("ab") as file:
        file.write(b'{"kind": "train", "st\n\xff\xfe\n[1]\n17\n' + line(6).encode() + b"[" * 100_000 + b"\n" + line(7).encode())
    series = Series(path).read()
    assert column(series, "step") == [1, 2, 3, 4, 5, 6, 7] and (series.damaged, series.lines) == (5, 12)


def test_lines_of_steps_that_no_run_has_are_damaged(path):
    with path.open("a") as file:
        file.write(line(6) + line(-1e308) + line(1e308) + line(7, elapsed_seconds=1e308) + line(8, tokens=10**400) + line(9))
    series = Series(path).read()
    assert column(series, "step") == [1, 2, 3, 4, 5, 6, 9] and (series.damaged, series.lines) == (4, 11)


def test_lines_without_a_step_are_damaged(path):
    with path.open("a") as file:
        file.write(
            '{"kind": "train", "loss": 1}\n{"kind": "evaluation", "step": "9", "val_bpb": 2}\n{"kind": "note"}\n' + line(6)
        )
    series = Series(path).read()
    assert column(series, "step") == [1, 2, 3, 4, 5, 6] and (series.damaged, series.lines) == (2, 9)


def test_two_records_in_one_line_are_a_damaged_line(path):
    with path.open("a") as file:
        file.write(line(6).strip() + "," + line(7))
    series = Series(path).read()
    assert column(series, "step")[-1] == 5 and series.damaged == 1


def test_a_stretch_without_a_line_is_passed_over(path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", 1000)
    with path.open("a") as file:
        file.write("x" * 2500 + "\n" + line(6))
    series = Series(path).read()
    assert column(series, "step")[-1] == 6 and series.damaged >= 1


def test_a_number_that_is_missing_or_none_leaves_a_gap(path):
    with path.open("a") as file:
        file.write(line(6, loss=None) + line(7, loss="high") + line(8, loss=True) + line(9, loss=10**400))
        file.write('{"kind": "train", "step": 10}\n')
    assert np.isnan(column(Series(path).read(), "loss")[5]) and len(column(Series(path).read(), "loss")) == 10


def test_a_file_that_a_resume_has_replaced_is_read_from_its_start(path):
    series = Series(path).read()
    other = path.with_name("other")
    other.write_text("".join(line(step, loss=7.0) for step in range(1, 9)))
    other.replace(path)
    series.read()
    assert column(series, "loss") == [7.0] * 8 and series.generation == 1


def test_an_evaluation_has_the_tokens_that_were_trained_before_it(path):
    with path.open("a") as file:
        file.write(line(5, "evaluation", tokens=77, val_bpb=1.5, val_loss=3.0))
    series = Series(path).read()
    assert column(series, "tokens", "evaluation") == [500.0] and column(series, "val_bpb", "evaluation") == [1.5]


def test_the_slowest_rank_is_that_of_the_last_record_whose_numbers_are_valid(path):
    assert Series(path).read().slowest_rank is None
    with path.open("a") as file:
        for p50 in ([0.2, 0.3, 0.1], [0.2, None], "fast", []):
            file.write(json.dumps({"kind": "ranks", "step": 5, "p50": p50, "p95": p50}) + "\n")
    assert Series(path).read().slowest_rank == [1, 0.3, 0.2]


def test_seconds_of_a_step_are_those_between_lines_of_one_session(path):
    with path.open("a") as file:
        file.write(line(7, elapsed_seconds=2.5) + line(8, elapsed_seconds=100.0, session=2))
    np.testing.assert_allclose(column(Series(path).read(), STEP_SECONDS)[1:6], [0.1, 0.1, 0.1, 0.1, 1.0])
    assert np.isnan(column(Series(path).read(), STEP_SECONDS)[6])


def of_times(path, times, session=1, every=1, step=0, elapsed=0.0):
    with path.open("a") as file:
        for seconds in times:
            step, elapsed = step + every, elapsed + seconds
            file.write(json.dumps({"kind": "train", "session": session, "step": step, "elapsed_seconds": elapsed}) + "\n")
    return Series(path).read().timing()


def test_percentiles_are_of_single_steps_whatever_the_records_leave_out(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", 1000)
    timing = of_times(tmp_path / "metrics.jsonl", [1.0] * 90 + [2.0] * 10, every=10)
    assert timing.percentiles == pytest.approx({"p50": 0.1, "p95": 0.2, "p99": 0.2}, rel=0.01)
    assert timing.stalls == []


def test_a_stall_has_the_step_it_came_before_and_what_it_cost(tmp_path):
    stalls = of_times(tmp_path / "metrics.jsonl", [1.0] * 20 + [9.0] + [1.0] * 20 + [5.0]).stalls
    assert [step for step, _ in stalls] == [21, 42]
    assert [seconds for _, seconds in stalls] == pytest.approx([8.0, 4.0], rel=0.01)


def test_the_time_between_sessions_is_no_step(tmp_path):
    of_times(tmp_path / "metrics.jsonl", [1.0] * 5)
    timing = of_times(tmp_path / "metrics.jsonl", [1.0] * 5, session=2, step=5, elapsed=505.0)
    assert timing.percentiles["p99"] == pytest.approx(1.0, rel=0.01) and timing.stalls == []


def test_percentiles_agree_with_those_of_all_times_sorted(tmp_path):
    times = np.random.default_rng(0).lognormal(-3, 0.2, 2000)
    timing = of_times(tmp_path / "metrics.jsonl", times)
    for name, share in module.PERCENTILES.items():
        assert timing.percentiles[name] == pytest.approx(float(np.sort(times[1:])[int(share * 1999)]), rel=0.011)


@pytest.mark.parametrize(("axis", "places"), [("steps", [1, 2]), ("tokens", [64, 128]), ("seconds", [0.5, 1.5])])
def test_curves_stand_over_the_axis_that_is_asked_for(tmp_path, axis, places):
    tasks = {"lambada": {"items": 3, "acc": 0.5}, "piqa": {"items": 3, "acc": 0.1, "acc_norm": 0.2}}
    records = [
        {"kind": "train", "step": 1, "loss": 5.0, "tokens": 64, "elapsed_seconds": 0.5},
        {"kind": "train", "step": 2, "loss": 4.0, "tokens": 128, "elapsed_seconds": 1.5},
        {"kind": "evaluation", "step": 2, "val_bpb": 3.0, "tokens": 999, "elapsed_seconds": 1.5, "tasks": tasks, "best": True},
        {"kind": "evaluation", "step": 3, "val_bpb": None, "tokens": 999, "best": True},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    series = Series(tmp_path / "metrics.jsonl").read()
    curves = series.curves(axis)
    assert curves.loss == [(places[0], 5.0), (places[1], 4.0)] and curves.val_bpb == [(places[1], 3.0)]
    assert curves.tasks == {"lambada": [(places[1], 0.5)], "piqa": [(places[1], 0.2)]}
    assert series.best is not None and (series.best["step"], series.best["tasks"]) == (2, tasks)


def test_evaluations_between_two_logged_steps_lie_at_the_tokens_trained_on(tmp_path):
    records = [
        {"kind": "evaluation", "step": 0, "val_bpb": 8.0, "tokens": 999},
        {"kind": "train", "step": 20, "loss": 5.0, "tokens": 2000},
        {"kind": "evaluation", "step": 25, "val_bpb": 3.0, "tokens": 999},
        {"kind": "train", "step": 30, "loss": 4.0, "tokens": 3000},
        {"kind": "evaluation", "step": 33, "val_bpb": 2.0, "tokens": 999, "trained_tokens": 3300},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert Series(tmp_path / "metrics.jsonl").read().curves("tokens").val_bpb == [(0, 8.0), (2000, 3.0), (3300, 2.0)]


def test_lines_are_parsed_as_one_by_one():
    content = b'{"a": 1}\n{"b": [1, {"c": null}]}\n{"d": NaN}\n'
    records, damaged = parse_lines(content)
    assert [list(record) for record in records] == [["a"], ["b"], ["d"]] and damaged == 0


def pushed(columns, cuts=()):
    bins = Bins(("step", "loss"))
    for part in np.split(columns, sorted(cuts), axis=1):
        if part.shape[1]:
            bins.push(part)
    return bins


def numbers(count):
    return np.stack([np.arange(count, dtype=float), np.sin(np.arange(count))])


@pytest.mark.parametrize("count", [1, MAX_BINS - 1, MAX_BINS, MAX_BINS + 1, 5 * MAX_BINS + 7])
def test_a_bin_tells_the_lowest_the_mean_and_the_highest_of_its_lines(count):
    columns = numbers(count)
    bins = pushed(columns)
    used = bins.binned()["mean"].shape[1]
    assert used == -(-count // bins.stride) <= MAX_BINS
    for place in (0, used // 2, used - 1):
        lines = columns[:, place * bins.stride : (place + 1) * bins.stride]
        low, mean, high = (part[:, place] for part in bins.binned().values())
        np.testing.assert_array_equal(low, lines.min(axis=1))
        np.testing.assert_array_equal(high, lines.max(axis=1))
        np.testing.assert_allclose(mean, lines.mean(axis=1))


@given(st.integers(0, 4000), st.lists(st.integers(0, 4000), max_size=6))
@settings(max_examples=30)
def test_the_pieces_in_which_lines_come_change_nothing(count, cuts):
    whole, pieces = pushed(numbers(count)), pushed(numbers(count), [min(cut, count) for cut in cuts])
    assert (whole.lines, whole.stride) == (pieces.lines, pieces.stride)
    for part in ("low", "mean", "high"):
        np.testing.assert_allclose(whole.binned()[part], pieces.binned()[part])


def test_numbers_that_are_not_finite_count_as_none():
    columns = np.array([[1.0, 2.0, 3.0], [np.nan, np.nan, np.nan]])
    bins = pushed(columns)
    parts = bins.binned()
    assert np.isnan(parts["mean"][1]).all() and np.isnan(parts["low"][1]).all() and parts["mean"][0, 2] == 3.0


def test_a_finished_run_of_more_than_a_block_of_metrics_is_read_to_its_last_line(tmp_path):
    count = 2 * module.BLOCK_BYTES // len(line(1))
    (tmp_path / "metrics.jsonl").write_text("".join(line(step) for step in range(1, count + 1)))
    series = Series(tmp_path / "metrics.jsonl").read()
    assert series.lines == count and series.bins["train"].column("step")[-1] == count
