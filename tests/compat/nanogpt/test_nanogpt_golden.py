"""nanoGPT's README on a CPU, word for word: its curve, its number of lines. Four minutes, so only where it is asked for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from small_runs import EVALUATION, ROOT, Train, shared

from ingot.compat.nanogpt.prepare import shakespeare_char

KNOWN = json.loads((ROOT / "tests/golden/golden.json").read_text())["nanogpt_readme_cpu_run"]


@pytest.mark.long
def test_the_readme_command_follows_nanogpt_s_own_curve(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert shakespeare_char(Path("data/shakespeare_char"), ["--input", str(shared("tinyshakespeare/input.txt"))]) == 0
    arguments = KNOWN["command"].partition("train.py ")[2].partition(" (")[0].split()
    ran = Train(capfd)([str(ROOT / arguments[0]), *arguments[1:]])
    assert len(re.findall(r"^iter \d+: loss \d", ran.out, re.M)) == 2001
    known = {int(step): (float(t), float(v)) for step, t, v in EVALUATION.findall("\n".join(KNOWN["step_lines"]))}
    found = {step: (float(t), float(v)) for step, (t, v) in ran.evaluations.items()}
    assert found.keys() == known.keys()
    for step, (train_loss, val_loss) in known.items():
        assert found[step] == (pytest.approx(train_loss, abs=0.06), pytest.approx(val_loss, abs=0.06)), step
    assert found[2000][1] == pytest.approx(1.88, abs=0.05) and found[1000][1] == pytest.approx(2.05, abs=0.08)
