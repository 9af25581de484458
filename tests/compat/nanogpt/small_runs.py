"""Small runs of train.py in this process, and how to read what they printed."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ingot.compat.nanogpt.prepare import shakespeare_char
from ingot.compat.nanogpt.train import main

ROOT = Path(__file__).parents[3]
ITERATION = re.compile(r"iter (\d+): loss (\d+\.\d{4}), time (\d+\.\d\d)ms, mfu (-?\d+\.\d\d)%")
EVALUATION = re.compile(r"step (\d+): train loss (\d+\.\d{4}), val loss (\d+\.\d{4})")
SMALL: dict[str, Any] = {
    "dataset": "words", "device": "cpu", "n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16, "batch_size": 4,
    "gradient_accumulation_steps": 2, "max_iters": 8, "lr_decay_iters": 8, "warmup_iters": 2, "learning_rate": 1e-2,
    "min_lr": 1e-3, "eval_interval": 4, "eval_iters": 2, "mfu_peak": 1e12,
}  # fmt: skip


def words(**keys: object) -> list[str]:
    """The arguments of a small run, some keys set otherwise."""
    return [f"--{name}={value}" for name, value in {**SMALL, **keys}.items()]


def make_data(folder: Path) -> None:
    """data/words below a folder: 4,500 characters of a made-up language to train on, 500 to be judged by."""
    draw = random.Random(0)
    lexicon = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 5))) for _ in range(30)]
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.txt"
    text.write_text("".join(draw.choice(lexicon) + draw.choice("  \n") for _ in range(2000))[:5000])
    assert shakespeare_char(folder / "data" / "words", ["--input", str(text)]) == 0


class Ran:
    """What a run of train.py printed."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def losses(self) -> dict[int, str]:
        return {int(number): loss for number, loss, _, _ in ITERATION.findall(self.out)}

    @property
    def evaluations(self) -> dict[int, tuple[str, str]]:
        return {int(number): (train, val) for number, train, val in EVALUATION.findall(self.out)}


class Train:
    """Runs train.py as it would be run in the folder that is worked in."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._captured = capfd

    def __call__(self, arguments: Sequence[str], code: int = 0) -> Ran:
        self._captured.readouterr()
        found = main(arguments)
        out, err = self._captured.readouterr()
        assert found == code, err
        return Ran(found, out, err)


def shared(name: str) -> Path:
    """A file of the data that is shared and not part of the project; without it a test is skipped."""
    path = Path(os.environ.get("INGOT_TEST_DATA", ROOT.parent / "shared/data")) / name
    if not path.exists():
        pytest.skip(f"no {name}; INGOT_TEST_DATA says where the shared data are")
    return path
