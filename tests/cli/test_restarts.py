"""Restarts without a human: a rank or a machine that is lost, a rank that hangs, and failures that a restart cannot mend."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import Ingot, checkpoints, losses, metrics, one_line, progress, state, train_words
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ingot.backends.torch.elastic import _first_failure

# A model in which one rank fails at its tenth training pass, in the first attempt of the run.
FAILING = """
import os, signal
from ingot.model.gpt2 import GPT2

class Model(GPT2):
    def __init__(self, vocab_size, context, layers, heads, width):
        super().__init__(vocab_size, context, layers=layers, heads=heads, width=width)
        self.passes = 0

    def forward(self, tokens, targets=None):
        self.passes += self.training
        loss, failure = super().forward(tokens, targets), os.environ.get("FAILURE")
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if self.passes == 10 and first and failure and os.environ["RANK"] == "1":
            if failure == "nan":
                return loss * float("nan")
            os.kill(os.getpid(), getattr(signal, failure))
        return loss
"""


@pytest.fixture
def failing(tmp_path: Path) -> Path:
    (tmp_path / "failing.py").write_text(FAILING)
    return tmp_path / "failing.py"


def sessions(run: Path) -> int:
    return 1 + len(json.loads((run / "environment.json").read_text())["earlier"])


def test_a_run_that_loses_a_rank_restarts_and_ends_with_the_losses_of_an_undisturbed_run(ingot: Ingot, data, tmp_path, failing):
    settings = {"model__file": failing, "training__max_steps": 16}
    assert ingot.ranks(3, *train_words(data, tmp_path / "undisturbed", **settings)).end() == 0
    words = train_words(data, "unset", **settings)
    words = [word for word in words if not word.startswith("--training.output_dir")]  # the default folder, named by the time
    program = ingot(*words, "--nproc-per-node=3", "--max-restarts=3", "--json", FAILURE="SIGKILL", folder=tmp_path)
    assert "was killed by SIGKILL; restart 1 of 3" in program.stderr
    run = tmp_path / json.loads(program.stdout)["run_dir"]
    assert sessions(run) == 2
    assert losses(run) == pytest.approx(losses(tmp_path / "undisturbed"), abs=1e-6)
    assert (progress(run)["sample"], progress(run)["tokens"]) == (8 * 16, 256 * 16)


def test_the_failure_that_counts_is_not_that_of_a_rank_which_lost_another():
    lost, broken = (ProcessFailure(local_rank=rank, pid=rank, exitcode=code, error_file="") for rank, code in enumerate((1, 4)))
    assert _first_failure(RunResult(WorkerState.FAILED, failures={0: lost, 1: broken})) == (1, broken)


def test_restarts_without_a_launcher_are_refused(ingot: Ingot, data, tmp_path):
    program = ingot(*train_words(data, tmp_path / "run"), "--max-restarts=3", code=2)
    assert "--nproc-per-node" in one_line(program) and not (tmp_path / "run").exists()


def test_a_rank_that_hangs_is_named_with_the_step_and_the_collective(ingot: Ingot, data, tmp_path, failing):
    words = train_words(data, tmp_path / "run", model__file=failing, training__collective_timeout_seconds=20)
    program = ingot(*words, "--nproc-per-node=3", FAILURE="SIGSTOP", code=1)
    errors = [line for line in program.stderr.splitlines() if "error:" in line and "rank process" not in line]
    assert len(errors) == 1, program.stderr
    assert "rank 0 waited 20 s at step 9 in the gradient all-reduce for rank 1; " in errors[0]


def test_a_loss_that_is_not_finite_names_its_rank_and_is_not_tried_again(ingot: Ingot, data, tmp_path, failing):
    words = train_words(data, tmp_path / "run", model__file=failing)
    program = ingot(*words, "--nproc-per-node=3", "--max-restarts=2", FAILURE="nan", code=1)
    assert "the loss is not finite at step 9 on rank 1 " in program.stderr
    assert program.stderr.count("error:") == 1 and "restart 1" not in program.stderr
    assert sessions(tmp_path / "run") == 1 and state(tmp_path / "run")["status"] == "failed"


def test_a_run_with_restarts_stops_at_a_signal_and_tells_it_by_its_exit_code(ingot: Ingot, data, tmp_path):
    words = [*train_words(data, tmp_path / "run"), "--nproc-per-node=2", "--max-restarts=2", "--stop-exit-code=75"]
    program = ingot.start(*words)
    program.said("step 5/40")
    program.signal(signal.SIGUSR1)
    assert program.end() == 75, program.stderr
    stopped = state(tmp_path / "run")
    assert stopped["status"] == "stopped" and max(checkpoints(tmp_path / "run")) == stopped["step"] < 40
    assert sessions(tmp_path / "run") == 1 and "restart 1" not in program.stderr


SLOW = """
import time
from ingot.model.gpt2 import GPT2

