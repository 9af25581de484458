"""Several processes train one model: the losses of one, the same stop for all, and any number of ranks after the next start."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from conftest import Ingot, checkpoints, losses, once, one_line, outcome, progress, state, train_words

CLOSE = {"abs": 1e-5, "rel": 0}


@pytest.fixture(scope="session")
def two_ranks(shared: Path, data: Path) -> Path:
    """The small demo trained by two ranks that nothing happened to."""

    def make() -> None:
        program = Ingot(shared / "two", shared / "cache")(*train_words(data, shared / "two-ranks"), "--nproc-per-node=2", "--json")
        assert json.loads(program.stdout)["total_steps"] == 40

    return once(shared / "two-ranks", make)


def test_two_ranks_give_the_losses_of_one(reference, two_ranks):
    assert losses(two_ranks) == pytest.approx(losses(reference), **CLOSE)
    assert len(losses(two_ranks)) == 40
    assert progress(two_ranks)["val_bpb"] == pytest.approx(progress(reference)["val_bpb"], **CLOSE)


def test_two_ranks_under_torchrun_are_the_same_run(ingot: Ingot, data, two_ranks, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ingot"]
    program = ingot(*train_words(data, tmp_path / "run"), "--json", command=torchrun)
    assert json.loads(program.stdout)["total_steps"] == 40
    assert losses(tmp_path / "run") == losses(two_ranks)
    assert outcome(tmp_path / "run") == outcome(two_ranks)


def test_two_ranks_stop_together_at_a_signal_and_go_on_bitwise(ingot: Ingot, data, two_ranks, tmp_path):
    run = tmp_path / "run"
    words = [*train_words(data, run), "--nproc-per-node=2"]
    program = ingot.start(*words)
    program.said("step 7/40")
    program.signal(signal.SIGTERM)
    assert program.end() == 0
    stopped = state(run)
    assert stopped["status"] == "stopped" and max(checkpoints(run)) == stopped["step"] < 40
    ingot(*words)
    assert losses(run) == losses(two_ranks)
    assert outcome(run) == outcome(two_ranks)


def test_a_second_signal_to_the_launcher_ends_all_ranks_with_130(ingot: Ingot, data, tmp_path):
    slow = {"training__tokens_per_step": 65536, "training__micro_batch": 8}  # seconds for a step
    program = ingot.start(*train_words(data, tmp_path / "run", **slow), "--nproc-per-node=2")
    program.said("run ")
    program.signal(signal.SIGINT)
    program.said("SIGINT: saving and stopping after this step")
    program.signal(signal.SIGINT)
    assert program.end() == 130
    assert checkpoints(tmp_path / "run") == {}


# Every rank trains to the end, trains again until a signal, and goes on: the rows of a step are uneven over three ranks.
THREE = """
import os, signal, sys
import ingot
from ingot.train.report import Reporter

class Stop(Reporter):
    def step(self, report, log):
        if report.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

data, folder = sys.argv[1:]
def train(name, reporter=None):
    return ingot.train(recipe="demo", reporter=reporter, data={"path": data, "seq_len": 32}, evaluation={"every": 0, "stride": 32},
        budget={"seconds": None}, tracking={"log_every": 1}, model={"dropout": 0.1},
        training={"max_steps": 12, "tokens_per_step": 256, "output_dir": f"{folder}/{name}"})

assert train("unbroken").status == "completed"
assert train("stopped", Stop()).status == "stopped"
assert train("stopped").status == "completed"
"""


def test_three_ranks_with_uneven_rows_and_dropout_go_on_bitwise(ingot: Ingot, data, tmp_path):
    ranks(ingot, 3, THREE, data, tmp_path)
    assert losses(tmp_path / "stopped") == losses(tmp_path / "unbroken")
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "unbroken")


def ranks(ingot: Ingot, count: int, program: str, *arguments: object):
    launch = "import sys; from ingot.doors.cli.launch import launch; sys.exit(launch(int(sys.argv[1]), sys.argv[3:], "
    launch += "command=[sys.executable, '-c', sys.argv[2]]))"
    return ingot(count, program, *arguments, command=[sys.executable, "-c", launch])


def test_a_run_that_moves_from_one_rank_to_two_to_three_and_back_reads_the_same_data(ingot: Ingot, data, reference, until):
    run = until(reference, 8)
    for count, until_step in [(2, 18), (3, 28)]:
        program = ingot.start(*train_words(data, run), f"--nproc-per-node={count}")
        program.said(f"step {until_step}/40")
        program.signal(signal.SIGTERM)
        assert program.end() == 0
        found = progress(run)
        assert until_step <= found["step"] < 40
        assert (found["sample"], found["tokens"]) == (8 * found["step"], 256 * found["step"])
    ingot(*train_words(data, run))
    assert losses(run) == pytest.approx(losses(reference), **CLOSE)
    assert progress(run)["sample"] == progress(reference)["sample"] == 320


CLOCK = """
import hashlib, os, sys
import ingot
from ingot.backends.torch import TorchBackend

hashes, keep = [], TorchBackend.close
def close(self):
    weights = b"".join(bytes(record.data) for record in self.state()["model"])
    print(f"rank {self.ranks.rank} {hashlib.sha256(weights).hexdigest()}", file=sys.stderr)
TorchBackend.weights_at_end = close
original = TorchBackend.__init__
def init(self, *arguments):
    original(self, *arguments)
    leave = self.close
    self.close = lambda: (close(self), leave())
TorchBackend.__init__ = init
data, folder = sys.argv[1:]
result = ingot.train(recipe="demo", data={"path": data, "seq_len": 32}, evaluation={"every": 0, "stride": 32},
    budget={"seconds": 1.0}, training={"tokens_per_step": 256, "output_dir": folder})
print(f"rank {os.environ['RANK']} steps {result.total_steps} seconds {result.training_seconds} {result.status}", file=sys.stderr)
"""


def test_one_ranks_clock_decides_for_all(ingot: Ingot, data, tmp_path):
    program = ranks(ingot, 2, CLOCK, data, tmp_path / "run")
    said = sorted(line.split(maxsplit=2)[2] for line in program.stderr.splitlines() if line.startswith("rank "))
    assert len(said) == 4
    assert said[0] == said[1] and len(said[0]) == 64, "the weights differ"
    assert said[2].split()[:2] == said[3].split()[:2], "the steps differ"
    assert said[2].endswith("completed") and said[3].endswith("completed")


def test_what_only_the_first_rank_can_know_ends_all_ranks_with_one_line(ingot: Ingot, data, reference):
    program = ingot(*train_words(data, reference, training__resume="never"), "--nproc-per-node=2", code=4)
    assert "training.resume=never" in one_line(program)


def test_more_ranks_than_rows_are_refused_with_one_line(ingot: Ingot, data, tmp_path):
    program = ingot(*train_words(data, tmp_path / "run", training__tokens_per_step=32), "--nproc-per-node=2", code=2)
    assert "2 ranks cannot share the 1 rows" in one_line(program)
    assert not (tmp_path / "run").exists()
