"""A model of one's own in golf: MODEL_FILE trains it, the artifact holds it, and a submission's script carries it."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from golf_toys import TOY, Golf

from ingot.compat.golf.main import main
from ingot.compat.golf.variables import RANKS, VARIABLES

LIKE_THE_TOY = '''
"""The toy's own model: é."""
from ingot.model.golf import Golf


class Model(Golf):
    def __init__(self, vocab_size, context, layers, heads, width):
        super().__init__(vocab_size=vocab_size, context=context, layers=layers, heads=heads, width=width, kv_heads=1)
'''
OWN = {"MODEL_FILE": "mine.py", "NUM_KV_HEADS": "4"}


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(LIKE_THE_TOY)
    return tmp_path / "mine.py"


def test_a_file_with_the_baselines_model_trains_as_the_baseline(golf: Golf, mine: Path, tmp_path: Path) -> None:
    baseline, own = golf(RUN_ID="baseline"), golf(**OWN, RUN_ID="own")
    assert own.losses == baseline.losses and own.exact == baseline.exact
    assert (tmp_path / "logs/own/model.py").read_text() == LIKE_THE_TOY
    assert "class Model(Golf)" in (tmp_path / "logs/own.txt").read_text()


OPTIMIZER = (
    LIKE_THE_TOY
    + """

    def make_optimizers(self, groups):
        import torch
        from ingot.config.schema import OptimizerSection
        from ingot.optim.muon import Muon

        muon = [group for group in groups if group["optimizer"] == "muon"]
        rest = [group for group in groups if group["optimizer"] != "muon"]
        return [%s, torch.optim.AdamW(rest, fused=True)]
"""
)


def test_optimizers_of_ones_own_take_the_groups_and_rates_of_the_variables(golf: Golf, mine: Path) -> None:
    baseline = golf(RUN_ID="baseline")
    mine.write_text(OPTIMIZER % "Muon(muon, OptimizerSection())")
    same = golf(**OWN, RUN_ID="same")
    mine.write_text(OPTIMIZER % "torch.optim.SGD(muon)")
    other = golf(**OWN, RUN_ID="other")
    assert same.losses == baseline.losses != other.losses


def test_the_script_of_such_a_run_carries_its_model_and_scores_alone(golf: Golf, mine: Path, tmp_path: Path) -> None:
    own, place = golf(**OWN), tmp_path / "elsewhere"
    place.mkdir()
    (place / "train_gpt.py").write_bytes((tmp_path / "logs/toy/train_gpt.py").read_bytes())
    (tmp_path / "train_gpt_model.py").write_text("of another submission, which ran here")
    mine.unlink()
    ended = alone(golf, place, EVAL_ONLY_PATH="final_model.int8.ptz", RUN_ID="again")
    assert ended.returncode == 0, ended.stderr
    assert f"val_bpb:{own.exact[1]:.8f}" in ended.stdout
    assert (place / "train_gpt_model.py").read_text() == LIKE_THE_TOY


def alone(golf: Golf, place: Path, **given: str) -> subprocess.CompletedProcess[str]:
    """train_gpt.py of a folder, without the package and started in the folder that is worked in."""
    environment = {name: value for name, value in golf.environment().items() if name not in (*TOY, "PYTHONPATH")}
    return subprocess.run([sys.executable, place / "train_gpt.py"], env=environment | given, capture_output=True, text=True)


@pytest.mark.parametrize(("place", "code"), [("there", 2), ("nowhere", 4)])
def test_a_model_that_cannot_be_put_beside_the_script_is_refused_in_a_line(
    golf: Golf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, code: int
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/train_gpt_model.py").write_text("another model")
    monkeypatch.setattr(sys, "argv", [f"{place}/train_gpt.py"])
    carrying = Golf(golf.toys, main=partial(main, carried=LIKE_THE_TOY))
    assert f"{place}/train_gpt_model.py" in carrying.refuses(code, MODEL_FILE="train_gpt_model.py")
    assert (tmp_path / "there/train_gpt_model.py").read_text() == "another model" and not (tmp_path / "logs").exists()


def test_a_submission_is_packed_of_such_runs(golf: Golf, mine: Path, tmp_path: Path) -> None:
    golf(**OWN)
    environment = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, *RANKS)}
    words = ["golf", "pack", "logs/toy", "--name", "Own", "--author", "A", "--github-id", "a", "-o", "records/own"]
    ended = subprocess.run([sys.executable, "-m", "ingot", *words], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "class Model(Golf)" in (tmp_path / "records/own/train_gpt.py").read_text()


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        (
            {"NUM_KV_HEADS": "1"},
            2,
            "NUM_KV_HEADS has no effect on the model of MODEL_FILE=mine.py; unset it and set the value in that file",
        ),
        ({"MODEL_FILE": "nowhere.py"}, 2, "MODEL_FILE=nowhere.py cannot be read: No such file or directory"),
    ],
)
def test_what_such_a_model_cannot_hear_and_files_that_are_not_there_are_refused(
    golf: Golf, mine: Path, tmp_path: Path, given: dict[str, str], code: int, said: str
) -> None:
    assert golf.refuses(code, **OWN | given) == said
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("name", ["MODEL_FILE", "EVAL_ONLY_PATH"])
def test_a_pipe_is_refused_and_not_waited_for(golf: Golf, mine: Path, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    said = golf.refuses(2 if name == "MODEL_FILE" else 4, **OWN | {name: "pipe.py"})
    assert "pipe.py" in said and "pipe or a device" in said


def test_a_model_that_sees_the_future_is_refused_by_the_name_of_its_variable(golf: Golf, mine: Path, tmp_path: Path) -> None:
    leak = "\n    def forward(self, tokens, targets=None):\n        return super().forward(tokens.flip(1), targets)\n"
    mine.write_text(LIKE_THE_TOY + leak)
    assert golf.refuses(2, **OWN).startswith("MODEL_FILE=mine.py: Model sees the future")
    assert not (tmp_path / "logs").exists()
