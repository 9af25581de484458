"""`ingot train` as a user meets it: what it prints, what it leaves behind, and what it does when the machine lets it down."""

from __future__ import annotations

import json
import math
import socket
import subprocess
from pathlib import Path

import pytest
import yaml
from programs import NO_ROOM, POISONED, Ingot, checkpoints, losses, metrics, one_line, state, train_words

from ingot.runs.checkpoints import load_checkpoint


def test_json_is_all_that_is_printed_and_says_what_the_run_came_to(reference, shared):
    result = json.loads((shared / "reference.json").read_text())
    assert set(result) >= {"final_loss", "val_bpb", "total_tokens", "total_steps", "checkpoint_path", "run_dir", "status"}
    assert (result["status"], result["total_steps"], result["total_tokens"]) == ("completed", 40, 40 * 256)
    assert result["final_loss"] == losses(reference)[40]
    assert result["val_bpb"] == metrics(reference, "evaluation")[-1]["val_bpb"]
    assert Path(result["checkpoint_path"]) == checkpoints(reference)[40]
    assert Path(result["run_dir"]) == reference
    assert Path(result["artifact_path"]).stat().st_size == result["artifact_bytes"]


def test_the_run_folder_is_complete_and_every_file_in_it_parses(reference):
    names = {path.name for path in reference.iterdir()} - {".lock"}
    assert names == {
        "config.yaml", "environment.json", "metrics.jsonl", "log.txt", "samples", "checkpoints", "artifact", "state.json",
        "result.json",
    }  # fmt: skip
    config = yaml.safe_load((reference / "config.yaml").read_text())
    assert config["training"]["max_steps"] == 40 and config["model"]["width"] == 96
    environment = json.loads((reference / "environment.json").read_text())
    assert set(environment) >= {"host", "python", "packages", "argv", "started_at", "git_commit"} and environment["earlier"] == []
    assert state(reference)["status"] == "completed" and state(reference)["step"] == 40
    assert len(losses(reference)) == 40 and all(math.isfinite(loss) for loss in losses(reference).values())
    assert "step 40/40" in (reference / "log.txt").read_text()
    assert list(checkpoints(reference)) == list(range(4, 41, 4))
    for path in checkpoints(reference).values():
        load_checkpoint(path)


def test_its_files_are_read_by_the_safetensors_library(reference):
    safetensors = pytest.importorskip("safetensors.numpy")
    exported = safetensors.load_file(reference / "artifact" / "model.safetensors")
    saved = safetensors.load_file(checkpoints(reference)[40] / "model.safetensors")
    assert exported.keys() == saved.keys()
    assert all((exported[name] == saved[name]).all() for name in saved)


def test_results_go_to_stdout_logs_to_stderr_and_every_start_without_a_folder_is_a_run_of_its_own(ingot: Ingot, data, tmp_path):
    words = [word for word in train_words(data, Path(), training__max_steps=1) if "output_dir" not in word]
    for _ in range(2):
        program = ingot(*words, folder=tmp_path)
        assert "val_bpb" in program.stdout and "step 1/1" not in program.stdout
        assert "step 1/1" in program.stderr and "run folder" not in program.stderr
    folders = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert len(folders) == 2 and all(name.startswith("demo-2") for name in folders)


def test_a_score_of_an_earlier_step_is_told_as_such(ingot: Ingot, data, tmp_path):
    words = train_words(data, tmp_path / "run", training__max_steps=5, evaluation__every=2, evaluation__at_end=False)
    told = ingot(*words).stdout
    assert len([line for line in told.splitlines() if line.startswith(("val loss", "val_bpb ")) and "at step 4" in line]) == 2


