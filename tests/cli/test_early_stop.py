"""A signal in the first seconds of a program, which are spent on imports, is a stop like any other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from programs import AT_TORCH, Ingot, plant, state, train_words

TO_THE_LAUNCHER = """
import os, signal, time
if os.environ.get("RANK") == "0":
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(1)
"""


@pytest.fixture
def early(ingot: Ingot, tmp_path: Path) -> Ingot:
    return plant(ingot, tmp_path, AT_TORCH)


def test_a_signal_during_the_imports_ends_a_run_that_is_alone_with_the_code_of_a_stop(early: Ingot, data, tmp_path):
    program = early(*train_words(data, tmp_path / "run"), "--stop-exit-code", "75", code=75)
    assert program.stderr == "ingot: stopped by SIGTERM before training began\n" and program.stdout == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("script", ["train.py", "train_gpt.py"])
def test_a_signal_during_the_imports_of_nanogpts_and_golfs_scripts_is_no_kill(early: Ingot, tmp_path, script):
    program = early(command=(sys.executable, str(Path(__file__).parents[2] / script)), folder=tmp_path)
    assert program.stderr == f"{script}: stopped by SIGTERM before training began\n"


def test_a_signal_while_ranks_are_started_stops_all_of_them(ingot: Ingot, data, tmp_path):
    plant(ingot, tmp_path, TO_THE_LAUNCHER)
    words = [*train_words(data, tmp_path / "run"), "--stop-exit-code", "75", "--nproc-per-node=2"]
    program = ingot(*words, code=75)
    assert "SIGTERM: saving and stopping" in program.stderr
    assert state(tmp_path / "run")["status"] == "stopped" and state(tmp_path / "run")["step"] == 0