class Model(GPT2):
    def __init__(self, vocab_size, context, layers, heads, width):
        super().__init__(vocab_size, context, layers=layers, heads=heads, width=width)

    def forward(self, tokens, targets=None):
        time.sleep(0.2)
        return super().forward(tokens, targets)
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Three network namespaces with the addresses 10.99.0.1 to 10.99.0.3 on a switch, which is a fourth."""
    if shutil.which("ip") is None:
        pytest.skip("needs the program ip (package iproute2)")
    switch, *names = [f"ingot-{os.getpid()}-{number}" for number in range(4)]
    try:
        try:
            for name in (switch, *names):
                ip("netns", "add", name)
            ip("-n", switch, "link", "add", "switch", "up", "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
        for number, name in enumerate(names, 1):
            ip("-n", switch, "link", "add", f"port{number}", "up", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", switch, "link", "set", f"port{number}", "master", "switch")
            ip("-n", name, "address", "add", f"10.99.0.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
        yield [switch, *names]
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.mark.long
def test_a_run_continues_without_a_machine_that_is_cut_off(ingot: Ingot, data, tmp_path, machines):
    (tmp_path / "slow.py").write_text(SLOW)
    settings = {"model__file": tmp_path / "slow.py", "training__collective_timeout_seconds": 10}
    ingot(*train_words(data, tmp_path / "alone", **settings))
    switch, *names = machines
    run, words = tmp_path / "run", train_words(data, tmp_path / "run", **settings)
    words += ["--nproc-per-node=1", "--nnodes=1:3", "--max-restarts=3", "--master-addr=10.99.0.1", "--master-port=29500"]
    programs = [
        ingot.start(
            *words,
            f"--node-rank={number}",
            command=["ip", "netns", "exec", name, *Ingot.python],
            GLOO_SOCKET_IFNAME="eth0",
        )
        for number, name in enumerate(names)
    ]
    deadline = time.monotonic() + 300
    while not (run / "checkpoints" / "step-00000012").exists():
        assert time.monotonic() < deadline and all(program.process.poll() is None for program in programs), programs[0].stderr
        time.sleep(0.1)
    ip("-n", switch, "link", "set", "port3", "down")
    assert [program.end() for program in programs[:2]] == [0, 0], programs[0].stderr + programs[1].stderr
    assert re.findall(r"  ranks (\d)  ", (run / "log.txt").read_text()) == ["3", "2"]
    assert losses(run) == pytest.approx(losses(tmp_path / "alone"), abs=1e-5)
    assert state(run)["status"] == "completed"
    assert (progress(run)["sample"], progress(run)["tokens"]) == (8 * 40, 256 * 40)
    assert "waited 10 s" in programs[0].stderr + programs[1].stderr


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--nnodes=1:2", "--master-port=1234"], "--max-restarts above 0"),
        (["--nnodes=2:1", "--master-port=1234", "--max-restarts=1"], "1 <= MIN <= MAX"),
        (["--nnodes=some", "--max-restarts=1"], "--nnodes some must be a number or a range"),
        (["--training.resume=never", "--max-restarts=1"], "--max-restarts excludes training.resume=never"),
        (
            ["--nnodes=2", "--master-port=1234", "--max-restarts=1", "--force"],
            "with --nnodes, it needs training.output_dir and excludes --force",
        ),
    ],
)
def test_restarts_that_cannot_be_are_refused_before_they_start(ingot: Ingot, data, tmp_path, words, what):
    assert what in one_line(ingot(*train_words(data, tmp_path / "run"), "--nproc-per-node=1", *words, code=2))


def test_the_speed_of_every_rank_is_recorded_every_hundred_steps(ingot: Ingot, data, tmp_path):
    assert ingot.ranks(2, *train_words(data, tmp_path / "run", training__max_steps=100, training__save_every=0)).end() == 0
    (record,) = metrics(tmp_path / "run", "ranks")
    assert record["step"] == 100 and len(record["p50"]) == len(record["p95"]) == 2
    assert all(0 < half <= most for half, most in zip(record["p50"], record["p95"], strict=True))
