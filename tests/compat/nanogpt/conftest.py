"""Fixtures of the nanoGPT tests: a working folder with a small dataset below data/."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import once
from small_runs import Train, make_data


@pytest.fixture(scope="session")
def prepared(shared: Path) -> Path:
    """A folder with data/words, made once."""
    return once(shared / "nanogpt-words", lambda: make_data(shared / "nanogpt-words"))


@pytest.fixture
def work(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one's own to work in, which finds the data."""
    (tmp_path / "data").symlink_to(prepared / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def train(work: Path, capfd: pytest.CaptureFixture[str]) -> Train:
    return Train(capfd)
