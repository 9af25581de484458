"""What the tests of the loop share: a small dataset and a way to train on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import Train, state_of, train_tiny, write_text


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "data", seed=0)


@pytest.fixture(scope="session")
def other_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("other") / "data", seed=1)


@pytest.fixture
def train(data: Path) -> Train:
    return partial(train_tiny, data)


@pytest.fixture
def unbroken(train: Train, tmp_path: Path) -> Callable[..., dict[str, str]]:
    """The state that a run with these settings comes to when nothing happens to it."""

    def call(**settings: Any) -> dict[str, str]:
        train(tmp_path / "unbroken", **settings)
        return state_of(tmp_path / "unbroken")

    return call