def test_samples_are_kept_and_the_last_one_is_printed(ingot: Ingot, data, tmp_path):
    settings = {"training__max_steps": 2, "evaluation__sample_tokens": 30, "evaluation__sample_prompt": "abc"}
    program = ingot(*train_words(data, tmp_path / "run", **settings), "--json")
    text = (tmp_path / "run" / "samples" / "step-00000002.txt").read_bytes().decode()
    assert json.loads(program.stdout)["sample"] == text
    assert text.startswith("abc") and len(text) > 3


def test_a_second_process_on_a_running_folder_is_refused_and_a_killed_one_does_not_block(ingot: Ingot, data, tmp_path):
    run = tmp_path / "run"
    slow = {"training__tokens_per_step": 65536, "training__micro_batch": 8}  # seconds for a step
    first = ingot.start(*train_words(data, run, **slow))
    first.said("run ")
    started = state(run)["started_at"][:16].replace("T", " ")
    line = one_line(ingot(*train_words(data, run, **slow), code=1))
    assert f"process {first.process.pid} on {socket.gethostname()} since {started}" in line
    assert first.process.poll() is None and state(run)["status"] == "running"
    first.kill()
    third = ingot(*train_words(data, run, training__max_steps=1))
    assert f"taking over from process {first.process.pid}" in third.stderr
    assert state(run)["status"] == "completed"


def test_a_loss_that_is_not_finite_stops_with_one_line_and_leaves_sound_checkpoints(ingot: Ingot, data, tmp_path):
    run = tmp_path / "run"
    (tmp_path / "poisoned.py").write_text(POISONED)
    program = ingot(*train_words(data, run, model__file=tmp_path / "poisoned.py", training__save_every=1), code=1)
    errors = [line for line in program.stderr.splitlines() if "error" in line.lower()]
    assert len(errors) == 1 and "the loss is not finite at step 6" in errors[0] and program.stderr.endswith(errors[0] + "\n")
    assert state(run)["status"] == "failed" and "not finite" in state(run)["error"]
    assert list(checkpoints(run)) == [4, 5] and list(losses(run)) == [1, 2, 3, 4, 5]
    assert ingot("generate", run, "--tokens", "3", "--prompt", "abc").stdout.startswith("abc")


def test_saves_that_do_not_fit_are_reported_and_fail_the_run_at_its_end(ingot: Ingot, data, reference, until):
    run = until(reference, 8)
    before = {path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()}
    program = ingot(*train_words(data, run), code=4, largest_file=NO_ROOM)
    said = program.stderr.splitlines()
    assert [line for line in said if "cannot save step 12" in line and "training continues" in line]
    assert said[-1].startswith("ingot: error: cannot save step 40") and "make room" in said[-1]
    assert "Traceback" not in program.stderr
    assert losses(run) == losses(reference)
    assert {path: path.read_bytes() for path in (run / "checkpoints").rglob("*") if path.is_file()} == before
    assert state(run)["status"] == "failed"


# Trains inside a disk of its own that is too small for one more checkpoint, and copies the folder out afterwards.
FULL = """
set -e
mount -t tmpfs -o size=$1 none "$2"
cp -r "$3" "$2/run"
code=0
shift 3
"$@" || code=$?
cp -r "$0/run" "$0.after"
exit $code
"""


def test_a_disk_that_is_full_costs_no_step_and_no_checkpoint(ingot: Ingot, data, reference, until, tmp_path):
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a disk of his own")
    run, disk = until(reference, 8), tmp_path / "disk"
    disk.mkdir()
    held = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    command = ["unshare", "-rm", "sh", "-c", FULL, str(disk), str(held + 500_000), str(disk), str(run)]
    words = train_words(data, disk / "run", training__save_every=1)
    program = ingot(*command[1:], *ingot.python, *words, code=4, command=command[:1])
    after = tmp_path / "disk.after"
    assert "training continues" in program.stderr and "Traceback" not in program.stderr
    assert "step 40/40" in program.stderr
    assert list(losses(after)) == list(range(1, 41))
    assert list(checkpoints(after)) == [4, 8]
    for path in checkpoints(after).values():
        load_checkpoint(path)
