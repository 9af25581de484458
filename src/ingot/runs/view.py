"""Read a run folder, for `ingot status`, `ingot plot`, `ingot report`, the live web page and the status command of gpt-simple.

Reading takes no lock: every file of a run folder is replaced atomically or only appended to. `Run.record` imports nothing slow;
`Run.series` imports numpy when it is first used.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ingot.errors import CheckpointError, RunError, shown
from ingot.runs.folder import RunFolder, holds_lock, saved_steps
from ingot.runs.state import CLOCK_SKEW_SECONDS, RESULT, STATE, State, Status, read_state, this_process
from ingot.runtime.files import open_to_read, read_dict
from ingot.runtime.processes import is_alive

if TYPE_CHECKING:
    from ingot.config.schema import Config
    from ingot.runs.series import Series

RUNS = Path("runs")
LEVELS = 3  # folder levels that are searched for runs, as in runs/SWEEP/ARM/seed-N
MAX_SAMPLE_CHARACTERS = 20_000
COPIED = (
    "stop_reason", "step", "max_steps", "loss", "val_bpb", "tokens", "tokens_per_second", "flops_per_token", "elapsed_seconds",
    "budget_seconds", "checkpoint", "host", "pid", "started_at", "error",
)  # fmt: skip


@dataclass(frozen=True)
class RunStatus:
    """The status of a run, the content and age of its state.json, and whether the run's process is on this machine."""

    status: Status | Literal["crashed"]
    state: State
    age_seconds: float  # seconds since the last heartbeat, by this host's clock; the clock of the run's host may differ
    here: bool  # True if the run's process is on this machine, so that its pid is meaningful


