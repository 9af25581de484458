"""Several processes train one model: the losses of one, the same stop for all, and any number of ranks after the next start."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from programs import (
    NO_ROOM,
    POISONED,
    Ingot,
    Program,
    Ranks,
    checkpoints,
    losses,
    once,
    one_line,
    outcome,
    progress,
    state,
    train_words,
)

CLOSE = {"abs": 1e-5, "rel": 0}


def train(ingot: Ingot, count: int, *words: object, code: int = 0, **how: int) -> Ranks:
    """Let so many ranks run to their end, and insist on the exit code."""
    ranks = ingot.ranks(count, *words, **how)
    assert ranks.end() == code, ranks.stderr
    return ranks


@pytest.fixture(scope="session")
def two_ranks(shared: Path, data: Path) -> Path:
    """The small demo trained by two ranks, started as users do, that nothing happened to."""

    def make() -> None:
        program = Ingot(shared / "two", shared / "cache")(
            *train_words(data, shared / "two-ranks"), "--nproc-per-node=2", "--json"
        )
        assert json.loads(program.stdout)["total_steps"] == 40

    return once(shared / "two-ranks", make)


def test_two_ranks_give_the_losses_of_one(reference, two_ranks):
    assert losses(two_ranks) == pytest.approx(losses(reference), **CLOSE)
    assert len(losses(two_ranks)) == 40
    assert progress(two_ranks)["val_bpb"] == pytest.approx(progress(reference)["val_bpb"], **CLOSE)


FAMILIES = [
    {"model__family": "llama", "model__kv_heads": 2, "data__sampling": "pack", "data__document_mask": "true"},
    {"model__family": "golf", "model__kv_heads": 2, "data__sampling": "stream", "optimizer__ema_decay": 0.9},
    {
        "model__family": "frontier", "model__kv_heads": 2, "model__window": 8, "optimizer__name": "muon",
        "optimizer__muon_beta2": 0.9, "optimizer__muon_cautious": "true", "optimizer__muon_weight_decay": 0.1,
        "optimizer__epsilon": 1e-5,  # while branches are zero the mixes have no gradient but rounding: AdamW must not magnify it
    },
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("settings", FAMILIES, ids=["llama-packed", "golf-stream", "frontier"])
def test_two_and_three_ranks_give_the_losses_of_one_in_every_family(ingot: Ingot, data, tmp_path, settings):
    for count in (1, 2, 3):
        train(
            ingot, count, *train_words(data, tmp_path / str(count), training__max_steps=16, training__micro_batch=2, **settings)
        )
    for count in (2, 3):
        assert losses(tmp_path / str(count)) == pytest.approx(losses(tmp_path / "1"), **CLOSE)
        assert progress(tmp_path / str(count))["val_bpb"] == pytest.approx(progress(tmp_path / "1")["val_bpb"], **CLOSE)
        assert progress(tmp_path / str(count))["tokens"] == progress(tmp_path / "1")["tokens"]


def test_ranks_go_through_stages_with_the_losses_of_one_and_go_on_bitwise_at_a_border(ingot: Ingot, data, tmp_path, until):
    stages = "[{steps: 4, seq_len: 16}, {steps: 4, tokens_per_step: 512}, {steps: 4, tokens_per_step: 1024}]"
    settings = {"training__stages": stages, "training__max_steps": 12}
    ingot(*train_words(data, tmp_path / "one", **settings))
    train(ingot, 2, *train_words(data, tmp_path / "two", **settings))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), **CLOSE)
    assert [progress(tmp_path / name)["starts"] for name in ("one", "two")] == [[0, 4, 8]] * 2
    assert progress(tmp_path / "two")["sample"] == progress(tmp_path / "one")["sample"] == 4 * (8 + 16 + 32)
    run = until(tmp_path / "two", 4)
    train(ingot, 2, *train_words(data, run, **settings))
    assert losses(run) == losses(tmp_path / "two")
    assert outcome(run) == outcome(tmp_path / "two")


def test_two_ranks_under_torchrun_are_the_same_run(ingot: Ingot, data, two_ranks, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ingot"]
    program = ingot(*train_words(data, tmp_path / "run"), "--json", command=torchrun)
    assert json.loads(program.stdout)["total_steps"] == 40
    assert losses(tmp_path / "run") == losses(two_ranks)
    assert outcome(tmp_path / "run") == outcome(two_ranks)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.long)])
def test_two_ranks_stop_together_at_a_signal_and_go_on_bitwise(ingot: Ingot, data, two_ranks, tmp_path, number):
    run = tmp_path / "run"
    words = train_words(data, run)
    ranks = ingot.ranks(2, *words)
    ranks.first.said("step 7/40")
    ranks.signal(number)
    assert ranks.end() == 0, ranks.stderr
    stopped = state(run)
    assert stopped["status"] == "stopped" and max(checkpoints(run)) == stopped["step"] < 40
    train(ingot, 2, *words)
    assert losses(run) == losses(two_ranks)
    assert outcome(run) == outcome(two_ranks)


def test_a_second_signal_to_the_launcher_ends_all_ranks_with_130(ingot: Ingot, data, tmp_path):
    slow = {"training__tokens_per_step": 8192, "training__micro_batch": 8, "training__save_every": 1000}  # a second for a step
    program = ingot.start(*train_words(data, tmp_path / "run", **slow), "--nproc-per-node=2")
    program.said("step 1/40")
    program.signal(signal.SIGINT)
    program.said("SIGINT: saving and stopping")
    program.signal(signal.SIGINT)
    assert program.end() == 130
    assert checkpoints(tmp_path / "run") == {}


@pytest.mark.long
def test_three_ranks_with_uneven_rows_and_dropout_go_on_bitwise(ingot: Ingot, data, tmp_path, until):
    words = {"model__dropout": 0.1, "training__max_steps": 12}
    train(ingot, 3, *train_words(data, tmp_path / "unbroken", **words))
    run = until(tmp_path / "unbroken", 4)
    train(ingot, 3, *train_words(data, run, **words))
    assert losses(run) == losses(tmp_path / "unbroken")
    assert outcome(run) == outcome(tmp_path / "unbroken")


def test_a_run_that_moves_to_two_three_and_four_ranks_sharded_or_not_reads_the_same_data(ingot: Ingot, data, reference, until):
    run = until(reference, 8)
    for count, parallel, until_step in [(2, "fsdp", 12), (3, "ddp", 16), (4, "fsdp", 20)]:
        ranks = ingot.ranks(count, *train_words(data, run, training__parallel=parallel))
        ranks.first.said(f"step {until_step}/40")
        ranks.signal(signal.SIGTERM)
        assert ranks.end() == 0, ranks.stderr
        found = progress(run)
        assert until_step <= found["step"] < 40
        assert (found["sample"], found["tokens"]) == (8 * found["step"], 256 * found["step"])
    ingot(*train_words(data, run))
    assert losses(run) == pytest.approx(losses(reference), **CLOSE)
    assert progress(run)["sample"] == progress(reference)["sample"] == 320


# A model that says at the end how many training steps its rank took and what weights it came to.
TELLS = """
import atexit, hashlib, os, sys
from ingot.model.gpt2 import GPT2
from ingot.train import trainer
from ingot.train.stop import Clock

