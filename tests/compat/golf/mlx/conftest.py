"""What the tests of train_gpt_mlx.py share: the script, and a run of it that is complete."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from golf_mlx import MLX, MLXGolf
from golf_toys import Ran, manifest, run_here

from ingot.compat.golf.mlx_script import main


@pytest.fixture(scope="session")
def installed() -> None:
    """Skip, with the reason, where mlx is not."""
    pytest.importorskip("mlx.core", reason="mlx is not installed: pip install 'ingot-lm[mlx]'", exc_type=ImportError)


@pytest.fixture
def mlx(installed: None, toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MLXGolf:
    """train_gpt_mlx.py on the toys, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return MLXGolf(toys, "train_gpt_mlx.py", main)


@pytest.fixture(scope="session")
def whole(installed: None, toys: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    """The folder of a run that nothing happened to, and what it printed."""
    folder = tmp_path_factory.mktemp("mlx")
    with chdir(folder):
        ran = run_here(toys, main=main, **MLX)
    assert ran.code == 0, ran.err
    return folder, ran


@pytest.fixture
def listed_shards(toys: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the toy shards with a manifest two folders above that says something of them."""

    def make(**said: Any) -> Path:
        folder = tmp_path / "data/datasets/toy"
        shutil.copytree(toys / "data/datasets/toy", folder, dirs_exist_ok=True)
        manifest(folder, **said)
        return folder

    return make
