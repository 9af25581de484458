"""The fuzzer as CI runs it; see the package for more of it by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_input_makes_a_door_break_its_promises():
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    ran = subprocess.run([sys.executable, "-m", "tests.fuzz"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-5_000:]
