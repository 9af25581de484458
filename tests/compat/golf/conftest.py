"""What the tests of golf share: toys to play with, and a folder to do it in."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest
from programs import once

sys.path.append(str(Path(__file__).parents[2] / "data"))  # the toy tokenizers

from golf_toys import Golf, Ran, make_toys, run_here

from ingot.compat.golf.log import RunLog


@pytest.fixture(scope="session")
def toys(shared: Path) -> Path:
    """Shards and a tokenizer, made once and only read."""
    return once(shared / "golf-toys", lambda: make_toys(shared / "golf-toys"))


@pytest.fixture
def golf(toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Golf:
    """train_gpt.py on the toys, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return Golf(toys)


@pytest.fixture(scope="session")
def once_finished(toys: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    """The folder of a toy run that is complete, and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    with chdir(folder):
        return folder, run_here(toys)


@pytest.fixture
def finished(golf: Golf, once_finished: tuple[Path, Ran], tmp_path: Path) -> Ran:
    """A toy run that is complete; its files are in the folder that is worked in."""
    shutil.copytree(once_finished[0], tmp_path, dirs_exist_ok=True)
    return once_finished[1]


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SIGTERM, as a scheduler sends it, at the line of the log that begins as the variable STOP_AT says."""
    write = RunLog.line

    def line(run_log: RunLog, text: str, console: bool = True) -> None:
        write(run_log, text, console)
        if "STOP_AT" in os.environ and text.startswith(os.environ["STOP_AT"]):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(RunLog, "line", line)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # should it come too late, the tests go on
    yield
    signal.signal(signal.SIGTERM, before)
