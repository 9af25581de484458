"""Real runs on buckets: mixes, phases, what happens when a bucket or the data is over, and how such runs are continued."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from bucket_files import documents_of, write_buckets
from tiny_runs import records, state_of, train_tiny

from ingot.backends.torch.backend import TorchBackend
from ingot.runs.checkpoints import load_checkpoint
from ingot.runs.reporter import Reporter, StepReport
from ingot.runs.view import Run

BUCKETS = {"web": documents_of("w", 80), "books": documents_of("b", 40), "code": documents_of("c", 60)}
NAMES = Counter(f"{bucket[0]}{number:04d}" for bucket, some in BUCKETS.items() for number in range(len(some)))
PHASES = [
    {"tokens": 160, "mix": {"web": 1, "books": 1}},
    {"tokens": 120, "mix": {"web": 1, "code": 3}},
    {"tokens": 1, "mix": {"code": 1}},
]


@pytest.fixture(scope="module")
def buckets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_buckets(tmp_path_factory.mktemp("buckets") / "data", BUCKETS)


@pytest.fixture
def train(buckets: Path) -> Any:
    settings = {"data__tokenizer": "byte", "data__sampling": "pack", "training__max_steps": 500, "artifact__write": False}
    return partial(train_tiny, buckets, **settings, evaluation__at_end=False)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The batches that the backend was given."""
    batches: list[Any] = []
    step = TorchBackend.step

    def noting(self: TorchBackend, batch: Any, *rest: Any) -> Any:
        batches.append(batch.copy())
        return step(self, batch, *rest)

    monkeypatch.setattr(TorchBackend, "step", noting)
    return batches


def documents(batches: list[Any]) -> Counter[str]:
    """How often each document was trained on, by its name."""
    text = bytes(token - 4 for batch in batches for token in batch[:, 0].ravel().tolist() if token > 2).decode()
    return Counter(text[i : i + 5] for i in range(len(text)) if text[i] in "wbc")


