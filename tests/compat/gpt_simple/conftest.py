"""Fixtures of the gpt-simple tests: small data, and a run of the original on it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli_program import Cli
from original import LOOK, NAMES, PHASES, SITE, Original, TheirRun, make_data, run_original, write_config, write_tokenizers
from programs import once

from ingot.compat.gpt_simple.main import main


@pytest.fixture(scope="session")
def original() -> Original:
    """Runs commands of the original gpt-simple in one process; a test that asks for it is skipped where it is missing."""
    if not (SITE / "gpt_simple").is_dir():
        pytest.skip(f"the original gpt-simple is not in {SITE}; make test installs it there")
    return run_original


@pytest.fixture(scope="session")
def gpts_data(shared: Path) -> Path:
    """A folder with tok/ and data/, made once."""
    return once(shared / "gpts", lambda: make_data(shared / "gpts"))


@pytest.fixture
def gpts(gpts_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one's own to work in, which finds tok/ and data/."""
    for name in ("tok", "data"):
        (tmp_path / name).symlink_to(gpts_data / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def their_run(original: Original, gpts_data: Path, shared: Path) -> TheirRun:
    """Twelve steps of the original, made once; tests only look at it."""

    def make() -> None:
        folder = shared / "their-run"
        folder.mkdir()
        for name in ("tok", "data"):
            (folder / name).symlink_to(gpts_data / name)
        write_config(folder / "config.yaml", data={"curriculum": PHASES, "allow_budget_mismatch": True})
        write_tokenizers(folder)
        train = ["train", "--config", "config.yaml", "--skip-runtime-probe"]
        (folder / "said.json").write_text(json.dumps(original([train, LOOK, NAMES], folder)))

    folder = once(shared / "their-run", make)
    trained, *said = json.loads((folder / "said.json").read_text())
    assert trained["code"] == 0, trained["out"]
    return TheirRun(folder, *said)


@pytest.fixture
def their_copy(their_run: TheirRun, gpts: Path) -> Path:
    """A folder to work in with a copy of the original's run in out/, and its config.yaml."""
    shutil.copy(their_run.folder / "config.yaml", gpts)
    shutil.copytree(their_run.folder / "out", gpts / "out")
    return gpts


@pytest.fixture(scope="session")
def our_run(gpts_data: Path, shared: Path) -> Path:
    """A run of twelve steps by `gpt-simple train` of ours in out/, made once; tests only look at it."""

    def make() -> None:
        folder = shared / "our-run"
        folder.mkdir()
        data = {"path": str(gpts_data / "data"), "tokenizer": str(gpts_data / "tok")}
        training = {"output_dir": str(folder / "out"), "logging_steps": 3}
        config = write_config(folder / "config.yaml", data=data, training=training)
        assert main(["-q", "train", "--config", str(config)]) == 0

    return once(shared / "our-run", make)


@pytest.fixture
def our_copy(our_run: Path, gpts: Path) -> Path:
    """A folder to work in with a copy of our run in out/, and its config.yaml."""
    shutil.copytree(our_run / "out", gpts / "out")
    write_config(gpts / "config.yaml")
    return gpts


@pytest.fixture
def cli(gpts: Path, capfd: pytest.CaptureFixture[str]) -> Cli:
    """`gpt-simple`, in a folder with tok/, data/ and config.yaml."""
    write_config(gpts / "config.yaml")
    return Cli(capfd)
