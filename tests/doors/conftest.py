"""What the whole-program tests share: a small dataset, and one run on it that is left in peace."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from programs import Ingot, checkpoints, once, train_words


@pytest.fixture
def ingot(tmp_path: Path, shared: Path) -> Iterator[Ingot]:
    programs = Ingot(tmp_path / "programs", shared / "cache")
    yield programs
    programs.close()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all workers of a test session."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def data(shared: Path) -> Path:
    """A prepared folder: 45,000 bytes to train on, 5,000 to be judged by."""

    def make() -> None:
        draw = random.Random(0)
        words = ["".join(draw.choices("abcdefghiklmnoprstuvwy", k=draw.randint(2, 8))) for _ in range(200)]
        (shared / "text.txt").write_text("".join(draw.choice(words) + draw.choice("      \n") for _ in range(8500)))
        programs = Ingot(shared / "prepare", shared / "cache")
        programs("data", "prepare", "--input", shared / "text.txt", "--tokenizer", "byte", "--output", shared / "data")

    return once(shared / "data", make)


@pytest.fixture(scope="session")
def reference(shared: Path, data: Path) -> Path:
    """The small demo trained by one process, started as users do, that nothing happened to; its stdout lies beside it."""

    def make() -> None:
        programs = Ingot(shared / "train", shared / "cache")
        program = programs(*train_words(data, shared / "reference"), "--json", fresh=True)
        (shared / "reference.json").write_text(program.stdout)

    return once(shared / "reference", make)


@pytest.fixture
def until(tmp_path: Path) -> Callable[[Path, int], Path]:
    """A copy of a run folder as a kill after the checkpoint of a step left it."""

    def call(run: Path, step: int) -> Path:
        copy = tmp_path / f"{run.name}-until-{step}"
        shutil.copytree(run, copy)
        shutil.rmtree(copy / "artifact")
        for later in [path for saved, path in checkpoints(copy).items() if saved > step]:
            shutil.rmtree(later)
        return copy

    return call
