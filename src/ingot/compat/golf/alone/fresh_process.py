"""In place of ingot.artifact.fresh_process: the process that reads an artifact is this file again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ingot.errors import RunError
from ingot.runtime.ranks import without_ranks

SCORING = "scoring the artifact"
LOOK_SECONDS = 0.25


def score_in_fresh_process(
    path: Path, data: None, device: str, rows: None, progress: Callable[[int, int], None], stop: Callable[[], bool]
) -> dict[str, float]:
    """What this file says of an artifact, run as a process of its own."""
    script = __loader__.path  # type: ignore[name-defined]
    environment = {**without_ranks(os.environ), "EVAL_ONLY_PATH": str(path), "training.device": device}
    with subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True) as child:
        while child.poll() is None:
            if stop():
                child.kill()
            try:
                child.wait(LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                continue
        assert child.stdout is not None
        found = re.search(r"_exact val_loss:(\S+) val_bpb:(\S+)", child.stdout.read())
    if found is None or child.returncode:
        raise RunError(f"{path} was written, and its score is not known: the process that read it ended with {child.returncode}")
    return {"val_loss": float(found[1]), "val_bpb": float(found[2])}
