"""Looking into a run folder: what is there, without a lock, whatever the run does meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ingot.config.loading import load_config
from ingot.config.render import dump_yaml
from ingot.errors import CheckpointError, RunError
from ingot.runs.folder import RunFolder
from ingot.runs.state import State, TrainingResult, read_training_result, this_process
from ingot.runs.view import Run, find_runs
from ingot.runtime.files import to_json, write_atomically

# A run that is killed and resumed over and over: it goes on from a step that was, like every other time, in the middle.
WRITER = """
import random, sys
from pathlib import Path
from ingot.runs.folder import RunFolder
draw, folder, step = random.Random(0), RunFolder(Path(sys.argv[1])), 0
for session in range(1, 201):
    folder.session = session
    step = draw.randint(0, step)
    folder.metrics.truncate_after(step)
    for step in range(step + 1, step + draw.randint(2, 40)):
        folder.record("train", {"step": step, "padding": "x" * draw.randint(0, 5000)})
    with folder.metrics.path.open("ab") as file:
        file.write(b'{"kind": "train", "step": 1000000')  # what a kill in the middle of a line leaves
print("over", flush=True)
"""
HOLD = """
import sys
from pathlib import Path
from ingot.runs.state import Heartbeat
with Heartbeat(Path(sys.argv[1]), 1000):
    print("beats", flush=True)
    sys.stdin.read()
"""
LOOK = """
import sys
sys.modules["torch"] = None
from ingot.runs.view import Run
run = Run.open(sys.argv[1])
print(run.config.training.max_steps, run.status().status, run.series.read().lines, run.samples(), run.checkpoints(), run.result())
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path)
    run.claim().release()
    settings = {"data.path": "sample:shakespeare", "training.max_steps": 7}
    run.write_config(dump_yaml(load_config(python=settings, environment={}).config, {}))
    return run


def write_state(folder: RunFolder, age_seconds: float = 0.0, **changes: Any) -> None:
    host, pid, boot_id = this_process()
    beat = (datetime.now(UTC) - timedelta(seconds=age_seconds)).isoformat()
    state = replace(State("running", host, pid, boot_id, beat, beat, 5.0), **changes)
    write_atomically(folder.path / "state.json", to_json(asdict(state)), durable=False)


def status(folder: RunFolder) -> str:
    return Run.open(folder.path).status().status


def result(folder: RunFolder, **changes: Any) -> TrainingResult:
    known = TrainingResult(
        "completed", 1.5, 1.4, float("nan"), {}, 4, 4, 100, 7, 2.0, 50.0, folder.checkpoints / "step-00000007",
        Path("elsewhere.ptz"), 10, 1.3, None, None, folder.path,
    )  # fmt: skip
    return replace(known, **changes)


def test_a_run_shows_its_settings_samples_checkpoints_and_result(folder: RunFolder) -> None:
    folder.sample(3, "three")
    folder.sample(12, "twelve")
    (folder.checkpoints / "step-00000007").mkdir()
    (folder.checkpoints / "step-00000009.partial").mkdir()
    run = Run.open(folder.path)
    assert run.config.training.max_steps == 7 and run.result() is None
    assert {step: path.read_text() for step, path in run.samples().items()} == {3: "three", 12: "twelve"}
    assert run.checkpoints() == {7: folder.checkpoints / "step-00000007"}
    folder.session = 2
    folder.write_result(result(folder), {"ranks": 1})
    told = run.result()
    assert told is not None and (told["session"], told["status"], told["total_steps"]) == (2, "completed", 7)
    assert told["checkpoint_path"] == "checkpoints/step-00000007" and told["artifact_path"] == "elsewhere.ptz"
    assert told["export"] == {"ranks": 1} and told["val_bpb"] is None and datetime.fromisoformat(told["ended_at"])
    folder.remove(folder.result_path)
    assert run.result() is None


def test_what_is_not_a_run_folder_is_one_line(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match="is not a run folder"):
            Run.open(path)


def test_a_process_that_does_not_hold_the_lock_of_a_run_gets_no_signal_whatever_state_json_says(folder: RunFolder) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander:
        write_state(folder, pid=bystander.pid)
        with pytest.raises(RunError, match="does not hold the lock"):
            Run.open(folder.path).signal(signal.SIGTERM)
        assert bystander.poll() is None
        bystander.communicate(b"\n")


def test_a_run_that_has_not_begun_has_no_status_yet(folder: RunFolder) -> None:
    with pytest.raises(CheckpointError, match=r"no readable state\.json"):
        Run.open(folder.path).status()