class Run:
    """A run folder opened for reading."""

    def __init__(self, path: Path) -> None:
        self.path, self._folder = path, RunFolder(path)
        self.config_path = self._folder.config_path

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Open a run folder; raise CheckpointError if it is not one."""
        run = cls(Path(path))
        if not run.config_path.is_file() and read_state(run.path) is None:
            raise CheckpointError(f"{path} is not a run folder: it has no {run.config_path.name}; give the path of a run folder")
        return run

    @property
    def config(self) -> Config:
        """Return the run's config, loaded from its config.yaml."""
        from ingot.config.loading import load_config  # slow to import, and `ingot status` does not need it

        return load_config(file=self.config_path, environment={}).config

    def status(self) -> RunStatus:
        """Return the status of the run; `crashed` if state.json says running but its process is dead or silent for too long."""
        state = read_state(self.path)
        if state is None:
            raise CheckpointError(f"{self.path} has no readable state.json; give the path of a run folder")
        age = state.age_seconds
        host, _, boot_id = this_process()
        here = (state.host, state.boot_id) == (host, boot_id)  # a process id of another machine is meaningless
        alive = is_alive(state.pid, age) if here else age <= 3 * state.heartbeat_seconds + CLOCK_SKEW_SECONDS
        crashed = state.status == "running" and not alive
        return RunStatus("crashed" if crashed else state.status, state, age, here)

    def record(self) -> dict[str, Any]:
        """Return the status as a JSON-compatible dict; if state.json cannot be read, the status is "unreadable"."""
        record: dict[str, Any] = {"run": str(self.path), "status": "unreadable", **dict.fromkeys(COPIED)}
        left: dict[str, Any] = dict.fromkeys(("steps_left", "budget_seconds_left", "last_heard_seconds"))
        try:
            status = self.status()
        except (CheckpointError, OSError) as error:
            return {**record, **left, "error": str(error)}
        state = status.state
        if state.max_steps is not None:
            left["steps_left"] = max(0, state.max_steps - state.step)
        if state.budget_seconds is not None:
            left["budget_seconds_left"] = max(0.0, state.budget_seconds - state.elapsed_seconds)
        left["last_heard_seconds"] = max(0.0, round(status.age_seconds, 3))  # another host's clock may be ahead
        return {**record, "status": status.status, **{name: getattr(state, name) for name in COPIED}, **left}

    def stop(self) -> RunStatus:
        """Make the run save and stop by writing a stop file, and return its status; raise RunError if it is not running."""
        status = self.status()
        if status.status != "running":
            raise RunError(f"{self.path} is not running: its status is {status.status}")
        self._folder.ask_to_stop()
        return status

    def signal(self, number: int) -> None:
        """Send a signal to the process of a run; raise RunError unless that process holds the run's lock."""
        status = self.status()
        pid = status.state.pid
        if not status.here:
            raise RunError(f"process {pid} of {self.path} runs on {status.state.host}; use --force on that host")
        if not holds_lock(self.path, pid):  # the pid in state.json may have been reused by an unrelated process
            raise RunError(f"process {pid} does not hold the lock of {self.path} or belongs to another user; no signal was sent")
        with suppress(ProcessLookupError):  # the process has just ended
            os.kill(pid, number)

    @cached_property
    def series(self) -> Series:
        """Return the numbers read so far from metrics.jsonl; `series.read()` reads new lines."""
        from ingot.runs.series import Series

        return Series(self._folder.metrics.path)

    def samples(self) -> dict[int, Path]:
        """Return the paths of the text samples, keyed by step. Files that are not named step-N.txt are skipped."""
        paths = [(path.stem.removeprefix("step-"), path) for path in sorted(self._folder.samples.glob("step-*.txt"))]
        return {int(step): path for step, path in paths if step.isdecimal()}

    def sample(self, step: int, max_characters: int = MAX_SAMPLE_CHARACTERS) -> str:
        """Return the text sample of a step, truncated to `max_characters`; raise CheckpointError if it cannot be read."""
        if (path := self.samples().get(step)) is None:
            raise CheckpointError(f"{self.path} has no sample of step {step:,}")
        if not path.resolve().is_relative_to(self.path.resolve()):  # reports are shared, so never include files outside the run
            raise CheckpointError(f"the sample of step {step:,} is a link to a file outside the run folder")
        try:
            with open_to_read(path) as file:
                return file.read(4 * max_characters).decode("utf-8", "replace")[:max_characters]
        except OSError as error:
            raise CheckpointError(f"the sample of step {step:,} cannot be read: {error.strerror}") from None

    def checkpoints(self) -> dict[int, Path]:
        """Return the paths of the checkpoints, keyed by step, oldest first."""
        return saved_steps(self._folder.checkpoints)

    def result(self) -> dict[str, Any] | None:
        """Return the content of result.json; None if the last session crashed or is still running, or if the file is damaged."""
        return read_dict(self.path / RESULT)


def find_runs(folders: Sequence[Path]) -> dict[str, Path]:
    """Return the run folders among `folders` and up to LEVELS levels below them, keyed by resolved path.

    If several paths lead to a run, one that is not a symlink is preferred, because symlinks may change later.
    """
    runs: dict[str, Path] = {}
    waiting = [(folder, LEVELS) for folder in reversed(folders)]
    while waiting:
        path, levels = waiting.pop()
        if os.path.exists(path / STATE):  # noqa: PTH110 (called for every run every two seconds, and Path's takes twice as long)
            real = os.path.realpath(path)
            if real not in runs or (runs[real].is_symlink() and not path.is_symlink()):
                runs[real] = path
        elif levels:
            with suppress(OSError):  # skip files, and folders that this user may not read
                names = os.listdir(path)  # noqa: PTH208 (called for many folders every two seconds)
                waiting += [(path / name, levels - 1) for name in names if not name.startswith(".")]
    return runs


def run_names(paths: Sequence[Path]) -> list[str]:
    """Return a display name for each run: the name of its folder, or its path if several folders have that name."""
    names = [os.path.basename(os.path.realpath(path)) for path in paths]  # noqa: PTH119 (Path.resolve raises on a symlink loop)
    return [shown(str(path) if names.count(name) > 1 else name, kept="") for path, name in zip(paths, names, strict=True)]
