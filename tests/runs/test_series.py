"""metrics.jsonl as it grows: what is read of it, once, and what is kept for the next reader."""

import json
import os

import numpy as np
import pytest

from ingot.runs import series as module
from ingot.runs.series import STEP_SECONDS, Series, parse_lines, step_times


def line(step, kind="train", **more):
    record = {"kind": kind, "session": 1, "step": step, "tokens": step * 100, "elapsed_seconds": step / 10, "loss": 1 / step}
    return json.dumps({**record, "grad_norm": 1.0, "learning_rate": 0.1, "tokens_per_second": 5.0, **more}) + "\n"


def read(series):
    while series.read_block():
        pass
    return series


def column(series, name, kind="trained"):
    bins = getattr(series, kind)
    return bins.mean[bins.names.index(name), : bins.used].tolist()


@pytest.fixture
def path(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(line(step) for step in range(1, 6)))
    return tmp_path / "metrics.jsonl"


def test_what_is_new_is_read_from_the_byte_where_the_last_reading_ended(path):
    series = read(Series(path))
    with path.open("r+b") as file:  # what was read is not looked at again, but for its last line
        file.write(b"#" * 10)
    with path.open("a") as file:
        file.write(line(6))
    read(series)
    assert column(series, "step") == [1, 2, 3, 4, 5, 6] and series.damaged == 0
    np.testing.assert_allclose(column(series, "loss"), [1 / step for step in range(1, 7)])


def test_a_line_that_is_being_written_is_read_when_it_is_whole(path):
    with path.open("a") as file:
        file.write(line(6)[:30])
    series = read(Series(path))
    assert column(series, "step")[-1] == 5 and series.damaged == 0
    with path.open("a") as file:
        file.write(line(6)[30:])
    assert column(read(series), "step")[-1] == 6


def test_damaged_lines_are_skipped_and_counted(path):
    with path.open("ab") as file:
        file.write(b'{"kind": "train", "st\n\xff\xfe\n[1]\n17\n' + line(6).encode() + b"[" * 100_000 + b"\n" + line(7).encode())
    series = read(Series(path))
    assert column(series, "step") == [1, 2, 3, 4, 5, 6, 7] and (series.damaged, series.lines) == (5, 12)


def test_lines_of_steps_that_no_run_has_are_damaged(path):
    with path.open("a") as file:
        file.write(line(6) + line(-1e308) + line(1e308) + line(7, elapsed_seconds=1e308) + line(8, tokens=10**400) + line(9))
    series = read(Series(path))
    assert column(series, "step") == [1, 2, 3, 4, 5, 6, 9] and (series.damaged, series.lines) == (4, 11)


def test_lines_without_a_step_are_damaged(path):
    with path.open("a") as file:
        file.write(
            '{"kind": "train", "loss": 1}\n{"kind": "evaluation", "step": "9", "val_bpb": 2}\n{"kind": "note"}\n' + line(6)
        )
    series = read(Series(path))
    assert column(series, "step") == [1, 2, 3, 4, 5, 6] and (series.damaged, series.lines) == (2, 9)


def test_two_records_in_one_line_are_a_damaged_line(path):
    with path.open("a") as file:
        file.write(line(6).strip() + "," + line(7))
    series = read(Series(path))
    assert column(series, "step")[-1] == 5 and series.damaged == 1


def test_a_stretch_without_a_line_is_passed_over(path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 1000)
    with path.open("a") as file:
        file.write("x" * 2500 + "\n" + line(6))
    series = read(Series(path))
    assert column(series, "step")[-1] == 6 and series.damaged >= 1


def test_a_number_that_is_missing_or_none_leaves_a_gap(path):
    with path.open("a") as file:
        file.write(line(6, loss=None) + line(7, loss="high") + line(8, loss=True) + line(9, loss=10**400))
        file.write('{"kind": "train", "step": 10}\n')
    assert np.isnan(column(read(Series(path)), "loss")[5]) and len(column(read(Series(path)), "loss")) == 10


