"""What needs no framework works without one: torch cannot even be imported here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from programs import checkpoints

PROGRAM = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is not to be had here")

sys.meta_path.insert(0, NoTorch())
from ingot.cli.main import run
run()
"""


def without_torch(*words: object) -> str:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--help",), "train"),
        (("recipes",), "demo"),
        (("config", "show", "--recipe", "demo"), "heartbeat_seconds"),
        (("config", "docs"), "# Configuration"),
        (("init",), "tokens_per_step"),
        (("validate", "--recipe", "demo"), "0 errors, 0 over budget, 0 warnings, 0 notes"),
    ],
)
def test_settings_are_shown_without_torch(words: tuple[str, ...], said: str) -> None:
    assert said in without_torch(*words)


def test_data_is_prepared_looked_at_and_verified_without_torch(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(f"{i * i} and {i**5} are numbers" for i in range(4000)))
    without_torch("data", "prepare", "--input", tmp_path / "a.txt", "--output", tmp_path / "d", "--tokenizer", "byte")
    assert "tokens" in without_torch("data", "inspect", tmp_path / "d")
    without_torch("data", "verify", tmp_path / "d")
    without_torch("data", "convert", tmp_path / "d", "--output", tmp_path / "n", "--to", "nanogpt")


def test_a_trained_model_is_exported_without_torch(reference: Path, tmp_path: Path) -> None:
    without_torch("export", checkpoints(reference)[40], "--output", tmp_path / "model.ingot", "--no-score")
    assert (tmp_path / "model.ingot").stat().st_size > 0


def test_runs_are_listed_and_drawn_without_torch(reference: Path) -> None:
    assert "reference" in without_torch("status", reference.parent)
    assert "a reference" in without_torch("plot", reference)
    assert "a step takes" in without_torch("status", "--watch", reference)
