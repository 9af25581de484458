from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from ingot.errors import RunError
from ingot.runs import state
from ingot.runs.state import Heartbeat, State, read_state, utc_now
from ingot.runtime.files import to_json, write_atomically


def test_the_heartbeat_goes_on_without_the_run_doing_anything(tmp_path: Path, eventually) -> None:
    with Heartbeat(tmp_path, 0.02):
        first = read_state(tmp_path)
        assert first is not None and (first.status, first.host, first.pid) == ("running", socket.gethostname(), os.getpid())
        eventually(lambda: read_state(tmp_path).updated_at > first.updated_at)
    assert read_state(tmp_path).started_at == first.started_at


def test_the_next_heartbeat_tells_the_latest_values(tmp_path: Path, eventually) -> None:
    with Heartbeat(tmp_path, 0.02, max_steps=40) as heartbeat:
        heartbeat.update(step=7, loss=2.5, tokens=1000)
        eventually(lambda: read_state(tmp_path).step == 7)
        state = read_state(tmp_path)
    assert (state.loss, state.tokens, state.max_steps) == (2.5, 1000, 40)


def test_a_change_of_status_is_written_at_once_and_stays(tmp_path: Path) -> None:
    with Heartbeat(tmp_path, 1000) as heartbeat:
        heartbeat.update(status="completed", step=40, checkpoint="step-00000040")
        state = read_state(tmp_path)
        assert (state.status, state.step, state.checkpoint) == ("completed", 40, "step-00000040")
    assert read_state(tmp_path).status == "completed"


def test_a_loss_that_is_not_finite_keeps_the_file_valid(tmp_path: Path) -> None:
    with Heartbeat(tmp_path, 1000) as heartbeat:
        heartbeat.update(status="failed", loss=float("nan"), error="the loss is nan at step 3")
    record = json.loads((tmp_path / "state.json").read_text(), parse_constant=pytest.fail)
    assert record["loss"] is None and record["error"] == "the loss is nan at step 3"


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [(ValueError("no such thing"), "failed", "no such thing"), (KeyboardInterrupt(), "stopped", "interrupted")],
)
def test_an_error_on_the_way_out_is_recorded(tmp_path: Path, error: BaseException, status: str, told: str) -> None:
    with pytest.raises(type(error)), Heartbeat(tmp_path, 1000):
        raise error
    state = read_state(tmp_path)
    assert (state.status, state.error) == (status, told)


def test_a_vanished_folder_is_reported_once_and_the_heartbeat_comes_back_with_it(tmp_path: Path, eventually) -> None:
    folder, warnings = tmp_path / "run", []
    folder.mkdir()

    def warn(line: str) -> None:
        warnings.append(line)
        raise RuntimeError("a warning that fails does not stop the heartbeat")

    with Heartbeat(folder, 0.01, warn):
        folder.rename(tmp_path / "moved away")
        eventually(lambda: bool(warnings))
        time.sleep(0.2)  # many heartbeats without a folder
        folder.mkdir()
        eventually(lambda: (folder / "state.json").exists())
    assert len(warnings) == 1 and "state.json" in warnings[0]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "7", "{}", '{"status": "running"}', '{"status": "dancing", "updated_at": "2026-01-01T00:00:00+00:00"}'],
)
def test_a_damaged_state_is_no_state(tmp_path: Path, content: str) -> None:
    (tmp_path / "state.json").write_text(content)
    assert read_state(tmp_path) is None


@pytest.mark.parametrize(
    ("field", "value"), [("updated_at", "yesterday"), ("heartbeat_seconds", "often"), ("heartbeat_seconds", 0)]
)
def test_a_state_with_a_senseless_clock_is_no_state(tmp_path: Path, field: str, value: object) -> None:
    with Heartbeat(tmp_path, 1000):
        pass
    path = tmp_path / "state.json"
    assert read_state(tmp_path) is not None
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    assert read_state(tmp_path) is None


