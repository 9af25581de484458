"""Fifteen kills or more, and all settings; `python -m tests.kills --kills 1000` makes any number."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_runs_that_are_killed_at_any_moment_end_bit_for_bit_as_if_nothing_had_happened() -> None:
    command = [sys.executable, "-m", "tests.kills", "--kills", "15", "--seed", "24"]  # few of its moments come too late
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SIGKILL on 1 rank" in done.stdout and "SIGKILL on 3 ranks" in done.stdout
