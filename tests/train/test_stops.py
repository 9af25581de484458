"""A stop is heard in the middle of what takes long, and what was broken off is done by the next session."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Train, records, state_of

from ingot.errors import DataError, RunError
from ingot.runs.folder import RunFolder
from ingot.runs.reporter import Reporter
from ingot.runs.view import Run

# A model whose forward pass asks for a stop while the file `asks` is there, and takes seconds then.
SLOW = """
import os, pathlib, signal, time
from ingot.model.gpt2 import GPT2

class Model(GPT2):
    def __init__(self, vocab_size, context, folder, layers, heads, width):
        super().__init__(vocab_size, context, layers=layers, heads=heads, width=width)
        self.folder = pathlib.Path(folder)

    def forward(self, tokens, targets=None):
        if (self.folder / "asks").exists():
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(300):
                time.sleep(0.01)
            (self.folder / "ended").touch()
        return super().forward(tokens, targets)
"""


class At(Reporter):
    """Does something when the run says what it waits for, or a line with these words, and counts priming steps."""

    def __init__(self, words: str, act: Callable[[], Any]) -> None:
        self.words, self.act, self.primed_steps, self.acted = words, act, 0, False

    def waiting(self, what: str, done: int = 0, total: int = 0) -> None:
        self._look(what)

    def message(self, text: str) -> None:
        self._look(text)

    def primed(self, done: int, total: int) -> None:
        self.primed_steps = done
        self._look("primed")

    def _look(self, said: str) -> None:
        if self.words in said and not self.acted:
            self.acted = True
            self.act()


def ask() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_priming_ends_at_the_step_that_a_stop_comes_in(train: Train, tmp_path: Path, unbroken) -> None:
    reporter = At("primed", ask)
    result = train(tmp_path / "run", reporter, training__priming_steps=9, model__dropout=0.2)
    assert (result.status, result.stop_reason, result.total_steps) == ("stopped", "signal:SIGTERM", 0)
    assert reporter.primed_steps == 1
    train(tmp_path / "run", training__priming_steps=2, model__dropout=0.2)
    assert state_of(tmp_path / "run") == unbroken(model__dropout=0.2)


def test_a_long_priming_step_is_broken_off(train: Train, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    own = {"model__file": str(tmp_path / "slow.py"), "model__settings__folder": str(tmp_path), "training__priming_steps": 2}
    result = train(tmp_path / "run", At("priming", (tmp_path / "asks").touch), **own)
    assert (result.status, result.total_steps) == ("stopped", 0)
    assert not (tmp_path / "ended").exists()
    (tmp_path / "asks").unlink()
    assert train(tmp_path / "run", **own).status == "completed"


@pytest.mark.parametrize("every", [4, 0], ids=["on-the-way", "at-the-end"])
def test_a_long_sample_is_broken_off_and_written_with_its_evaluation_by_the_next_session(
    train: Train, tmp_path: Path, every: int, unbroken
) -> None:
    settings = {"evaluation__sample_tokens": 40, "evaluation__every": every, "training__max_steps": 8}
    before = unbroken(**settings)
    result = train(tmp_path / "run", At("sampling", ask), **settings)
    assert result.status == "stopped" and result.total_steps == (every or 8)
    assert records(tmp_path / "run", "evaluation") == [] and not list((tmp_path / "run" / "samples").iterdir())
    train(tmp_path / "run", **settings)
    told = [[(r["step"], r["val_bpb"], r["best"]) for r in records(tmp_path / run, "evaluation")] for run in ("run", "unbroken")]
    assert told[0] == told[1]
    texts = [{path.name: path.read_text() for path in (tmp_path / run / "samples").iterdir()} for run in ("run", "unbroken")]
    assert texts[0] == texts[1] and len(texts[0]) == len(told[0])
    assert state_of(tmp_path / "run") == before


@pytest.mark.parametrize("scored", [True, False])
def test_a_stop_after_the_last_step_leaves_the_score_and_the_artifact_to_the_next_session(
    train: Train, tmp_path: Path, unbroken, scored: bool
) -> None:
    stopped = train(tmp_path / "run", At("saving", ask), evaluation__at_end=scored)
    assert (stopped.status, stopped.stop_reason, stopped.total_steps) == ("stopped", "signal:SIGTERM", 20)
    assert stopped.artifact_path is None and records(tmp_path / "run", "evaluation") == []
    again = train(tmp_path / "run", evaluation__at_end=scored)
    assert again.status == "completed" and again.artifact_path is not None
    assert [record["step"] for record in records(tmp_path / "run", "evaluation")] == [20] * scored
    assert state_of(tmp_path / "run") == unbroken()


def test_a_request_that_an_earlier_session_left_stops_no_later_one_and_a_run_that_has_ended_takes_none(
    train: Train, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    train(folder, training__max_steps=4)
    with pytest.raises(RunError, match="its status is completed"):
        Run.open(folder).stop()
    assert not (folder / "stop").exists()
    RunFolder(folder).ask_to_stop()
    assert train(folder).status == "completed" and not (folder / "stop").exists()


def test_a_start_that_fails_leaves_no_folder(train: Train, tmp_path: Path) -> None:
    def fail() -> None:
        raise DataError("the disk is gone")

    with pytest.raises(DataError):
        train(tmp_path / "some" / "run", At("building the model", fail))
    assert not (tmp_path / "some").exists()
