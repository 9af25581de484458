"""`gpt-simple train` that is stopped and goes on: by a signal, by the wall clock, on other ranks."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cli_program import Cli
from original import SITE, Original, write_config
from programs import AT_TORCH, Ingot, checkpoints, losses, plant, progress

from ingot.artifact.gpt_simple import read_model, saved_checkpoints
from ingot.compat.gpt_simple import training
from ingot.console.entry import STARTED_AT
from ingot.runs.state import Heartbeat
from ingot.train import stop as stopping

TRAIN = ("train", "--config", "config.yaml", "--training.device", "cpu")
MODULE = (sys.executable, "-m", "ingot.compat.gpt_simple")


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def stopped_after_a_save(folder: Path, ask: Callable[[], None] = terminate) -> Iterator[None]:
    """SIGTERM to this process, or another way to ask, once out/ has a checkpoint of step 4."""

    def stop() -> None:
        while not (folder / "out/checkpoints/checkpoint-4").exists():
            time.sleep(0.002)
        ask()

    thread = threading.Thread(target=stop)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("save_steps", [1, 4])  # with 1 a save and the stop are of one step
def test_sigterm_saves_a_shutdown_checkpoint_and_the_run_goes_on_as_its_last_line_says(
    save_steps: int, cli: Cli, gpts: Path
) -> None:
    with stopped_after_a_save(gpts):
        said = cli(*TRAIN, "--training.max_steps", 90, "--training.save_steps", save_steps)
    [(step, folder)] = re.findall(r"Stopped at step (\d+) \(signal:SIGTERM\)\. Resume with: --training\.resume (\S+)", said.err)
    assert folder == f"out/checkpoints/checkpoint-{step}-shutdown" and (gpts / folder / "trainer_state.json").is_file()
    assert "Training complete" not in said.err
    assert cli("status", "--output_dir", "out").out.startswith("Status:     STOPPED\n")
    again = cli(*TRAIN, "--training.max_steps", int(step) + 2, "--training.resume", folder)
    assert f"Resuming from step {step}  (checkpoint: {folder})" in again.err
    assert json.loads((gpts / "out/.run_state.json").read_text())["status"] == "completed"


def test_the_flag_file_of_gpt_simple_stops_a_run_and_is_removed_by_it(
    cli: Cli, gpts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "STOP_FILE_INTERVAL", 0.0)
    flag = gpts / "out/.shutdown_requested"
    with stopped_after_a_save(gpts, flag.touch):
        said = cli(*TRAIN, "--training.max_steps", 60)
    assert re.search(r"Stopped at step \d+ \(flag_file\)\. Resume with: \S+ \S+-shutdown", said.err) and not flag.exists()
    flag.touch()
    os.utime(flag, (0, 0))  # of a session that is long over
    assert "TRAINING COMPLETE!" in cli(*TRAIN, "--training.max_steps", 60).err and not flag.exists()


@pytest.mark.parametrize("name", ["stop", ".shutdown_requested"])
def test_status_shows_that_a_run_was_asked_to_stop_by_either_file(cli: Cli, our_copy: Path, name: str) -> None:
    with Heartbeat(our_copy / "out"):
        assert "Shutdown:" not in cli("status", "--output_dir", "out").out
        (our_copy / "out" / name).touch()
        assert "Shutdown:   requested\n" in cli("status", "--output_dir", "out").out


def test_a_session_ends_by_the_wall_clock_and_the_key_goes_before_the_variable(
    cli: Cli, gpts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPT_SIMPLE_MAX_RUNTIME", "0.5")
    monkeypatch.setenv(STARTED_AT, str(time.time() - 3600))
    said = cli(*TRAIN, "--training.max_steps", 90, "--training.walltime_reserve_seconds", 0, "--stop-exit-code", 75, code=75)
    assert re.search(r"Stopped at step \d+ \(walltime\)\. Resume with: ", said.err)
    long = ("--training.max_runtime_seconds", 10_000)
    assert "TRAINING COMPLETE!" in cli(*TRAIN, "--training.walltime_reserve_seconds", 0, *long).err
    assert "walltime_reserve_seconds=300 leaves no time for training" in cli("-q", *TRAIN, code=2).line


def test_an_exit_code_that_a_process_cannot_return_is_refused(cli: Cli, gpts: Path) -> None:
    assert "--stop-exit-code" in cli(*TRAIN, "--stop-exit-code", 300, code=2).err
    assert not (gpts / "out").exists()


def test_a_variable_that_is_not_a_time_is_told_and_ends_no_job(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPT_SIMPLE_MAX_RUNTIME", "abc")
    said = cli(*TRAIN, "--training.max_steps", 4).err
    assert said.count("GPT_SIMPLE_MAX_RUNTIME=abc ") == 1
    assert "TRAINING COMPLETE!" in said


def test_sessions_that_end_right_after_they_resumed_lose_and_repeat_nothing(
    cli: Cli, gpts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("-q", *TRAIN, "--training.max_steps", 60, "--training.save_steps", 4, "--training.logging_steps", 1)

    def too_late() -> int:
        """The step of a session whose time is up when it begins."""
        with monkeypatch.context() as late:
            late.setenv(STARTED_AT, str(time.time() - 3600))
            cli(*words, "--training.max_runtime_seconds", 3600, "--training.walltime_reserve_seconds", 0)
        return int(progress(gpts / "out")["step"])

    cli(*words, "--training.output_dir", "unbroken")
    assert [too_late(), too_late()] == [0, 0]
    with stopped_after_a_save(gpts):
        cli(*words)
    step = progress(gpts / "out")["step"]
    assert 4 <= step < 60 and [too_late(), too_late()] == [step, step]
    cli(*words)
    last = [checkpoints(gpts / run)[60] / "model.safetensors" for run in ("unbroken", "out")]
    assert last[0].read_bytes() == last[1].read_bytes()
    assert losses(gpts / "out") == losses(gpts / "unbroken")
    assert progress(gpts / "out")["sample"] == progress(gpts / "unbroken")["sample"]


def test_ranks_are_started_and_a_run_on_fewer_keeps_its_batch(cli: Cli, gpts: Path, ingot: Ingot) -> None:
    two = ("--nproc_per_node", 2, "--training.max_steps", 4)
    program = ingot("-q", *TRAIN, *two, command=MODULE, folder=gpts)
    assert program.stdout == "" and [line for line in program.stderr.splitlines() if "more than" not in line] == []
    said = cli(*TRAIN, "--training.max_steps", 6)
    assert "keeps the 512 tokens per step" in said.err
    assert "Resuming from step 4" in said.err
    refused = ingot("-q", *TRAIN, "--nproc_per_node", 2, "--data.path", "nowhere", command=MODULE, folder=gpts, code=3)
    assert len(refused.stderr.splitlines()) == 1 and "nowhere" in refused.stderr


def test_a_rank_that_was_killed_is_reported_under_the_name_of_the_program(ingot: Ingot, gpts: Path, tmp_path: Path) -> None:
    write_config(gpts / "config.yaml")
    plant(ingot, tmp_path, "import os, signal\nif os.environ.get('RANK') == '1':\n    os.kill(os.getpid(), signal.SIGKILL)")
    program = ingot("-q", *TRAIN, "--nproc_per_node", 2, "--training.max_steps", 4, command=MODULE, folder=gpts, code=1)
    assert re.search(r"^gpt-simple: error: rank process \d+ .*SIGKILL$", program.stderr, re.M)


@pytest.mark.parametrize(("rank", "code"), [("0", 75), ("1", 0)])
def test_the_code_of_a_stop_is_the_first_ranks_alone(monkeypatch: pytest.MonkeyPatch, rank: str, code: int) -> None:
    """A launcher takes it for a failure of any other rank, and kills the first one while that still writes."""
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(training, "read_options", lambda *given: None)
    monkeypatch.setattr(training, "run_training", lambda *given: ("stopped", None))
    options = Namespace(nproc_per_node=2, nnodes=1, force=False, stop_exit_code=75, verbose=False, quiet=False)
    assert training.train(options, {}, []) == code


def test_a_signal_during_the_imports_is_a_stop(cli: Cli, ingot: Ingot, gpts: Path, tmp_path: Path) -> None:
    plant(ingot, tmp_path, AT_TORCH)
    program = ingot("-q", *TRAIN, "--stop-exit-code", 75, command=MODULE, folder=gpts, code=75)
    assert program.stderr == "gpt-simple: stopped by SIGTERM before training began\n" and not (gpts / "out").exists()


def test_stop_and_status_of_what_is_not_running(cli: Cli) -> None:
    assert "there is no run in nowhere" in cli("status", "--output_dir", "nowhere", code=1).line
    assert "there is no run in nowhere" in cli("stop", "--output_dir", "nowhere", code=1).line
    cli("-q", *TRAIN, "--training.max_steps", 4)
    said = cli("status", "--output_dir", "out")
    assert re.search(r"^Progress: +4 / 4 steps \(100\.0%\)$", said.out, re.M)
    assert "out is not running: its status is completed" in cli("stop", "--output_dir", "out").err
    assert json.loads(cli("status", "--output_dir", "out", "--json").out)["step"] == 4


def test_status_of_a_run_that_only_the_original_has_trained_is_what_that_said(cli: Cli, gpts: Path) -> None:
    (gpts / "theirs").mkdir()
    told = {"status": "stopped", "global_step": 12, "max_steps": 40, "loss": 3.25, "latest_checkpoint": "x"}
    (gpts / "theirs/.run_state.json").write_text(json.dumps(told))
    said = cli("status", "--output_dir", "theirs").out
    assert "STOPPED" in said and re.search(r"^Progress: +12 / 40 steps \(30.0%\)$", said, re.M)
    assert json.loads(cli("status", "--output_dir", "theirs", "--json").out) == told


def test_a_run_of_the_original_whose_process_is_gone_has_crashed_and_its_error_and_history_are_shown(
    cli: Cli, their_copy: Path, dead_pid: int
) -> None:
    state = json.loads((their_copy / "out/.run_state.json").read_text())
    (their_copy / "out/.run_state.json").write_text(json.dumps({**state, "status": "running", "pid": dead_pid, "error": "boom"}))
    shown = cli("status", "--output_dir", "out").out
    assert f"CRASHED (PID {dead_pid})" in shown and "boom" in shown and "final@12" in shown


def their_state(folder: Path, pid: int, age_seconds: float = 0.0) -> None:
    """Write what the original, or our own run of its keys, last said of itself that many seconds ago."""
    heard = (datetime.now(UTC) - timedelta(seconds=age_seconds)).isoformat(timespec="seconds")
    told = {"status": "running", "pid": pid, "started_at": heard, "updated_at": heard, "global_step": 4, "loss": math.inf}
    folder.mkdir(exist_ok=True)
    (folder / ".run_state.json").write_text(json.dumps(told))


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_run_that_only_the_original_trains_is_asked_to_stop_by_its_flag_file_and_never_killed(cli: Cli, gpts: Path) -> None:
    their_state(gpts / "theirs", os.getpid())
    assert "kill its process" in cli("stop", "--output_dir", "theirs", "--force", code=1).line
    cli("stop", "--output_dir", "theirs")
    assert (gpts / "theirs/.shutdown_requested").is_file() and not (gpts / "theirs/stop").exists()


def test_stopping_a_run_of_the_original_that_is_gone_only_warns(cli: Cli, gpts: Path, dead_pid: int) -> None:
    their_state(gpts / "theirs", dead_pid, 1000)
    assert "is not running: its status is crashed" in cli("stop", "--output_dir", "theirs").err
    assert not (gpts / "theirs/.shutdown_requested").exists()


@pytest.mark.parametrize("more", [(), ("--force",), ("--nproc_per_node", 2)], ids=["train", "force", "ranks"])
def test_a_folder_in_which_the_original_trains_is_refused_and_left_as_it_is(
    cli: Cli, gpts: Path, more: tuple[object, ...]
) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (gpts / "out/checkpoints/checkpoint-4").mkdir(parents=True)
        their_state(gpts / "out", process.pid)
        before = sorted(gpts.rglob("out/**"))
        line = cli(*TRAIN, *more, code=1).line
        assert f"process {process.pid}" in line and "stop that process first" in line and "another training.output_dir" in line
        assert sorted(gpts.rglob("out/**")) == before
    finally:
        process.communicate()


def test_a_living_original_is_refused_however_old_its_state(cli: Cli, gpts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "FRESH_SECONDS", -1.0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        their_state(gpts / "out", process.pid)
        assert f"process {process.pid}" in cli(*TRAIN, code=1).line
        process.communicate()


def test_a_state_that_the_original_wrote_a_moment_ago_is_refused_for_it_may_train_on_another_host(
    cli: Cli, gpts: Path, dead_pid: int
) -> None:
    their_state(gpts / "out", dead_pid, age_seconds=20)
    line = cli(*TRAIN, code=1).line
    assert "another host" in line and "another training.output_dir" in line and "delete out/.run_state.json" in line
    (gpts / "out/.run_state.json").unlink()
    cli("-q", *TRAIN, "--training.max_steps", 3)


def test_a_folder_whose_original_died_long_ago_is_trained_in(cli: Cli, gpts: Path, dead_pid: int) -> None:
    their_state(gpts / "out", dead_pid, age_seconds=3600)
    cli("-q", *TRAIN, "--training.max_steps", 3)


def test_a_process_that_got_the_number_of_a_dead_original_is_not_taken_for_it(cli: Cli, gpts: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        their_state(gpts / "out", process.pid, age_seconds=3600)
        cli("-q", *TRAIN, "--training.max_steps", 3)
        process.communicate()


def test_a_run_of_ours_that_was_killed_a_moment_ago_goes_on_at_once(cli: Cli, our_copy: Path, dead_pid: int) -> None:
    state = json.loads((our_copy / "out/state.json").read_text())
    (our_copy / "out/state.json").write_text(json.dumps({**state, "status": "running", "pid": dead_pid}))
    their_state(our_copy / "out", dead_pid)
    cli("-q", *TRAIN, "--training.max_steps", 13)


def test_status_of_checkpoints_alone_is_what_the_newest_says(cli: Cli, our_copy: Path) -> None:
    for name in ("state.json", ".run_state.json", "config.yaml"):
        (our_copy / "out" / name).unlink()
    for path in checkpoints(our_copy / "out").values():
        shutil.rmtree(path)
    said = cli("status", "--output_dir", "out").out.splitlines()
    assert said[:2] == ["Status:     NO RUN STATE (checkpoint only)", "Progress:   12 steps"]
    assert [line.partition(":")[0] for line in said[2:4]] == ["Loss", "Tokens"]
    assert said[4:] == [
        "Checkpoint: out/checkpoints/final",
        "History:    checkpoint-4@4, checkpoint-8@8, checkpoint-12@12, final@12",
    ]
    assert json.loads(cli("status", "--output_dir", "out", "--json").out)["step"] == 12


def test_status_has_the_rows_of_the_original_with_its_names(cli: Cli, our_copy: Path) -> None:
    said = cli("status", "--output_dir", "out").out
    assert re.search(r"^Started: +\S+ \(.+ ago\)$", said, re.M) and re.search(r"^LR: +\d\.\d\de-\d\d$", said, re.M)
    assert "Checkpoint: out/checkpoints/final\nHistory:    checkpoint-4@4, checkpoint-8@8, checkpoint-12@12, final@12\n" in said


def test_force_begins_anew_and_leaves_what_it_did_not_write(cli: Cli, gpts: Path) -> None:
    cli("-q", *TRAIN, "--training.max_steps", 8)
    (gpts / "out/notes.txt").write_text("mine")
    said = cli(*TRAIN, "--training.max_steps", 4, "--force", "--model.n_layer", 1)
    assert "Resuming" not in said.err and "--force deletes from out: " in said.err
    assert (gpts / "out/notes.txt").read_text() == "mine"
    saved = saved_checkpoints(gpts / "out")
    assert {one.path.name: one.step for one in saved} == {"checkpoint-4": 4, "final": 4}
    assert all(read_model(one.path)["layers"] == 1 for one in saved)


def test_force_over_a_finished_run_of_the_original_begins_anew(cli: Cli, their_copy: Path) -> None:
    said = cli(*TRAIN, "--training.max_steps", 4, "--force")
    assert "Resuming" not in said.err and "--force deletes from out: .run_state.json, tokenizer, checkpoints/ (4)" in said.err
    assert {one.path.name: one.step for one in saved_checkpoints(their_copy / "out")} == {"checkpoint-4": 4, "final": 4}


def test_a_run_that_was_killed_by_stop_is_stopped_in_its_run_state(cli: Cli, our_copy: Path) -> None:
    state = our_copy / "out/.run_state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "status": "running"}))
    hold = (
        "import sys; from ingot.runs.folder import RunFolder; from ingot.runs.state import Heartbeat; from pathlib import Path\n"
    )
    hold += "with RunFolder(Path('out')).claim(), Heartbeat(Path('out')): print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        cli("stop", "--output_dir", "out", "--force")
        assert process.wait() == -signal.SIGKILL
    assert json.loads(state.read_text())["status"] == "stopped"
    assert cli("status", "--output_dir", "out").out.startswith("Status:     STOPPED\n")


def test_stop_of_an_empty_folder_is_an_error_and_writes_nothing(cli: Cli, gpts: Path) -> None:
    (gpts / "out").mkdir()
    assert "there is no run in out" in cli("stop", "--output_dir", "out", code=1).err
    assert not list((gpts / "out").iterdir())


@pytest.mark.long
def test_accelerate_launch_starts_ranks_that_train_as_ours_do(original: Original, cli: Cli, gpts: Path, ingot: Ingot) -> None:
    ingot.environment["PYTHONPATH"] += os.pathsep + str(SITE)
    # On a machine without GPUs accelerate starts one process, unless it is told that there are several.
    quiet = ("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
    accelerate = (sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", *quiet)
    words = ("-q", *TRAIN, "--training.max_steps", 6)
    ingot(*words, "--training.output_dir", "theirs", command=(*accelerate, *MODULE[1:]), folder=gpts)
    ingot(*words, "--training.output_dir", "ours", "--nproc_per_node", 2, command=MODULE, folder=gpts)
    found = [(gpts / folder / "checkpoints/step-00000006/model.safetensors").read_bytes() for folder in ("theirs", "ours")]
    assert found[0] == found[1]
    refused = ingot(*words, "--data.path", "nowhere", command=(*accelerate, *MODULE[1:]), folder=gpts, code=1)
    assert refused.stderr.count("gpt-simple: error: ") == 1 and "nowhere" in refused.stderr
