"""A run that is killed, stopped or damaged, and started again: it ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from programs import Ingot, checkpoints, losses, metrics, one_line, outcome, state, train_words


@pytest.fixture
def seed() -> int:
    """Another one each time; a failure prints it, and INGOT_TEST_SEED repeats it."""
    seed = int(os.environ.get("INGOT_TEST_SEED", random.SystemRandom().randrange(10**6)))
    print(f"INGOT_TEST_SEED={seed}")
    return seed


def half_written(run: Path) -> bool:
    return any((run / "checkpoints").glob("*.partial/*"))


def assert_same(run: Path, reference: Path) -> None:
    assert outcome(run) == outcome(reference)
    assert losses(run) == losses(reference)
    assert [line["step"] for line in metrics(run, "evaluation")] == [40]
    assert state(run)["status"] == "completed"
    assert [path.name for path in (run / "checkpoints").glob("*.partial")] == []


@pytest.mark.long
def test_a_run_killed_at_random_moments_ends_bitwise_as_one_never_killed(ingot: Ingot, data, reference, tmp_path, seed):
    draw, run = random.Random(seed), tmp_path / "run"
    words = train_words(data, run, training__save_every=2, training__keep_every=0)
    for step in (draw.randint(1, 10), draw.randint(11, 20), draw.randint(21, 30)):
        program = ingot.start(*words)
        program.said(f"step {step}/")
        time.sleep(draw.uniform(0, 0.03))  # some moment of the next steps
        program.kill()
    ingot(*words)
    assert_same(run, reference)


def test_a_run_killed_during_a_save_ends_bitwise_as_one_never_killed(ingot: Ingot, data, reference, until):
    run = until(reference, 28)
    program = ingot.start(*train_words(data, run, training__save_every=1, training__keep_every=0))
    caught = False
    while not caught:
        assert program.process.poll() is None, program.stderr
        if half_written(run):
            program.signal(signal.SIGSTOP)  # now it cannot finish while we look again
            caught = half_written(run)
            program.signal(signal.SIGCONT if not caught else signal.SIGKILL)
    program.end()
    assert half_written(run) and state(run)["status"] == "running"
    ingot(*train_words(data, run))
    assert_same(run, reference)


def test_a_run_killed_after_its_last_step_only_finishes(ingot: Ingot, data, reference, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(reference, run)
    shutil.rmtree(run / "artifact")
    program = ingot(*train_words(data, run))
    assert "step 40/40" not in program.stderr
    assert_same(run, reference)


def test_a_flipped_byte_in_the_newest_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(
    ingot: Ingot, data, reference, until
):
    run = until(reference, 36)
    damaged = checkpoints(run)[36] / "model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1000] ^= 0x10
    damaged.write_bytes(content)
    program = ingot(*train_words(data, run))
    warnings = [line for line in program.stderr.splitlines() if str(damaged) in line]
    assert len(warnings) == 1 and "damaged" in warnings[0]
    assert "resumed_at step 32" in program.stderr
    assert_same(run, reference)


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(ingot: Ingot, data, reference, until):
    run = until(reference, 8)
    for path in checkpoints(run).values():
        (path / "optimizer.safetensors").write_bytes(b"")
    line = one_line(ingot(*train_words(data, run), code=4))
    assert str(checkpoints(run)[8] / "optimizer.safetensors") in line and "restore a checkpoint" in line


def test_the_first_signal_saves_and_ends_and_the_run_goes_on_bitwise(ingot: Ingot, data, reference, tmp_path):
    run = tmp_path / "run"
    program = ingot.start(*train_words(data, run, training__save_every=0, training__save_seconds=1000), "--json")
    program.said("step 5/40")
    program.signal(signal.SIGINT)
    assert program.end() == 0
    assert "SIGINT: saving and stopping" in program.stderr
    stopped = state(run)
    assert stopped["status"] == "stopped" and 5 <= stopped["step"] < 40
    assert list(checkpoints(run)) == [stopped["step"]]
    ingot(*train_words(data, run))
    assert_same(run, reference)


def test_a_sigint_after_the_first_signal_ends_at_once_with_130(ingot: Ingot, data, tmp_path):
    slow = {"training__tokens_per_step": 8192, "training__micro_batch": 8, "training__save_every": 1000}  # a second for a step
    program = ingot.start(*train_words(data, tmp_path / "run", **slow))
    program.said("step 1/40")
    program.signal(signal.SIGTERM)
    program.said("SIGTERM: saving and stopping")
    program.signal(signal.SIGINT)
    assert program.end() == 130
    assert "Traceback" not in program.stderr
    assert checkpoints(tmp_path / "run") == {}


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_sigusr_saves_and_stops_though_sigterm_follows(ingot: Ingot, data, tmp_path, number):
    program = ingot.start(*train_words(data, tmp_path / "run", training__save_every=1000, training__max_steps=100_000))
    program.said("step 5/")
    program.signal(number)
    program.said(f"{number.name}: saving and stopping")
    program.signal(signal.SIGTERM)
    assert program.end() == 0
    stopped = state(tmp_path / "run")
    assert stopped["status"] == "stopped" and list(checkpoints(tmp_path / "run")) == [stopped["step"]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_that_is_repeated_until_the_end_does_not_change_the_exit_code(ingot: Ingot, data, tmp_path, ranks):
    launcher = [f"--nproc-per-node={ranks}"] if ranks > 1 else []
    words = train_words(data, tmp_path / "run", training__max_steps=100_000)
    program = ingot.start(*words, *launcher, "--stop-exit-code=75")
    program.said("step 5/")
    while program.process.poll() is None:
        program.signal(signal.SIGTERM)
        time.sleep(0.02)
    assert program.end() == 75
    assert "error" not in program.stderr and state(tmp_path / "run")["status"] == "stopped"


def test_a_deleted_lock_file_doubles_no_step(ingot: Ingot, data, tmp_path):
    run = tmp_path / "run"
    words = train_words(data, run, training__max_steps=40_000, training__save_every=10_000, training__keep_every=0)
    first = ingot.start(*words)
    first.said("step 5/")
    (run / ".lock").unlink()
    second = ingot(*words, code=1)
    assert f"{run} is in use by process {first.process.pid} on" in one_line(second)
    first.signal(signal.SIGTERM)
    assert first.end() == 0
    losses(run)  # each step stands there once


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_run_that_was_stopped_ends_with_the_code_that_was_asked_for(ingot: Ingot, data, tmp_path, ranks):
    launcher = [f"--nproc-per-node={ranks}"] if ranks > 1 else []
    words = [*train_words(data, tmp_path / "run", training__max_steps=100_000), *launcher, "--stop-exit-code=75"]
    program = ingot.start(*words, "--json")
    program.said("step 5/")
    program.signal(signal.SIGUSR1)
    assert program.end() == 75
    assert json.loads(program.stdout)["stop_reason"] == "signal:SIGUSR1"
    ingot(*words, "--training.max_steps=1")  # which were taken, so it is completed: 0


def test_the_wall_clock_counts_from_the_start_of_the_program(ingot: Ingot, data, tmp_path):
    ingot.environment["INGOT_STARTED_AT"] = str(time.time() - 3600)  # as a launcher that began an hour ago tells its ranks
    found = json.loads(ingot(*train_words(data, tmp_path / "run", training__max_runtime_seconds=1800), "--json").stdout)
    assert (found["status"], found["stop_reason"], found["total_steps"]) == ("stopped", "walltime", 0)


def test_a_bad_end_of_the_job_is_told_once_by_many_ranks(ingot: Ingot, data, tmp_path):
    ingot.environment["SLURM_JOB_END_TIME"] = "soon"
    said = ingot(*train_words(data, tmp_path / "run"), "--nproc-per-node=2").stderr
    assert said.count("SLURM_JOB_END_TIME=soon in the environment is not a number") == 1
    ingot.environment["SLURM_JOB_END_TIME"] = "1000"
    line = one_line(ingot(*train_words(data, tmp_path / "late"), "--nproc-per-node=2", code=2))
    assert "SLURM_JOB_END_TIME=1000" in line and not (tmp_path / "late").exists()