@pytest.mark.parametrize("pid", [0, -1])
def test_a_state_that_names_many_processes_is_no_state(tmp_path: Path, pid: int) -> None:
    """`ingot stop --force` would send them all its signal."""
    with Heartbeat(tmp_path, 1000):
        pass
    path = tmp_path / "state.json"
    assert read_state(tmp_path) is not None
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": pid}))
    assert read_state(tmp_path) is None


def test_fields_that_a_later_version_may_add_are_passed_over(tmp_path: Path) -> None:
    with Heartbeat(tmp_path, 1000):
        pass
    path = tmp_path / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "mood": "fine"}))
    assert read_state(tmp_path) is not None


@pytest.mark.parametrize("value", ["x", [], {}, [[]]])
@pytest.mark.parametrize("name", [field.name for field in fields(State)])
def test_a_state_with_values_of_other_kinds_is_none(tmp_path, name, value):
    state = State("running", "host", 1, "boot", utc_now(), utc_now())
    if isinstance(value, str) and isinstance(getattr(state, name) or "", str):
        return  # which it may be
    (tmp_path / "state.json").write_text(json.dumps({**asdict(state), name: value}))
    assert read_state(tmp_path) is None


def test_no_value_is_lost_where_two_threads_tell_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop tells a step between what the saver's thread reads and what it writes."""
    heartbeat, plain = Heartbeat(tmp_path, 1000), state.replace
    loop = threading.Thread(target=lambda: heartbeat.update(step=7))

    def interrupted(*given: object, **known: object) -> object:
        changed = plain(*given, **known)
        if "checkpoint" in known:
            loop.start()
            loop.join(timeout=0.2)  # it waits, or it is through
        return changed

    monkeypatch.setattr(state, "replace", interrupted)
    heartbeat.update(checkpoint="step-00000007")
    loop.join()
    assert (heartbeat.state.step, heartbeat.state.checkpoint) == (7, "step-00000007")


def test_of_two_processes_that_both_got_a_folder_the_one_whose_state_was_replaced_ends_and_writes_no_more(
    tmp_path: Path, eventually
) -> None:
    def refused(heartbeat: Heartbeat) -> bool:
        with suppress(RunError):
            heartbeat.check()
            return False
        return True

    told = r"also in use by process 7 on there, .*choose another training\.output_dir"
    with pytest.raises(RunError, match=told), Heartbeat(tmp_path, 0.02) as heartbeat:
        heartbeat.check()
        other = replace(read_state(tmp_path), host="there", pid=7, boot_id="another kernel")

        def beat() -> bool:
            write_atomically(tmp_path / state.STATE, to_json(asdict(replace(other, updated_at=utc_now()))))
            return refused(heartbeat)

        eventually(beat)
        heartbeat.check()
    assert read_state(tmp_path).pid == 7  # the end of this one is not told as the other's


@pytest.mark.parametrize("of_another", [{"host": "there", "boot_id": "another kernel"}, {}])
def test_a_state_that_was_copied_into_the_folder_is_no_other_process(tmp_path: Path, eventually, of_another) -> None:
    with Heartbeat(tmp_path, 0.02) as heartbeat:
        copied = replace(read_state(tmp_path), pid=7, **of_another)
        write_atomically(tmp_path / state.STATE, to_json(asdict(copied)))
        eventually(lambda: read_state(tmp_path).pid == os.getpid())
        heartbeat.check()


def test_a_state_that_a_dead_process_left_is_replaced_also_where_the_first_write_fails(
    tmp_path: Path, monkeypatch, eventually
) -> None:
    now = utc_now()
    dead = State("running", "there", 7, "another kernel", started_at=now, updated_at=now)
    write_atomically(tmp_path / state.STATE, to_json(asdict(dead)))
    with monkeypatch.context() as full:
        full.setattr(state, "write_atomically", failing_write)
        heartbeat = Heartbeat(tmp_path, 0.02).__enter__()
    eventually(lambda: read_state(tmp_path).pid == os.getpid())
    heartbeat.check()
    heartbeat.__exit__(None, None, None)


def failing_write(*given: object, **named: object) -> None:
    raise OSError(28, "No space left on device")
