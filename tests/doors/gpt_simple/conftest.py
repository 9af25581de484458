"""What the tests of the gpt-simple door share: small data, and a run of the original on it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from door import Door
from original import SITE, make_data, run_original, write_config
from programs import once

Original = Callable[..., list[Any]]


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


# What the original computes with the weights of its last checkpoint, for a text and for ids.
LOOK = """
import torch
from gpt_simple import load_for_inference, generate
model, tokenizer, config = load_for_inference("out", device="cpu")
ids = torch.arange(24).reshape(2, 12) * 7
with torch.no_grad():
    said.append({"logits": model(ids)[0].tolist()})
said.append({"texts": generate(model, tokenizer, ["00001 ab", "00002"], max_new_tokens=12, do_sample=False)})
"""


@pytest.fixture(scope="session")
def their_run(original: Original, gpts_data: Path, shared: Path) -> Path:
    """A folder of which out/ is a run of the original, 12 steps of 40, and said.json what it computes with it."""

    def make() -> None:
        import json

        folder = shared / "their-run"
        folder.mkdir()
        for name in ("tok", "data"):
            (folder / name).symlink_to(gpts_data / name)
        write_config(folder / "config.yaml", training={"max_steps": 12})
        commands: Sequence[Sequence[str] | str] = [["train", "--config", "config.yaml", "--skip-runtime-probe"], LOOK]
        (folder / "said.json").write_text(json.dumps(original(commands, folder)))

    return once(shared / "their-run", make)


@pytest.fixture
def their_copy(their_run: Path, gpts: Path) -> Path:
    """A folder to work in with a copy of the original's run in out/."""
    shutil.copytree(their_run / "out", gpts / "out")
    return gpts


@pytest.fixture
def door(gpts: Path, capfd: pytest.CaptureFixture[str]) -> Door:
    """`gpt-simple`, in a folder with tok/, data/ and config.yaml."""
    write_config(gpts / "config.yaml")
    return Door(capfd)
