"""Runs that send their numbers elsewhere: one run there across stops, resumes and moves, in the words of the door."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Train

from ingot.runs.checkpoints import find_checkpoint
from ingot.runs.reporter import EvaluationReport, Reporter, StepReport


class Package:
    """Takes the place of wandb and keeps what it is told."""

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.sent: list[tuple[int, dict[str, float]]] = []

    def init(self, **words: Any) -> Package:
        self.begun.append(words)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.sent.append((step, values))

    def finish(self, exit_code: int) -> None:
        self.begun[-1]["exit_code"] = exit_code


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Package:
    package = Package()
    monkeypatch.setitem(sys.modules, "wandb", package)  # type: ignore[arg-type]
    return package


def test_a_run_that_is_stopped_resumed_and_moved_is_one_run_there(train: Train, tmp_path: Path, wandb: Package) -> None:
    class Stop(Reporter):
        def step(self, report: StepReport, log: bool) -> None:
            if report.step == 5:
                os.kill(os.getpid(), signal.SIGTERM)

    train(tmp_path / "one", Stop(), tracking__wandb_project="words")
    (tmp_path / "one" / "wandb.json").unlink()  # the checkpoint knows it too
    train(tmp_path / "one", tracking__wandb_project="words", training__max_steps=8)
    (tmp_path / "one").rename(tmp_path / "two")
    train(tmp_path / "two", tracking__wandb_project="words", training__max_steps=10)
    assert len({words["id"] for words in wandb.begun}) == 1 and len(wandb.begun) == 3
    assert find_checkpoint(tmp_path / "two").progress["wandb_id"] == wandb.begun[0]["id"]
    losses = [step for step, values in wandb.sent if "train/loss" in values]
    assert losses == list(range(1, 11)) and all(words["exit_code"] == 0 for words in wandb.begun)
    assert any("eval/bpb" in values for _, values in wandb.sent)
    assert wandb.begun[0]["config"]["model"]["width"] == 16


def test_runs_that_begin_with_the_state_of_another_are_runs_of_their_own_there(
    train: Train, tmp_path: Path, wandb: Package
) -> None:
    train(tmp_path / "trunk", tracking__wandb_project="words", training__max_steps=4)
    branches = {"training__resume": str(tmp_path / "trunk"), "tracking__wandb_project": "words"}
    for name in ("one", "two"):
        train(tmp_path / name, **branches, training__max_steps=6)
    train(tmp_path / "one", **branches, training__max_steps=8)
    trunk, one, two, again = (words["id"] for words in wandb.begun)
    assert len({trunk, one, two}) == 3 and again == one
    assert find_checkpoint(tmp_path / "two").progress["wandb_id"] == two


def test_a_door_chooses_what_is_sent_and_under_which_names(train: Train, tmp_path: Path, wandb: Package) -> None:
    class Front(Reporter):
        def tracked(self, report: StepReport | EvaluationReport) -> dict[str, float]:
            return {"l": report.val_loss} if isinstance(report, EvaluationReport) else {}

        def tracked_config(self) -> dict[str, Any]:
            return {"key": 1}

    train(tmp_path / "run", Front(), tracking__wandb_project="words", tracking__wandb_run_name="x", training__max_steps=2)
    [(step, values)] = wandb.sent
    assert (step, list(values), wandb.begun[0]["config"], wandb.begun[0]["name"]) == (2, ["l"], {"key": 1}, "x")


def test_a_run_that_fails_is_a_failed_one_there(train: Train, tmp_path: Path, wandb: Package) -> None:
    class Bug(Reporter):
        def step(self, report: StepReport, log: bool) -> None:
            raise KeyError("a bug")

    with pytest.raises(KeyError):
        train(tmp_path / "run", Bug(), tracking__wandb_project="words")
    assert wandb.begun[0]["exit_code"] == 1