def test_a_file_that_a_resume_has_replaced_is_read_from_its_start(path):
    series = read(Series(path))
    other = path.with_name("other")
    other.write_text("".join(line(step, loss=7.0) for step in range(1, 9)))
    other.replace(path)
    read(series)
    assert column(series, "loss") == [7.0] * 8 and series.generation == 1


def test_an_evaluation_has_the_tokens_that_were_trained_before_it(path):
    with path.open("a") as file:
        file.write(line(5, "evaluation", tokens=77, val_bpb=1.5, val_loss=3.0))
    series = read(Series(path))
    assert column(series, "tokens", "judged") == [500.0] and column(series, "val_bpb", "judged") == [1.5]


def test_seconds_of_a_step_are_those_between_lines_of_one_session(path):
    with path.open("a") as file:
        file.write(line(7, elapsed_seconds=2.5) + line(8, elapsed_seconds=100.0, session=2))
    np.testing.assert_allclose(column(read(Series(path)), STEP_SECONDS)[1:6], [0.1, 0.1, 0.1, 0.1, 1.0])
    assert np.isnan(column(read(Series(path)), STEP_SECONDS)[6])


def test_what_is_told_of_step_times_is_what_all_lines_together_say(path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 5000)
    draw, elapsed, records = np.random.default_rng(0), 0.0, []
    for step in range(1, 2001):
        elapsed += float(draw.lognormal(-3, 0.2)) + (5.0 if step in (700, 1500) else 0.0)
        records.append({"kind": "train", "session": 1, "step": step, "elapsed_seconds": elapsed})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    found, exact = read(Series(path)).timing(), step_times(records)
    for name, seconds in exact.percentiles.items():
        assert found.percentiles[name] == pytest.approx(seconds, rel=0.011)
    assert [stall.step for stall in found.stalls] == [stall.step for stall in exact.stalls][:64]
    assert found.stalls[0].seconds == pytest.approx(exact.stalls[0].seconds, rel=0.01)


def test_what_was_kept_is_as_if_the_file_had_been_read(path, tmp_path):
    kept = tmp_path / "cache" / "kept.npz"
    read(Series(path)).keep(kept)
    with path.open("a") as file:
        file.write(line(7, elapsed_seconds=2.5) + "damaged\n" + line(8))
    again, fresh = Series(path), read(Series(path))
    assert again.recall(kept) and again.lines == 5
    read(again)
    np.testing.assert_array_equal(again.trained.pack(), fresh.trained.pack())
    assert (again.lines, again.damaged, again.timing()) == (fresh.lines, fresh.damaged, fresh.timing())


@pytest.mark.parametrize(
    "change", ["shorter", "another beginning", "edited in the middle", "replaced and grown", "no cache", "rubbish"]
)
def test_what_was_kept_of_another_file_is_not_believed(path, tmp_path, change):
    kept = tmp_path / "kept.npz"
    read(Series(path)).keep(kept)
    text = path.read_text()
    if change == "shorter":
        path.write_text(line(1))
    elif change == "another beginning":
        path.write_text(text.replace('"step": 1,', '"step": 9,') + line(6))
    elif change == "edited":
        path.write_text(text.replace('"step": 3,', '"step": 8,'))
        os.utime(path, (1, 1))
    elif change == "replaced and grown":
        path.write_text("".join(line(step, loss=2.25 if step > 3 else 1 / step) for step in range(1, 9)))
    elif change == "no cache":
        kept.unlink()
    else:
        kept.write_bytes(b"PK\x03\x04 rubbish")
    series = Series(path)
    assert not series.recall(kept)
    assert column(read(series), "step") == column(read(Series(path)), "step") and series.lines == len(
        path.read_text().splitlines()
    )


def test_lines_are_parsed_as_one_by_one():
    content = b'{"a": 1}\n{"b": [1, {"c": null}]}\n{"d": NaN}\n'
    records, damaged = parse_lines(content)
    assert [list(record) for record in records] == [["a"], ["b"], ["d"]] and damaged == 0
