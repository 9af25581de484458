from __future__ import annotations

import json
import re
import subprocess
from datetime import datetime
from pathlib import Path

import pytest

from ingot.errors import CheckpointError, RunError
from ingot.runs.folder import RunFolder, new_run_dir
from ingot.runs.state import Heartbeat
from ingot.runtime.machine import made_by

NOON = datetime(2026, 11, 15, 12, 0, 5)
MAKE_MANY = """
import sys
from datetime import datetime
from pathlib import Path
from ingot.runs.folder import new_run_dir
sys.stdin.readline()
for _ in range(30):
    print(new_run_dir("demo", Path(sys.argv[1]), datetime(2026, 11, 15)).name)
"""


def test_a_run_is_named_for_its_recipe_and_time(tmp_path: Path) -> None:
    assert new_run_dir("golf/seq4096", tmp_path / "runs", NOON) == tmp_path / "runs" / "golf-seq4096-20261115-120005"
    assert new_run_dir(None, tmp_path / "runs", NOON).name == "run-20261115-120005"
    assert re.fullmatch(r"demo-\d{8}-\d{6}", new_run_dir("demo", tmp_path).name)


def test_two_runs_of_one_second_get_two_folders(tmp_path: Path) -> None:
    names = [new_run_dir("demo", tmp_path, NOON).name for _ in range(3)]
    assert names == ["demo-20261115-120005", "demo-20261115-120005-2", "demo-20261115-120005-3"]


def test_processes_that_start_together_never_share_a_folder(tmp_path: Path, python) -> None:
    processes = [python(MAKE_MANY, tmp_path) for _ in range(2)]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    names = [name for process in processes for name in process.communicate(timeout=300)[0].split()]
    assert len(names) == len(set(names)) == 60


def test_a_root_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(CheckpointError, match="choose another training"):
        new_run_dir("demo", tmp_path / "runs")


def test_claiming_makes_the_folder_and_keeps_others_out(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "x")
    with run.claim():
        assert run.samples.is_dir() and run.checkpoints.is_dir() and run.artifact.is_dir()
        with pytest.raises(RunError, match="in use"):
            run.claim()
    run.claim().release()


