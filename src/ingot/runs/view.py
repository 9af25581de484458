"""What is said of runs wherever they are shown: in a terminal, on a page to keep, on a page that is live.

`ingot status` is answered from here, so nothing heavy is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ingot.errors import CheckpointError, RunError, shown
from ingot.runs.folder import RunFolder, is_claimed, saved_steps
from ingot.runs.metrics import Mark
from ingot.runs.state import CLOCK_SKEW_SECONDS, State, Status, read_result, read_state, this_process
from ingot.runtime.files import open_to_read
from ingot.runtime.processes import is_alive

if TYPE_CHECKING:
    from ingot.config.schema import Config


RUNS = Path("runs")


def runs_below(folder: Path, deep: bool = False) -> list[Run]:
    """The runs in a folder, and with `deep` in the folders there; those that have just been made say nothing yet."""
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


# A run as its folder shows it: settings, status, metrics, samples, checkpoints and result, for whoever looks on.

MOST_SAMPLE = 20_000  # characters of a sample


@dataclass(frozen=True)
class RunStatus:
    """How a run is doing: what state.json says, how old that is, and whether its process can still be there."""

    status: Status | Literal["crashed"]
    state: State
    age_seconds: float  # by our clock; another host's may differ
    here: bool  # whether its process number is one of this system


class Run:
    """A run folder to look into."""

    def __init__(self, path: Path) -> None:
        self.path, self._folder = path, RunFolder(path)

    @classmethod
    def open(cls, path: str | Path, begun: bool = True) -> Run:
        """The run of a folder; CheckpointError where it is none. Without `begun` it may be one that is only being started."""
        run = cls(Path(path))
        if not run._folder.config_path.is_file() and read_state(run.path) is None and (begun or not run._folder.is_blank()):
            raise CheckpointError(f"{path} is not a run folder: it has no {run._folder.config_path.name}; name a run folder")
        return run

    @property
    def config_path(self) -> Path:
        """The file of its settings."""
        return self._folder.config_path

    @property
    def config(self) -> Config:
        """Every setting of the run."""
        from ingot.config.loading import load_config  # here: whoever asks for the status need not wait for it

        return load_config(file=self._folder.config_path, environment={}).config

    def status(self) -> RunStatus:
        """How it is doing; `crashed` where it says that it is running and its process is gone or silent for too long."""
        state = read_state(self.path)
        if state is None:
            raise CheckpointError(f"{self.path} has no readable state.json; name a run folder")
        age = state.age_seconds
        host, _, boot_id = this_process()
        here = (state.host, state.boot_id) == (host, boot_id)  # a number of another system's process says nothing
        alive = is_alive(state.pid, age) if here else age <= 3 * state.heartbeat_seconds + CLOCK_SKEW_SECONDS
        gone = state.status == "running" and not alive
        return RunStatus("crashed" if gone else state.status, state, age, here)

    def stop(self) -> RunStatus | None:
        """Ask the run to save and stop, by a file that it looks for, and say how it was; None: it is about to begin.

        RunError where nothing runs. The file stays: a session that has not yet claimed the folder obeys a request younger than
        itself, and a later one removes it.
        """
        found = self.status() if read_state(self.path) is not None or not self._folder.is_blank() else None
        if found is not None and found.status == "running":
            self._folder.ask_to_stop()
            return found
        with suppress(CheckpointError):  # a folder that is not ours to write in has no run of ours
            self._folder.ask_to_stop()
        if is_claimed(self.path):
            return None
        how = f"its status is {found.status}" if found is not None else "no run has begun there"
        raise RunError(f"{self.path} is not running: {how}; only a run that is being started there now hears of this")

    def metrics(self, since: Mark | None = None) -> tuple[list[dict[str, Any]], Mark]:
        """The records after a mark, and the next mark; if its `start` is 0 they are all there are, as after a resume."""
        return self._folder.metrics.read_since(since)

    def samples(self) -> dict[int, Path]:
        """The texts that the model wrote, by step; files of other names, as of a copy, are left out."""
        found = [(path.stem.removeprefix("step-"), path) for path in sorted(self._folder.samples.glob("step-*.txt"))]
        return {int(step): path for step, path in found if step.isdecimal()}

    def sample(self, step: int, most: int = MOST_SAMPLE) -> str:
        """The text of a step, up to so many characters; CheckpointError where there is none that can be read."""
        if (path := self.samples().get(step)) is None:
            raise CheckpointError(f"{self.path} has no sample of step {step:,}")
        try:
            with open_to_read(path) as file:
                return file.read(4 * most).decode("utf-8", "replace")[:most]
        except OSError as error:
            raise CheckpointError(f"the sample of step {step:,} cannot be read: {error.strerror}") from None

    def checkpoints(self) -> dict[int, Path]:
        """The checkpoints by step, oldest first."""
        return saved_steps(self._folder.checkpoints)

    def result(self) -> dict[str, Any] | None:
        """What the last session came to; None before it has ended."""
        return read_result(self.path)
