"""A stop is heard in the middle of what takes long, and what was broken off is done by the next session."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Train, records, state_of

from ingot.runs.report import Reporter
from ingot.runs.state import State, read_state
from ingot.runtime.files import to_json

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
