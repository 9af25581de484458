"""A stop is heard in the middle of what takes long, and what was broken off is done by the next session."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import TINY, Train, records, state_of, write_text

from ingot.config.loading import load_config
from ingot.errors import CheckpointError, DataError, RunError
from ingot.runs.reporter import Reporter
from ingot.runs.state import State, read_state
from ingot.runs.view import Run
from ingot.runtime.files import to_json
from ingot.train.start import run

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


def test_a_stop_ends_the_watch_over_another_hosts_heartbeat_and_leaves_its_folder_as_it_was(train: Train, tmp_path: Path) -> None:
    folder, now = tmp_path / "run", datetime.now(UTC).isoformat()
    train(folder, training__max_steps=4)
    mine = read_state(folder)
    assert mine is not None
    there: State = replace(mine, status="running", host="farm-7", boot_id="another boot", updated_at=now, heartbeat_seconds=3600)
    (folder / "state.json").write_text(to_json(asdict(there)))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    result = train(folder, At("watching for", ask), training__max_steps=6)
    assert (result.status, result.stop_reason, result.run_dir) == ("stopped", "signal:SIGTERM", folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("when", ["opening the data", "building the model"])
@pytest.mark.parametrize("before", [0, 6])
def test_a_request_that_comes_before_the_folder_is_claimed_is_obeyed_once(
    train: Train, tmp_path: Path, unbroken, when: str, before: int
) -> None:
    folder = tmp_path / "some" / "run"
    if before:
        train(folder, At("training", ask), training__priming_steps=0)
    stopped = read_state(folder)

    def request() -> None:
        with pytest.raises(RunError, match=r"is not running: .* only a run that is starting there right now"):
            Run.open(folder, begun=False).stop()

    result = train(folder, At(when, request))
    assert (result.status, result.stop_reason) == ("stopped", "stop_file")
    assert read_state(folder) == stopped and not (folder / "stop").exists()
    assert train(folder).status == "completed" and state_of(folder) == unbroken()


def test_a_request_that_comes_once_the_folder_is_claimed_stops_the_run_before_its_first_step(
    train: Train, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    train(folder, training__max_steps=4)
    told: list[object] = []
    resolved = load_config(
        python={**TINY, "data.path": str(tmp_path / "data"), "training.output_dir": str(folder)}, environment={}
    )
    write_text(tmp_path / "data", seed=0)
    result = run(resolved, At("--force deletes", lambda: told.append(Run.open(folder).stop())), force=True)
    assert told == [None]  # it is starting
    assert (result.status, result.stop_reason, result.total_steps) == ("stopped", "stop_file", 0)


def test_a_request_that_an_earlier_session_left_stops_no_later_one(train: Train, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, training__max_steps=4)
    with pytest.raises(RunError, match="its status is completed"):
        Run.open(folder).stop()
    assert (folder / "stop").is_file()
    os.utime(folder / "stop", (time.time() - 1, time.time() - 1))
    assert train(folder).status == "completed" and not (folder / "stop").exists()


def test_a_start_that_fails_leaves_no_folder_and_no_request(train: Train, tmp_path: Path) -> None:
    folder = tmp_path / "some" / "run"

    def fail() -> None:
        assert folder.is_dir()
        with suppress(RunError):
            Run.open(folder, begun=False).stop()
        raise DataError("the disk is gone")

    with pytest.raises(DataError):
        train(folder, At("building the model", fail))
    assert not folder.parent.exists()


def test_a_folder_with_other_files_in_it_takes_no_request(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not a run folder"):
        Run.open(tmp_path, begun=False)
    assert not (tmp_path / "stop").exists()