@dataclass
class Notes(Reporter):
    stop_at: int | None = None
    phases: list[tuple[int, int]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def step(self, report: StepReport, log: bool) -> None:
        if report.step == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def phase(self, number: int, tokens: int) -> None:
        self.phases.append((number, tokens))

    def message(self, text: str) -> None:
        self.messages.append(text)


def test_a_run_of_one_epoch_ends_when_every_document_was_trained_on_once(train, seen, tmp_path):
    result = train(tmp_path / "run", data__epochs=1, training__save_every=1000)
    assert (result.status, result.stop_reason) == ("completed", "data")
    assert documents(seen) == NAMES
    assert json.loads((tmp_path / "run" / "state.json").read_text())["stop_reason"] == "data"
    steps = records(tmp_path / "run", "train")
    assert sum(step["targets"] for step in steps) == result.total_tokens == steps[-1]["tokens"]
    assert result.total_tokens == sum(len(document) - 1 for some in BUCKETS.values() for document in some)
    again = train(tmp_path / "run", data__epochs=1)
    assert (again.status, again.total_steps) == ("completed", result.total_steps)
    more = train(tmp_path / "run", data__epochs=2)
    assert documents(seen) == NAMES + NAMES
    assert more.stop_reason == "data"


def test_phases_go_on_where_their_buckets_stood_and_begin_when_their_tokens_are_reached(train, seen, tmp_path):
    notes = Notes()
    result = train(tmp_path / "run", reporter=notes, data__phases=PHASES, data__epochs=1, training__max_steps=13)
    counts = documents(seen)
    assert max(counts.values()) == 1
    steps = records(tmp_path / "run", "train")
    for number, budget in ((1, 160), (2, 280)):
        first = next(step for step in steps if step["phase"] == number)
        before = [step for step in steps if step["step"] < first["step"]]
        assert before[-1]["tokens"] >= budget > before[-2]["tokens"]
        assert (number, before[-1]["tokens"]) in notes.phases
    assert len(notes.phases) == 2
    assert load_checkpoint(result.checkpoint_path).progress["phases_begun"] == 3


def test_a_phase_that_has_begun_goes_on_where_the_one_before_it_is_made_longer(train, seen, tmp_path):
    given = {"data__epochs": 1, "training__max_steps": 8}
    train(tmp_path / "run", reporter=Notes(stop_at=5), data__phases=PHASES[:2], **given)
    assert any(name[0] == "b" for name in documents(seen))  # of the first phase alone
    seen.clear()
    notes, longer = Notes(), [{**PHASES[0], "tokens": 100_000}, PHASES[1]]
    train(tmp_path / "run", reporter=notes, data__phases=longer, **given)
    assert {name[0] for name in documents(seen)} == {"w", "c"}
    assert [step["phase"] for step in records(tmp_path / "run", "train")][-len(seen) :] == [1] * len(seen)
    assert notes.phases == []


def test_a_run_in_pieces_is_bitwise_the_run_in_one(train, seen, tmp_path):
    given = {"data__phases": PHASES, "data__epochs": 1, "training__max_steps": 13, "artifact__write": True}
    train(tmp_path / "unbroken", **given)
    whole = [batch.tobytes() for batch in seen]
    seen.clear()
    for at in (1, 3, 6, 9):
        assert train(tmp_path / "pieces", reporter=Notes(stop_at=at), **given).status == "stopped"
    assert train(tmp_path / "pieces", **given).status == "completed"
    assert [batch.tobytes() for batch in seen] == whole
    assert state_of(tmp_path / "pieces") == state_of(tmp_path / "unbroken")


def test_a_drained_bucket_halts_the_run_saves_it_and_is_not_trained(train, seen, tmp_path):
    notes, given = Notes(), {"data__mix": {"web": 1, "books": 3}, "data__epochs": 1, "training__save_every": 1000}
    result = train(tmp_path / "run", reporter=notes, **given)
    assert (result.status, result.stop_reason) == ("halted", "bucket_exhausted:books")
    assert result.checkpoint_path is not None and result.total_steps == len(seen)
    assert Run(tmp_path / "run").status().status == "halted"
    assert any("the bucket books is exhausted" in text and "data.exhausted=renormalise" in text for text in notes.messages)
    again = train(tmp_path / "run", **given)
    assert (again.status, again.total_steps) == ("halted", result.total_steps)
    onward = train(tmp_path / "run", data__exhausted="renormalise", **given)
    assert (onward.status, onward.stop_reason) == ("completed", "data")
    assert documents(seen) == Counter({name: 1 for name in NAMES if name[0] != "c"})


def test_a_stop_at_the_step_after_which_a_bucket_is_drained_does_not_hide_that(train, tmp_path):
    """Or a job that is begun again after every stop would halt again and again."""
    given = {"data__mix": {"web": 1, "books": 3}, "data__epochs": 1, "training__save_every": 1000}
    steps = train(tmp_path / "unbroken", **given).total_steps
    result = train(tmp_path / "run", reporter=Notes(stop_at=steps), **given)
    assert (result.status, result.stop_reason, result.total_steps) == ("halted", "bucket_exhausted:books", steps)


def test_the_mix_may_change_between_sessions_and_no_document_comes_twice(train, seen, tmp_path):
    given = {"data__epochs": 1, "data__exhausted": "renormalise"}
    train(tmp_path / "run", reporter=Notes(stop_at=5), data__mix={"web": 1, "books": 1}, **given)
    train(tmp_path / "run", data__mix={"web": 1, "books": 1, "code": 5}, **given)
    assert documents(seen) == NAMES


def test_an_end_may_be_set_halfway(train, seen, tmp_path):
    train(tmp_path / "run", reporter=Notes(stop_at=5))
    train(tmp_path / "run", data__epochs=1)
    assert documents(seen) == NAMES


def test_a_run_without_a_mix_cannot_be_given_one_halfway(train, tmp_path):
    """Its places are those of all documents together, which says nothing of the buckets."""
    from ingot.errors import CheckpointError

    train(tmp_path / "run", reporter=Notes(stop_at=3))
    with pytest.raises(CheckpointError, match=r"data\.mix"):
        train(tmp_path / "run", data__mix={"web": 1})


def test_evaluations_tell_of_every_bucket(train, tmp_path):
    train(tmp_path / "run", training__max_steps=2, evaluation__at_end=True)
    [found] = records(tmp_path / "run", "evaluation")
    assert set(found["buckets"]) == set(BUCKETS)
    assert sum(one["tokens"] for one in found["buckets"].values()) == found["tokens"]
    nats = sum(one["val_loss"] * one["tokens"] for one in found["buckets"].values())
    assert nats / found["tokens"] == pytest.approx(found["val_loss"])
