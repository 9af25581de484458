from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.errors import CheckpointError
from ingot.runs.metrics import Metrics
from ingot.runs.series import parse_lines

APPEND_UNTIL_FULL = """
import resource, sys
from pathlib import Path
from ingot.runs.metrics import Metrics
metrics = Metrics(Path(sys.argv[1]))
for step in range(20):
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 if step < 15 else resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    metrics.append_record({"step": step})
    print(Path(sys.argv[1]).read_bytes().count(10))
"""


def steps(metrics: Metrics) -> list[int]:
    return [record["step"] for record in records(metrics)]


def records(metrics: Metrics) -> list[dict[str, object]]:
    content = metrics.path.read_bytes() if metrics.path.exists() else b""
    return parse_lines(content[: content.rfind(b"\n") + 1])[0]


def with_steps(path: Path, count: int) -> Metrics:
    metrics = Metrics(path)
    for step in range(1, count + 1):
        metrics.append_record({"step": step, "loss": 1 / step})
    return metrics


def test_what_is_appended_is_read_back_line_by_line(tmp_path: Path) -> None:
    metrics = with_steps(tmp_path / "metrics.jsonl", 2)
    assert metrics.path.read_text() == '{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 0.5}\n'
    assert records(metrics) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]


def test_a_number_that_is_not_finite_is_written_as_null(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.append_record({"step": 1, "loss": float("nan"), "norms": [float("inf"), 1.0]})
    assert metrics.path.read_text() == '{"step": 1, "loss": null, "norms": [null, 1.0]}\n'


def test_a_run_that_was_never_recorded_has_no_records(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    assert metrics.truncate_after(0) == 0
    assert records(metrics) == []


def test_a_resumed_run_records_every_step_once(tmp_path: Path) -> None:
    metrics = with_steps(tmp_path / "metrics.jsonl", 35)
    assert metrics.truncate_after(30) == 5
    for step in range(31, 41):
        metrics.append_record({"step": step})
    assert steps(metrics) == list(range(1, 41))


def test_records_without_a_step_stay(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.append_record({"event": "start"})
    metrics.append_record({"step": 3})
    metrics.truncate_after(2)
    assert records(metrics) == [{"event": "start"}]


@settings(deadline=None, max_examples=50)
@given(cut=st.integers(min_value=0))
def test_a_line_torn_anywhere_is_no_record_and_is_repaired(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    metrics = with_steps(tmp_path_factory.mktemp("run") / "metrics.jsonl", 3)
    whole = metrics.path.read_bytes()
    torn = whole[: cut % (len(whole) + 1)]
    metrics.path.write_bytes(torn)
    expected = [json.loads(line) for line in torn.splitlines() if line.endswith(b"}")]
    whole_lines = torn.count(b"\n")  # a last one without its end may still be written
    assert records(metrics) == expected[:whole_lines]
    metrics.truncate_after(3)
    metrics.append_record({"step": 4})
    assert records(metrics) == [*expected, {"step": 4}]


def test_a_sound_file_is_not_rewritten(tmp_path: Path) -> None:
    metrics = with_steps(tmp_path / "metrics.jsonl", 3)
    before = metrics.path.stat()
    metrics.truncate_after(3)
    assert metrics.path.stat().st_ino == before.st_ino


def test_a_damaged_line_in_the_middle_is_left_out(tmp_path: Path) -> None:
    metrics = with_steps(tmp_path / "metrics.jsonl", 1)
    metrics.path.write_bytes(metrics.path.read_bytes() + b"\x00\x00\n" + b'{"step": 2}\n')
    assert steps(metrics) == [1, 2]


def test_a_disk_that_fills_up_has_whole_lines_and_gets_the_rest_when_there_is_room(tmp_path: Path, python) -> None:
    path = tmp_path / "metrics.jsonl"
    output, errors = python(APPEND_UNTIL_FULL, path).communicate(timeout=300)
    whole = [min(step + 1, 8) for step in range(15)]
    assert [int(line) for line in output.split()] == [*whole, *range(16, 21)], errors
    assert path.read_bytes().endswith(b"}\n")
    assert steps(Metrics(path)) == list(range(20))


def test_a_line_that_is_refused_for_another_reason_is_told_and_not_written_later(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="symbolic link"):
        metrics.append_record({"step": 1})
    metrics.path.unlink()
    metrics.append_record({"step": 2})
    assert steps(metrics) == [2]
