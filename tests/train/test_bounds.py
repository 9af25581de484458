"""What a run does outside its training clock is bounded; the device only lets time pass, so every number is exact."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from test_trainer import Device, Meeting, Time, make
from tiny_runs import Train, records

from ingot.runs.reporter import EvaluationReport, Reporter
from ingot.runtime.ranks import Ranks
from ingot.train.resume import Progress
from ingot.train.stop import Shutdown


@dataclass
class SlowBackend(Device):
    """A device that takes so many seconds to evaluate a row, and longer the first time."""

    row_seconds: float = 1.0
    first_extra: float = 0.0
    scored: int = 0
    loss: float = 1.0

    def score(self, batch: Any) -> float:
        self.time.now += self.row_seconds * len(batch) + (self.first_extra if not self.scored else 0.0)
        self.scored += len(batch)
        return self.loss

    def total(self, values: Any) -> list[float]:
        return [value * self.ranks.world_size for value in values]  # ranks have equal work here


@dataclass
class Heard(Reporter):
    messages: list[str] = field(default_factory=list)
    evaluations: list[EvaluationReport] = field(default_factory=list)

    def message(self, text: str) -> None:
        self.messages.append(text)


# The validation split has 38 rows of 16 tokens.
BOUNDED = {"evaluation__micro_batch": 4, "budget__seconds": 60.0}


def test_the_last_evaluation_of_a_run_with_a_clock_takes_at_most_half_as_long_as_its_training(data):
    device, heard = SlowBackend(Time()), Heard()
    trainer = make(data, device, reporter=heard, **BOUNDED)
    trainer.evaluation.evaluate(final=True)
    p = trainer.progress
    assert (p.val_rows, p.val_whole, p.val_final) == (30, False, True) and p.val_rows_of == 38
    assert device.scored == 30 + 8  # and two batches by which the speed was found
    [message] = heard.messages
    assert f"30 of {p.val_rows_of:,} rows" in message and "evaluation.final_rows=null" in message


def test_an_evaluation_that_is_slow_only_once_is_not_cut(data):
    trainer = make(data, SlowBackend(Time(), row_seconds=0.01, first_extra=100.0), **BOUNDED)
    trainer.evaluation.evaluate(final=True)
    assert trainer.progress.val_whole


@pytest.mark.parametrize(
    "settings",
    [
        {"evaluation__final_rows": None},
        {"budget__artifact_bytes": 16_000_000},
        {"budget__seconds": None, "training__max_steps": 5},
    ],
)
def test_whoever_asks_for_the_whole_split_counts_bytes_or_has_no_clock_gets_all_of_it(data, settings):
    trainer = make(data, SlowBackend(Time()), **{**BOUNDED, **settings})
    trainer.evaluation.evaluate(final=True)
    assert trainer.progress.val_whole and trainer.progress.val_rows == trainer.progress.val_rows_of


def test_a_number_of_final_rows_is_what_is_scored(data):
    trainer = make(data, SlowBackend(Time()), **{**BOUNDED, "evaluation__final_rows": 20})
    trainer.evaluation.evaluate(final=True)
    assert (trainer.progress.val_rows, trainer.progress.val_whole) == (20, False)


@pytest.mark.parametrize(("every", "at_start", "rows"), [(0, False, 20), (0, True, 8 + 20 + 8), (1, False, 20 + 8)])
def test_rows_that_nothing_is_compared_by_are_not_scored_beside_the_final_ones(data, every, at_start, rows):
    device = SlowBackend(Time())
    trainer = make(
        data, device, training__max_steps=5, evaluation__every=every, evaluation__at_start=at_start, evaluation__rows=8,
        evaluation__final_rows=20,
    )  # fmt: skip
    if at_start:
        trainer.evaluation.evaluate()
    trainer.evaluation.evaluate(final=True)
    assert device.scored == rows


def test_the_best_of_runs_that_evaluate_at_their_end_is_chosen_by_what_they_read_there(data):
    rows = {"evaluation__every": 0, "evaluation__rows": 8, "evaluation__final_rows": 20}
    trainer = make(data, SlowBackend(Time()), training__max_steps=5, **rows)
    trainer.evaluation.evaluate(final=True)
    before = trainer.progress.best_bpb
    device = SlowBackend(Time(), loss=0.9)  # of all rows, so that any part of them would say the same
    again = make(data, device, progress=trainer.progress, training__max_steps=9, **rows)
    assert again.evaluation.evaluate(final=True) and again.progress.best_bpb == again.progress.val_bpb < before
    assert device.scored == 20


@pytest.mark.parametrize("known", [True, False], ids=["", "of a version that did not say by which rows"])
def test_the_best_is_not_compared_with_scores_by_other_rows_of_an_earlier_session(data, known):
    first = make(data, SlowBackend(Time()), training__max_steps=5, evaluation__every=1, evaluation__rows=8)
    assert first.evaluation.evaluate()
    before, progress = first.progress.best_bpb, first.progress
    progress.best_by = progress.best_by if known else []
    more = {"evaluation__every": 1, "evaluation__rows": 20}
    again = make(data, SlowBackend(Time(), loss=9.0), progress=progress, training__max_steps=9, **more)
    assert again.evaluation.evaluate() == known
    assert again.progress.best_bpb == (again.progress.val_bpb if known else before) and again.progress.val_bpb > before
    assert not make(data, SlowBackend(Time(), loss=9.5), progress=progress, training__max_steps=9, **more).evaluation.evaluate()


def test_short_evaluations_are_never_cut(data):
    """Ten seconds are a wait that nobody minds, however short the training."""
    trainer = make(data, SlowBackend(Time(), row_seconds=0.05), **{**BOUNDED, "budget__seconds": 1.0})
    trainer.evaluation.evaluate(final=True)
    assert trainer.progress.val_whole


def test_evaluations_during_training_take_no_longer_than_the_training_so_far_and_say_so(data):
    device, heard = SlowBackend(Time(), row_seconds=1.0), Heard()
    trainer = make(data, device, reporter=heard, evaluation__every=1, evaluation__rows=20, **BOUNDED)
    trainer.run(Shutdown())
    p = trainer.progress
    assert p.step == 60 and p.evaluation_seconds <= 60 + 30
    assert 2 <= p.evaluation_seconds // 20 < 6  # some were made
    assert sum("skipped" in message for message in heard.messages) == 1


def test_an_evaluation_during_training_is_cut_likewise(data):
    trainer = make(data, SlowBackend(Time()), evaluation__rows=100, **BOUNDED)
    trainer.evaluation.evaluate()
    assert trainer.progress.val_rows == 30


def test_all_ranks_score_equally_many_rows_by_the_slowest_of_them(data):
    """Each rank sees its own speed, and all of them read what the slowest can."""
    import threading

    meeting = Meeting(2)
    found: dict[int, tuple[int, int]] = {}

    def work(rank: int, seconds: float) -> None:
        device = SlowBackend(Time(), ranks=Ranks(rank, 2), meeting=meeting, row_seconds=seconds)
        trainer = make(data, device, **{**BOUNDED, "budget__seconds": 20.0})
        trainer.evaluation.evaluate(final=True)
        found[rank] = (trainer.evaluation.artifact_rows() or 0, device.scored)

    threads = [threading.Thread(target=work, args=pair) for pair in ((0, 0.5), (1, 1.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert found == {0: (20, 10 + 8), 1: (20, 10 + 8)}


def test_a_step_that_takes_more_than_a_tenth_of_the_budget_is_told_once_with_what_to_change(data):
    heard = Heard()
    make(data, Device(Time(), [7.0]), reporter=heard, budget__seconds=60.0).run(Shutdown())
    [message] = heard.messages
    assert "7.0 s" in message and "budget.seconds=60" in message and "training.tokens_per_step" in message
    quick = Heard()
    make(data, Device(Time(), [9.0, 5.0]), reporter=quick, budget__seconds=60.0, training__max_steps=2).run(Shutdown())
    assert quick.messages == []  # the first step of a session is often slow


def test_a_first_step_that_takes_more_than_half_of_the_budget_is_told_because_it_may_be_the_only_one(data):
    heard = Heard()
    make(data, Device(Time(), [7.0]), reporter=heard, budget__seconds=10.0).run(Shutdown())
    assert [message for message in heard.messages if "a step takes 7.0 s" in message]


def test_a_partial_score_says_so_wherever_it_is_stored(train: Train, tmp_path: Path):
    result = train(tmp_path / "run", evaluation__final_rows=5, artifact__score=True)
    assert (result.val_rows, result.val_rows_of, result.artifact_rows) == (5, 38, 5)
    [last] = records(tmp_path / "run", "evaluation")
    assert (last["rows"], last["rows_of"]) == (5, 38)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "5 of 38 rows" in log
    again = train(tmp_path / "run", evaluation__final_rows=5, artifact__score=False)
    assert (again.val_rows, again.val_bpb) == (5, result.val_bpb)
    assert len(records(tmp_path / "run", "evaluation")) == 1  # it was known
    whole = train(tmp_path / "run", evaluation__final_rows=None)
    assert (whole.val_rows, whole.val_rows_of) == (38, 38) and whole.val_bpb != result.val_bpb


def test_a_run_that_was_judged_by_what_its_clock_allowed_is_not_judged_again(data):
    known = Progress(step=5, val_step=5, val_rows=30, val_rows_of=38, val_final=True)
    assert make(data, SlowBackend(Time()), known, **BOUNDED).evaluation.is_final()
    assert not make(data, SlowBackend(Time()), known, **{**BOUNDED, "evaluation__final_rows": None}).evaluation.is_final()
    assert not make(data, SlowBackend(Time()), Progress(step=6, val_step=5, val_final=True), **BOUNDED).evaluation.is_final()


def test_final_rows_change_no_weight(data, tmp_path):
    from tiny_runs import state_of, train_tiny

    for name, rows in (("part", 3), ("whole", None)):
        train_tiny(data, tmp_path / name, evaluation__final_rows=rows)
    assert state_of(tmp_path / "part") == state_of(tmp_path / "whole")


def test_evaluating_takes_nothing_from_the_budget(data):
    time = Time()
    device = SlowBackend(time, row_seconds=10.0)
    settings = {"evaluation__micro_batch": 4, "evaluation__every": 2, "evaluation__rows": 4, "evaluation__final_rows": None}
    trainer = make(data, device, budget__seconds=6.5, **settings)
    trainer.run(Shutdown())
    assert (trainer.progress.step, trainer.progress.elapsed_seconds) == (6, 6.0)
    assert time.now == 6.0 + 10.0 * device.scored and device.scored >= 12


@pytest.mark.parametrize("step_seconds", [1.0, 0.25])
def test_a_budget_has_as_many_points_on_a_fast_machine_as_on_a_slow_one_and_after_a_resume(data, step_seconds):
    def points(progress: Progress) -> list[float]:
        settings = {"budget__seconds": 12.0, "evaluation__points": 6, "evaluation__rows": 4, "evaluation__final_rows": 4}
        trainer, times = make(data, SlowBackend(Time(), [step_seconds]), progress=progress, **settings), []

        def note() -> bool:
            times.append(trainer.clock.elapsed - step_seconds)  # when the step began
            return False

        trainer.evaluation.evaluate = note
        trainer.run(Shutdown())
        return times

    assert points(Progress()) == [2, 4, 6, 8, 10]  # the sixth is the end of the run
    assert points(Progress(step=20, sample=80, elapsed_seconds=5.0)) == [6, 8, 10]
