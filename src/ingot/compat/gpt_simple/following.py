"""`gpt-simple status` and `gpt-simple stop`: how a run is doing by what its folder says, and asking it to save and stop."""

from __future__ import annotations

import os
import signal
import time
from argparse import Namespace
from datetime import datetime
from pathlib import Path
from typing import Any

from ingot.artifact.gpt_simple import RUN_STATE, STOP_FLAG, Saved, saved_checkpoints
from ingot.compat.gpt_simple.log import Log
from ingot.console.output import print_json
from ingot.console.progress import duration
from ingot.errors import CheckpointError, RunError
from ingot.runs.folder import STOP, is_claimed
from ingot.runs.state import read_state
from ingot.runs.view import Run, RunStatus
from ingot.runtime.files import read_dict

PATIENCE_SECONDS = 600.0  # for the run to save and end
LOOK_SECONDS = 0.5
STOPS = (STOP, STOP_FLAG)  # files that ask a run to stop
HISTORY = 5  # newest checkpoints that are listed
WORDS = {
    "running": "RUNNING (PID {pid} on {host})",
    "crashed": "CRASHED (PID {pid} on {host}, last heard {ago} ago)",
    "failed": "ERROR (PID {pid} on {host})",
    "completed": "COMPLETED",
    "stopped": "STOPPED",
    "halted": "HALTED (bucket exhausted; needs attention)",
}


def status(options: Namespace, log: Log) -> int:
    """Show how the run in a folder is doing."""
    folder = Path(options.output_dir)
    if (theirs := _of_the_original(folder)) is not None:
        print_json(theirs) if options.json else _print(_their_rows(theirs))
        return 0
    if read_state(folder) is None and (saved := saved_checkpoints(folder)):
        print_json({"status": "no run state", **saved[-1].state}) if options.json else _print(_saved_rows(saved))
        return 0
    run = _open(options.output_dir)
    found = run.status()
    if options.json:
        print_json({"run": str(run.path), "status": found.status, **vars(found.state)})
        return 0
    _print(_rows(run, found))
    return 0


def stop(options: Namespace, log: Log) -> int:
    """Ask the run in a folder to save and stop, and wait until it has; with --force, kill it."""
    if _of_the_original(Path(options.output_dir)) is not None:
        flag = Path(options.output_dir) / STOP_FLAG
        raise RunError(f"{options.output_dir} is not trained here but by the original gpt-simple, which {flag} asks to stop")
    run = _open(options.output_dir, begun=options.force)
    if options.force:
        return _kill(run, log)
    try:
        found = run.stop()
    except RunError as error:
        log.warn(str(error))
        return 0
    if found is None:
        log.info(f"{run.path} is starting; it was asked to stop before its first step; waiting for it to end")
    else:
        state = found.state
        log.info(f"{run.path} was asked at step {state.step} to save and stop; waiting for PID {state.pid} on {state.host}")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while is_claimed(run.path) if found is None else run.status().status == "running":
        if time.monotonic() > deadline:
            log.warn(f"it is still running after {PATIENCE_SECONDS:.0f} s; --force kills it")
            return 0
        time.sleep(LOOK_SECONDS)
    log.info(f"it has ended: {run.status().status}" if read_state(run.path) is not None else "it has ended and did not begin")
    return 0


def _kill(run: Run, log: Log) -> int:
    found = run.status()
    if found.status != "running":
        log.warn(f"{run.path} is not running: its status is {found.status}")
    elif not found.here:
        raise RunError(f"{run.path} is trained by process {found.state.pid} on {found.state.host}; use --force there")
    else:
        log.warn(f"Sending SIGKILL to PID {found.state.pid}: what is not in its newest checkpoint is lost")
        _send(found.state.pid, signal.SIGKILL)
    return 0


def _open(folder: str, begun: bool = True) -> Run:
    try:
        return Run.open(folder, begun)
    except CheckpointError:
        raise RunError(f"there is no run in {folder}; name its folder with --output_dir") from None


