"""What is said of runs wherever they are shown: in a terminal, on a page to keep, on a page that is live.

`ingot status` is answered from here, so nothing heavy is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.errors import CheckpointError, shown

if TYPE_CHECKING:
    from ingot.runs.run import Run

RUNS = Path("runs")


def runs_below(folder: Path, deep: bool = False) -> list[Run]:
    """The runs in a folder, and with `deep` in the folders there; those that have just been made say nothing yet."""
    from ingot.runs.run import Run
    from ingot.runs.state import read_state

    paths = [*folder.glob("*"), *(folder.glob("*/*") if deep else ())]
    found = [Run(path) for path in sorted(paths) if read_state(path) is not None]
    if not found:
        raise CheckpointError(f"there are no runs below {folder}/; name {'another folder' if deep else 'run folders'}")
    return found


def run_record(run: Run) -> dict[str, Any]:
    """What is known of how a run is doing, for programs."""
    found = run.status()
    s = found.state
    return {
        "run": str(run.path),
        "status": found.status,
        "stop_reason": s.stop_reason,
        "step": s.step,
        "max_steps": s.max_steps,
        "steps_left": max(0, s.max_steps - s.step) if s.max_steps is not None else None,
        "loss": s.loss,
        "val_bpb": s.val_bpb,
        "tokens": s.tokens,
        "tokens_per_second": s.tokens_per_second,
        "flops_per_token": s.flops_per_token,
        "elapsed_seconds": s.elapsed_seconds,
        "budget_seconds": s.budget_seconds,
        "budget_seconds_left": max(0.0, s.budget_seconds - s.elapsed_seconds) if s.budget_seconds is not None else None,
        "checkpoint": s.checkpoint,
        "host": s.host,
        "pid": s.pid,
        "started_at": s.started_at,
        "last_heard_seconds": max(0.0, round(found.age_seconds, 3)),  # another host's clock may be ahead
        "error": s.error,
    }


def run_names(paths: Sequence[Path]) -> list[str]:
    """What the runs are called, in letters that can be shown: their folders, or the paths where these do not tell them apart."""
    names = [path.resolve().name for path in paths]
    return [shown(str(path) if names.count(name) > 1 else name, kept="") for path, name in zip(paths, names, strict=True)]
