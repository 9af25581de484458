"""A small text, and what makes the smallest run of it."""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Callable, Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from ingot.cli.main import run
from ingot.config.loading import ResolvedConfig, load_config
from ingot.data.prepare.pipeline import write_dataset
from ingot.data.tokenizers import ByteTokenizer

sys.path.append(str(Path(__file__).parents[1] / "data"))  # the toy tokenizers

TINY = {
    "model.layers": 1, "model.heads": 2, "model.width": 16, "data.seq_len": 16, "training.max_steps": 6,
    "training.tokens_per_step": 64, "training.save_every": 2, "training.device": "cpu", "training.threads": 1,
    "tracking.log_every": 1, "evaluation.every": 0, "artifact.write": False,
}  # fmt: skip


VARY = ["sweep", "--vary", "data.sampling=shuffle,redraw", "--seeds", "1,2"]


def write_text(folder: Path, seed: int) -> Path:
    draw = random.Random(seed)
    pieces = (("train" if i else "val", "".join(draw.choices("abcde \n", k=600 + seed))) for i in range(5))
    write_dataset(pieces, folder, ByteTokenizer(), source={})
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "set", 0)


@pytest.fixture(scope="session")
def other_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "other", 1)


def words_of(data: Path) -> list[str]:
    return [f"--{name}={str(value).lower()}" for name, value in {**TINY, "data.path": data}.items()]


@pytest.fixture
def tiny_words(data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The same as words of a verb, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return words_of(data)


@pytest.fixture(scope="session")
def swept_once(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The folder in which a sweep of two arms with two seeds was run, and what it printed."""
    folder, out, err = tmp_path_factory.mktemp("swept"), io.StringIO(), io.StringIO()
    with chdir(folder), redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        run([*VARY, *words_of(data)])
    assert not ended.value.code, err.getvalue()
    return folder, out.getvalue(), err.getvalue()


@pytest.fixture
def resolve(data: Path) -> Callable[[Mapping[str, Any]], ResolvedConfig]:
    """The config of a tiny run with some settings more."""
    return lambda settings: load_config(overrides={**TINY, "data.path": str(data)}, sweep=settings, environment={})