def _of_the_original(folder: Path) -> dict[str, Any] | None:
    """What the original said of a run that was never trained here; None for any other folder."""
    return read_dict(folder / RUN_STATE) if read_state(folder) is None else None


def _their_rows(said: dict[str, Any]) -> list[tuple[str, str]]:
    names = {
        "Status": "status",
        "Started": "started_at",
        "Progress": "global_step",
        "Loss": "loss",
        "Tokens": "tokens_trained",
        "Checkpoint": "latest_checkpoint",
    }
    rows = [(name, str(said[key])) for name, key in names.items() if said.get(key) is not None]
    note = ", as gpt-simple's own trainer last said" if said.get("status") == "running" else " (trained by gpt-simple)"
    return [(name, value.upper() + note if name == "Status" else value) for name, value in rows]


def _saved_rows(saved: list[Saved]) -> list[tuple[str, str]]:
    """What the checkpoints of a run say where no file tells how it is doing."""
    newest = saved[-1]
    metrics, tokens = newest.state.get("metrics"), newest.state.get("tokens_trained")
    loss = metrics.get("loss") if isinstance(metrics, dict) else None
    rows = [
        ("Status", "NO RUN STATE (checkpoint only)"),
        ("Progress", f"{newest.step} steps"),
        ("Loss", f"{loss:.4f}" if isinstance(loss, float) else ""),
        ("Tokens", f"{_short(tokens)} trained" if isinstance(tokens, int) else ""),
        *_checkpoint_rows({one.path: one.step for one in saved}),
    ]
    return [(name, value) for name, value in rows if value]


def _checkpoint_rows(found: dict[Path, int]) -> list[tuple[str, str]]:
    """The newest checkpoint and the last of them, oldest first."""
    if not found:
        return []
    history = ", ".join(f"{path.name}@{step}" for path, step in list(found.items())[-HISTORY:])
    return [("Checkpoint", str(list(found)[-1])), ("History", history)]


def _print(rows: list[tuple[str, str]]) -> None:
    for name, value in rows:
        print(f"{name + ':':<12}{value}")


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it has just ended
    except PermissionError:
        raise RunError(f"process {pid} is somebody else's and cannot be signalled") from None


def _rows(run: Run, found: RunStatus) -> list[tuple[str, str]]:
    s = found.state
    of = f" / {s.max_steps} steps ({100 * s.step / s.max_steps:.1f}%)" if s.max_steps else " steps"
    ago = duration(max(0.0, found.age_seconds))
    age = duration(max(0.0, time.time() - datetime.fromisoformat(s.started_at).timestamp()))
    rate = (read_dict(run.path / RUN_STATE) or {}).get("learning_rate")
    rows = [
        ("Status", WORDS[found.status].format(pid=s.pid, host=s.host, ago=ago)),
        ("Started", f"{s.started_at} ({age} ago)"),
        ("Shutdown", "requested" if found.status == "running" and any((run.path / name).exists() for name in STOPS) else ""),
        ("Progress", f"{s.step}{of}"),
        ("Loss", f"{s.loss:.4f}" if s.loss is not None else ""),
        ("LR", f"{rate:.2e}" if isinstance(rate, float) and rate else ""),
        ("Throughput", f"{s.tokens_per_second:,.0f} tok/s" if s.tokens_per_second else ""),
        ("Tokens", f"{_short(s.tokens)} trained" if s.tokens else ""),
        *_checkpoint_rows(_named(run)),
        ("Error", s.error or ""),
    ]
    return [(name, value) for name, value in rows if value]


def _named(run: Run) -> dict[Path, int]:
    """The steps of a run's checkpoints, oldest first, by gpt-simple's names; by ours those that it does not have."""
    theirs = {one.path: one.step for one in saved_checkpoints(run.path)}
    found = {path: step for step, path in run.checkpoints().items() if step not in theirs.values()} | theirs
    return dict(sorted(found.items(), key=lambda one: one[1]))


def _short(count: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)
