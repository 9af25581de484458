"""What a run leaves in its folder and takes from another's: kinds of checkpoints, states copied in, what --force deletes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tiny_runs import Train

from ingot.runs.checkpoints import read_kind
from ingot.runs.report import Reporter, StepReport
from ingot.runs.steps import saved_steps


class Listener(Reporter):
    """Notes saves and messages, and sends this process SIGTERM at a step."""

    def __init__(self, stop_at: int = -1) -> None:
        self.stop_at, self.saves, self.lines = stop_at, list[tuple[str, str]](), list[str]()

    def step(self, report: StepReport, log: bool) -> None:
        if report.step == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def saved(self, path: Path, kind: str = "regular") -> None:
        self.saves.append((path.name.removeprefix("step-0000"), kind))

    def message(self, text: str) -> None:
        self.lines.append(text)


def kinds_of(run: Path) -> dict[int, str]:
    return {step: read_kind(path) for step, path in saved_steps(run / "checkpoints").items()}


def test_a_save_says_whether_it_was_on_the_way_by_a_stop_or_at_the_end(train: Train, tmp_path: Path) -> None:
    heard = Listener(stop_at=6)
    train(tmp_path / "run", heard)
    train(tmp_path / "run", heard, training__max_steps=10)
    assert kinds_of(tmp_path / "run") == {4: "regular", 7: "shutdown", 8: "regular", 10: "final"}
    assert heard.saves == [("0004", "regular"), ("0007", "shutdown"), ("0008", "regular"), ("0010", "final")]


def test_a_stop_at_a_step_that_was_just_saved_makes_its_checkpoint_one_of_a_stop(train: Train, tmp_path: Path) -> None:
    heard = Listener(stop_at=7)
    train(tmp_path / "run", heard)
    assert kinds_of(tmp_path / "run") == {4: "regular", 8: "shutdown"}
    assert heard.saves == [("0004", "regular"), ("0008", "regular"), ("0008", "shutdown")]


def test_a_completed_run_that_is_given_more_steps_goes_on_from_its_newest_checkpoint(train: Train, tmp_path: Path) -> None:
    unjudged = {"evaluation__at_end": False}
    train(tmp_path / "run", training__max_steps=6, **unjudged)
    train(tmp_path / "run", Listener(stop_at=10), **unjudged)
    assert kinds_of(tmp_path / "run") == {4: "regular", 6: "final", 8: "regular", 11: "shutdown"}
    assert train(tmp_path / "run", training__max_steps=14, **unjudged).total_steps == 14
    assert kinds_of(tmp_path / "run") == {4: "regular", 8: "regular", 11: "shutdown", 12: "regular", 14: "final"}
