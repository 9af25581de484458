"""One job in many short ones: ended in every way at random moments, on changing ranks, it is the unbroken job."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from itertools import cycle
from pathlib import Path

import pytest
from original import write_config
from programs import PATIENCE, Ingot, Program, checkpoints, losses, metrics, progress, state

STEPS = 60
MODULE = (sys.executable, "-m", "ingot.compat.gpt_simple")
# About half of the steps each: 8 rows of at most 31 targets make a step.
PHASES = [{"duration_tokens": 7400, "mix": mix} for mix in ({"books": 1.0, "web": 1.0}, {"books": 1.0, "web": 3.0})]
ENDS = ("SIGTERM", "SIGUSR1", "walltime", "stop", "SIGKILL")


def step_of(run: Path) -> int:
    """The last step that the record has."""
    try:
        return max((line["step"] for line in metrics(run)), default=0)
    except (OSError, ValueError):  # not there yet, or a line is being written
        return 0


def wait_for_step(program: Program, run: Path, step: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while step_of(run) < step and program.process.poll() is None:
        assert time.monotonic() < deadline, program.stderr
        time.sleep(0.002)


def one_piece(ingot: Ingot, folder: Path, run: str, ranks: int, how: str, steps: int) -> None:
    """Start a session, let it take some steps, and end it."""
    before = step_of(folder / run)
    words = ["-q", "train", "--config", f"{run}.yaml", "--training.device", "cpu", "--nproc_per_node", str(ranks)]
    if how == "walltime":  # the session's clock began with the program; a start of ranks takes some seconds
        words += ["--training.max_runtime_seconds", "6" if ranks > 1 else "1", "--training.walltime_reserve_seconds", "0"]
    program = ingot.start(*words, command=MODULE, folder=folder)
    wait_for_step(program, folder / run, before + steps)
    if how == "stop":
        assert ingot.start("stop", folder / run).end() in (0, 1)  # 1: it was over before
    elif how == "SIGKILL":
        program.kill()
    elif how != "walltime" and program.process.poll() is None:
        program.signal(signal.Signals[how])
    code = program.end()
    assert code == (-signal.SIGKILL if how == "SIGKILL" and code else 0), program.stderr


def finish(ingot: Ingot, folder: Path, run: str) -> None:
    ingot("-q", "train", "--config", f"{run}.yaml", "--training.device", "cpu", command=MODULE, folder=folder)
    assert state(folder / run)["status"] == "completed"


@pytest.mark.parametrize(
    ("ranks", "pieces"),
    [
        pytest.param((1,), 3, id="one rank, three pieces"),
        pytest.param((1,), 12, id="one rank, twelve pieces", marks=pytest.mark.long),
        pytest.param((1, 2, 3, 1), 12, id="one to three ranks, twelve pieces", marks=pytest.mark.long),
    ],
)
def test_a_job_in_pieces_is_the_unbroken_job(ranks: tuple[int, ...], pieces: int, ingot: Ingot, gpts: Path) -> None:
    for run in ("whole", "pieces"):
        training = {"max_steps": STEPS, "logging_steps": 1, "save_steps": 4, "output_dir": run}
        write_config(gpts / f"{run}.yaml", data={"curriculum": PHASES}, training=training)
    finish(ingot, gpts, "whole")
    seed = int(os.environ.get("PIECES_SEED", 1))
    draw = random.Random(seed)
    print(f"PIECES_SEED={seed}")  # another one searches for other moments; shown where it fails
    ends = [*ENDS, *ENDS, *draw.choices(ENDS, k=pieces)]
    draw.shuffle(ends)
    ends = ["SIGTERM", *ends]  # the ranks of the first start decide the batch, once a checkpoint tells it
    for count, how in zip(cycle(ranks), ends[:pieces], strict=False):
        one_piece(ingot, gpts, "pieces", count, how, draw.randint(1, 2 * STEPS // (3 * pieces)))
    finish(ingot, gpts, "pieces")
    whole, found = gpts / "whole", gpts / "pieces"
    for name in ("step", "sample", "tokens", "phases_begun", "places"):
        if name in progress(whole):
            assert progress(found)[name] == progress(whole)[name], name
    assert progress(whole)["phases_begun"] == 2
    # Every document begins with a number of its own: a step that read others would have another loss.
    assert losses(found) == pytest.approx(losses(whole), rel=1e-3 if max(ranks) > 1 else 0)
    if max(ranks) == 1:
        last = [checkpoints(run)[STEPS] / "model.safetensors" for run in (whole, found)]
        assert last[0].read_bytes() == last[1].read_bytes()
