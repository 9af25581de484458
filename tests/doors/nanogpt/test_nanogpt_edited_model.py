"""An edited model.py beside train.py: people expect it to be trained, so they are told how it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ingot.doors.nanogpt.train import is_edited, main

ROOT = Path(__file__).parents[3]
EDITED = "from ingot.doors.nanogpt.model import GPT as Base\n\n\nclass GPT(Base):\n    pass\n"


def test_the_model_py_of_the_repository_is_not_taken_for_an_edited_one():
    assert not is_edited(ROOT / "model.py") and not is_edited(ROOT / "nowhere.py")


@pytest.mark.parametrize("text", [EDITED, EDITED.replace("class", "def").replace("(Base)", "()")])
def test_an_edited_model_py_is_named_with_the_way_that_trains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
):
    (tmp_path / "model.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    assert main(["--dataset=nowhere", "--device=cpu"]) != 0
    warning, *_ = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"train.py: warning: {tmp_path / 'model.py'} has code of its own, which train.py does not run")
    assert f"ingot train --recipe shakespeare-char --model.file {tmp_path / 'model.py'}" in warning