def test_claiming_removes_what_a_killed_process_left_half_written(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.claim().release()
    run.write_config("layers: 2\n")
    leftovers = [tmp_path / ".config.yaml.0a1b2c3d.tmp", run.samples / ".step-00000001.txt.0a1b2c3d.tmp"]
    for leftover in leftovers:
        leftover.write_text("half")
    run.claim().release()
    assert not any(leftover.exists() for leftover in leftovers)
    assert run.config_path.read_text() == "layers: 2\n"


def test_taking_over_from_a_dead_process_is_told(tmp_path: Path) -> None:
    run, told = RunFolder(tmp_path), []
    with Heartbeat(tmp_path, 1000):  # ends without a last word, as a killed process does
        pass
    run.claim(told.append).release()
    assert len(told) == 1 and told[0].startswith("taking over from process")


def test_the_refused_leave_the_files_of_the_owner_alone(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with run.claim():
        busy = tmp_path / ".state.json.0a1b2c3d.tmp"
        busy.write_text("being written")
        with pytest.raises(RunError):
            RunFolder(tmp_path).claim()
        assert busy.exists()


def test_the_environment_says_what_ran_and_not_who(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunFolder(tmp_path)
    run.write_environment({"torch": "2.13.0"}, ["/home/somebody/.venv/bin/ingot", "train", "--recipe", "demo"])
    record = json.loads(run.environment_path.read_text())
    assert record["packages"] == {"torch": "2.13.0"}
    assert record["argv"] == ["ingot", "train", "--recipe", "demo"]
    assert record["git_commit"] is None and record["earlier"] == []
    assert {"python", "platform", "host", "started_at"} <= record.keys() and record["made_by"] == made_by()
    assert "somebody" not in run.environment_path.read_text()


def test_a_resume_keeps_the_environments_before_it(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for version in ("2.11", "2.12", "2.13"):
        run.write_environment({"torch": version}, ["ingot"])
    record = json.loads(run.environment_path.read_text())
    assert record["packages"]["torch"] == "2.13"
    assert [earlier["packages"]["torch"] for earlier in record["earlier"]] == ["2.12", "2.11"]


def test_the_commit_of_the_working_folder_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    run = RunFolder(tmp_path)
    run.write_environment({}, ["ingot"])
    assert re.fullmatch(r"[0-9a-f]{40,64}", json.loads(run.environment_path.read_text())["git_commit"])


def test_the_log_grows_line_by_line_with_the_time(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.log("step 1")
    run.log("na\u00efve \ud800")
    lines = run.log_path.read_text().splitlines()
    assert [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", line) for line in lines] == ["step 1", "na\u00efve \\ud800"]


def test_a_sample_is_kept_under_its_step_exactly_as_written(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with run.claim():
        path = run.sample(40, "To be,\r\nor not\n")
    assert path == tmp_path / "samples" / "step-00000040.txt"
    assert path.read_bytes() == b"To be,\r\nor not\n"


@pytest.mark.parametrize("name", ["log.txt", "metrics.jsonl"])
def test_nothing_is_appended_through_a_link(tmp_path: Path, name: str) -> None:
    run, target = RunFolder(tmp_path / "run"), tmp_path / "diary"
    run.path.mkdir()
    target.write_text("mine\n")
    (run.path / name).symlink_to(target)
    with pytest.raises(CheckpointError, match=f"run/{name} is a symbolic link.*another training.output_dir"):
        run.log("step 1") if name == "log.txt" else run.metrics.append_record({"step": 1})
    assert target.read_text() == "mine\n"


OWN = ["config.yaml", "environment.json", "metrics.jsonl", "log.txt", "state.json", ".lock"]


def listing(folder: Path) -> dict[str, str | None]:
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    return {name: path.read_text() if path.is_file() else None for name, path in paths.items()}


@pytest.mark.parametrize("name", [*OWN, "samples/mine", "checkpoints/mine", "artifact/mine", "model.py"])
def test_a_folder_with_files_that_no_run_wrote_is_refused_by_name_and_left_alone(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"mine": true}')
    (tmp_path / "notes.txt").write_text("beside")
    before = listing(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        RunFolder(tmp_path).claim(also=("model.py",))
    told = f"{tmp_path} already contains {name.split('/')[0]}, which Ingot did not create; choose another training.output_dir"
    assert str(caught.value) == told
    assert listing(tmp_path) == before


def test_files_beside_those_of_a_run_are_no_reason_to_refuse(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("beside")
    (tmp_path / "model.py").write_text("not written by a run of a model that is ours")
    RunFolder(tmp_path).claim().release()
    assert (tmp_path / "notes.txt").read_text() == "beside"


@pytest.mark.parametrize("mark", ["state.json", "environment.json", "checkpoints"])
def test_a_run_is_known_by_any_of_the_files_that_only_a_run_writes(tmp_path: Path, mark: str) -> None:
    run = RunFolder(tmp_path)
    run.claim().release()
    run.write_config("")
    run.log("a line")
    if mark == "state.json":
        with Heartbeat(tmp_path, 1000) as heartbeat:
            heartbeat.update(status="stopped")
    elif mark == "environment.json":
        run.write_environment({}, ["ingot"])
    else:
        (run.checkpoints / "step-00000004").mkdir()
        (run.checkpoints / "step-00000004" / "checkpoint.json").write_text("{}")
    (tmp_path / ".lock").unlink()
    run.claim().release()


def test_a_save_that_was_killed_before_there_was_a_run_is_no_strangers(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000004.partial").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000004.partial" / "model.safetensors").write_text("half")
    RunFolder(tmp_path).claim().release()


def test_a_folder_that_was_claimed_and_nothing_more_can_be_claimed_again(tmp_path: Path) -> None:
    for _ in range(2):
        RunFolder(tmp_path).claim().release()


def test_sweeping_a_run_leaves_hidden_files_of_other_programs(tmp_path: Path) -> None:
    (tmp_path / ".editor.tmp").write_text("mine")
    RunFolder(tmp_path).claim().release()
    assert (tmp_path / ".editor.tmp").read_text() == "mine"
