"""The fuzzer as CI runs it; see the package for more of it by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("cases", [range(300), pytest.param(range(300, 1300), marks=pytest.mark.long)], ids=["first", "more"])
def test_no_input_makes_a_program_break_its_promises(cases: range):
    command = [sys.executable, "-m", "tests.fuzz", "--first", str(cases.start), "--cases", str(len(cases))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-5_000:]