def test_looking_needs_no_torch_takes_no_lock_and_writes_nothing(folder: RunFolder) -> None:
    write_state(folder, status="stopped")
    with folder.claim():
        before = sorted(folder.path.rglob("*"))
        ran = subprocess.run([sys.executable, "-c", LOOK, str(folder.path)], capture_output=True, text=True)
    assert ran.stdout == "7 stopped 0 {} {} None\n", ran.stderr
    assert sorted(folder.path.rglob("*")) == before


def test_running_is_believed_only_of_a_process_that_is_there(folder: RunFolder, python) -> None:
    holder = python(HOLD, folder.path)
    assert holder.stdout.readline() == "beats\n"
    assert status(folder) == "running"
    holder.kill()
    holder.wait()
    assert status(folder) == "crashed"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux tells of a process that nobody has waited for")
def test_a_process_that_is_over_is_not_there_though_its_parent_has_not_waited_for_it(folder: RunFolder, python) -> None:
    holder = python(HOLD, folder.path)
    assert holder.stdout.readline() == "beats\n"
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    assert status(folder) == "crashed"


@pytest.mark.parametrize("said", ["stopped", "completed", "failed"])
def test_a_run_that_ended_says_how_whoever_wrote_it(folder: RunFolder, said: str) -> None:
    write_state(folder, status=said, pid=2**22 + 1, boot_id="another")
    assert status(folder) == said


@pytest.mark.parametrize("where", [{"host": "farm-7"}, {"boot_id": "another"}], ids=["host", "boot"])
def test_a_process_of_another_system_is_judged_by_its_heartbeat_and_not_by_its_number(folder: RunFolder, where) -> None:
    write_state(folder, age_seconds=60, pid=2**22 + 1, **where)
    assert status(folder) == "running"
    write_state(folder, age_seconds=1000, pid=os.getpid(), **where)
    found = Run.open(folder.path).status()
    assert found.status == "crashed" and found.age_seconds == pytest.approx(1000, abs=60)


def test_a_process_here_that_is_older_than_its_heartbeat_is_believed_however_old_that_is(folder: RunFolder, monkeypatch) -> None:
    write_state(folder, age_seconds=1000)
    monkeypatch.setattr("ingot.runtime.processes.process_age", lambda pid: 500.0)
    assert status(folder) == "crashed"  # a process that is younger than the last heartbeat only has the number
    monkeypatch.setattr("ingot.runtime.processes.process_age", lambda pid: 2000.0)
    assert status(folder) == "running"


def test_metrics_say_when_they_were_written_and_in_which_session(folder: RunFolder) -> None:
    for session in (1, 2):
        folder.write_environment({})
        folder.record("train", {"step": session})
    found = [json.loads(line) for line in folder.metrics.path.read_bytes().splitlines()]
    assert [(one["kind"], one["session"], one["step"]) for one in found] == [("train", 1, 1), ("train", 2, 2)]
    assert all(abs((datetime.now(UTC) - datetime.fromisoformat(one["time"])).total_seconds()) < 60 for one in found)


def test_a_reader_beside_a_run_that_is_killed_and_resumed_always_sees_whole_lines_and_each_step_once(
    folder: RunFolder, python
) -> None:
    series = Run.open(folder.path).series
    writer = python(WRITER, folder.path)
    while True:
        over = writer.poll() is not None
        steps = [int(step) for step, _ in series.read().bins["train"].points("step", "step")]
        assert steps == list(range(1, len(steps) + 1)) and series.damaged == 0
        if over:
            break
    assert writer.returncode == 0, writer.stderr.read()
    lines = folder.metrics.path.read_bytes().splitlines()
    assert len(steps) == len(lines) - 1 and series.generation > 20


def test_a_run_that_cannot_be_read_is_listed_as_such_among_the_others(tmp_path: Path) -> None:
    for name in ("good", "damaged"):
        (tmp_path / name).mkdir()
        write_state(RunFolder(tmp_path / name), status="completed")
    (tmp_path / "damaged" / "state.json").write_text("{")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    records = [Run(path).record() for path in sorted(find_runs([tmp_path]).values())]
    assert [record["status"] for record in records] == ["unreadable", "completed"]
    assert "state.json" in records[0]["error"] and records[0].keys() == records[1].keys()


@pytest.mark.parametrize("value", [[], [[]]])
@pytest.mark.parametrize("name", [field.name for field in fields(TrainingResult) if field.name != "run_dir"])
def test_a_result_with_values_of_other_kinds_is_none(tmp_path, name, value):
    known = {field.name: None if "None" in str(field.type) else 0 for field in fields(TrainingResult)}
    known |= {"status": "completed", "val_other": {}}
    del known["run_dir"]
    (tmp_path / "result.json").write_text(json.dumps(known))
    assert read_training_result(tmp_path) is not None
    (tmp_path / "result.json").write_text(json.dumps({**known, name: value}))
    assert read_training_result(tmp_path) is None