SECONDS = 0.125 if os.environ["RANK"] == "0" else 1.0  # of a step, by this rank's clock

class StepClock(Clock):
    def __init__(self, spent):
        super().__init__(spent, lambda: SECONDS * Model.taken)

trainer.Clock = StepClock

class Model(GPT2):
    taken = 0

    def __init__(self, vocab_size, context, layers, heads, width):
        super().__init__(vocab_size, context, layers=layers, heads=heads, width=width)
        self.steps = 0
        atexit.register(self.tell)

    def forward(self, tokens, targets=None):
        self.steps += self.training
        Model.taken += self.training
        return super().forward(tokens, targets)

    def tell(self):
        if self.steps == 1:
            return  # the one that was checked before training
        weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in self.parameters())).hexdigest()
        sys.stderr.write(f"rank {os.environ['RANK']}: steps {self.steps} weights {weights}\\n")
"""


def test_one_ranks_clock_decides_for_all(ingot: Ingot, data, tmp_path):
    (tmp_path / "tells.py").write_text(TELLS)
    budget = {"model__file": tmp_path / "tells.py", "budget__seconds": 1, "training__max_steps": "null"}
    ranks = train(ingot, 2, *train_words(data, tmp_path / "run", **budget))
    told = [line.partition(": ")[2] for line in ranks.stderr.splitlines() if line.startswith("rank ")]
    assert len(told) == 2 and told[0] == told[1]
    assert progress(tmp_path / "run")["step"] == 8  # by the first rank's clock; by the other's it would be one


def test_what_only_the_first_rank_can_know_ends_all_ranks_with_one_line(ingot: Ingot, data, reference, until):
    program = ingot(*train_words(data, until(reference, 4), training__resume="never"), "--nproc-per-node=2", code=4)
    assert "training.resume=never" in one_line(program)


def test_more_ranks_than_rows_are_refused_with_one_line(ingot: Ingot, data, tmp_path):
    program = ingot(*train_words(data, tmp_path / "run", training__tokens_per_step=32), "--nproc-per-node=2", code=2)
    assert "2 ranks cannot share the 1 rows" in one_line(program)
    assert not (tmp_path / "run").exists()


def told_once(ranks: Ranks | Program) -> str:
    """The line of the error, which only one rank prints although all of them end."""
    lines = [line for line in ranks.stderr.splitlines() if "error" in line.lower()]
    assert len(lines) == 1 and "Traceback" not in ranks.stderr, ranks.stderr
    return lines[0]


def test_a_loss_that_is_not_finite_ends_all_ranks_with_one_line(ingot: Ingot, data, tmp_path):
    (tmp_path / "poisoned.py").write_text(POISONED)
    words = train_words(data, tmp_path / "run", model__file=tmp_path / "poisoned.py")
    assert "the loss is not finite at step" in told_once(train(ingot, 2, *words, code=1))
    assert state(tmp_path / "run")["status"] == "failed"


def test_a_last_save_that_fails_ends_all_ranks_with_one_line(ingot: Ingot, data, reference, until):
    run = until(reference, 36)
    assert "cannot save step 40" in told_once(train(ingot, 2, *train_words(data, run), code=4, largest_file=NO_ROOM))
    assert max(checkpoints(run)) == 36 and state(run)["status"] == "failed"


def test_a_mistake_that_is_found_while_the_model_is_built_is_told_once(ingot: Ingot, data, tmp_path):
    (tmp_path / "mine.py").write_text("class Model:\n    def __init__(self):\n        raise RuntimeError('no such thing')\n")
    words = train_words(data, tmp_path / "run", model__file=tmp_path / "mine.py")
    assert "Model cannot be built: RuntimeError: no such thing" in told_once(ingot(*words, "--nproc-per-node=2", code=2))
