"""Saving while training goes on, and which of the saved states stay."""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.errors import CheckpointError
from ingot.eval.evaluator import Score
from ingot.runs.checkpoints import Tensors, read_kind, save_checkpoint, update_progress
from ingot.runs.folder import PARTIAL, Kind, RunFolder, saved_steps
from ingot.runs.state import Heartbeat
from ingot.runtime.files import writing
from ingot.train.step_plan import Position

STATE_BYTES = 12  # of a parameter with the two averages of AdamW, in float32
SLOW_DISK = 200e6  # bytes per second


class Saver:
    """Writes checkpoints in a thread while training goes on; one at a time."""

    def __init__(
        self,
        folder: Path,
        keep_last: int | None,
        keep_every: int,
        done: Callable[[Path, Kind], None],
        failed: Callable[[str], None],
    ):
        self._folder, self._keep_last, self._keep_every = folder, keep_last, keep_every
        self._done, self._failed = done, failed
        self._kinds: dict[int, Kind] = {}  # of the checkpoints in the folder, as far as they were asked for
        self._thread: threading.Thread | None = None
        self.error: CheckpointError | None = None
        self.longest_seconds = 0.0  # from asking for a save until it was on the disk

    def save(
        self,
        step: int,
        state: Callable[[], Tensors],
        progress: Mapping[str, Any],
        best: int | None,
        kind: Kind = "regular",
    ) -> None:
        """Begin to write, after the save before has ended. A failure is reported and kept in `error` until a save succeeds."""
        began = time.monotonic()
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(began, step, state, progress, best, kind), name="checkpoint")
        self._thread.start()

    def note(self, step: int, progress: Mapping[str, Any], kind: Kind | None = None) -> None:
        """Give the checkpoint of a step another progress; with a kind that it did not have, this is told like a save."""
        self.wait()
        path = saved_steps(self._folder).get(step)
        if path is None:
            return  # it could not be saved
        known = self._kind(step, path)
        with writing(self._folder):
            update_progress(path, progress, kind)
        if kind is not None and kind != known:
            self._kinds[step] = kind
            with suppress(CheckpointError):  # as after a save: the log may not be writable
                self._done(path, kind)

    def lacks(self, step: int) -> bool:
        """Whether the save of a step has failed; it has ended then."""
        self.wait()
        return self.error is not None and step not in saved_steps(self._folder)

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def expected_seconds(self, parameters: int) -> float:
        """How long a save takes: the longest so far, before the first by the size of the state on a slow disk."""
        return self.longest_seconds or parameters * STATE_BYTES / SLOW_DISK

    def _write(
        self, began: float, step: int, state: Callable[[], Tensors], progress: Mapping[str, Any], best: int | None, kind: Kind
    ) -> None:
        try:
            path = save_checkpoint(self._folder, step, state(), progress, kind)
            self._kinds[step] = kind
        except Exception as error:  # also a full memory: whatever it is, the run has to know that this step is not saved
            said = getattr(error, "strerror", None) or str(error) or type(error).__name__
            room = "; make room for it" if isinstance(error, OSError | CheckpointError | MemoryError) else ""
            self.error = CheckpointError(f"cannot save step {step} in {self._folder}: {said}{room}")
            with suppress(CheckpointError):  # nor may the log be writable
                self._failed(f"{self.error}; training goes on and the next save tries again")
            return
        try:
            retain(self._folder, self._keep_last, self._keep_every, best, self._kind)
        except (OSError, CheckpointError) as error:  # this step is saved all the same
            with suppress(CheckpointError):
                said = getattr(error, "strerror", None) or error
                self._failed(f"cannot delete an old checkpoint in {self._folder}: {said}")
        self.error, self.longest_seconds = None, max(self.longest_seconds, time.monotonic() - began)
        with suppress(CheckpointError):
            self._done(path, kind)

    def _kind(self, step: int, path: Path) -> Kind:
        if step not in self._kinds:
            self._kinds[step] = read_kind(path)
        return self._kinds[step]


def retain(
    folder: Path,
    keep_last: int | None,
    keep_every: int,
    best: int | None,
    kind_of: Callable[[int, Path], Kind] = lambda step, path: read_kind(path),
) -> None:
    """Delete all but the newest regular ones, the newest of a stop and of a completed run, the best and the milestones.

    OSError: one of them cannot be deleted; the others are.
    """
    if keep_last is None:
        return
    steps = saved_steps(folder)
    of_kind: dict[Kind, list[int]] = {"regular": [], "shutdown": [], "final": []}
    for step, path in steps.items():
        of_kind[kind_of(step, path)].append(step)
    kept = {*of_kind["regular"][-keep_last:], *of_kind["shutdown"][-1:], *of_kind["final"][-1:], best}
    refused = None
    for step, path in steps.items():
        if step not in kept and not (keep_every and step % keep_every == 0):
            doomed = path.with_name(path.name + PARTIAL)  # a kill in between must not leave half a checkpoint
            try:
                if doomed.exists():
                    shutil.rmtree(doomed)
                shutil.rmtree(path.rename(doomed))
            except OSError as error:
                refused = error
    if refused is not None:
        raise refused


# Where a run stands, and where its first rank writes.


@dataclass
class Progress:
    """Where a run stands; with the weights, the optimizer's memory and the config it decides everything that follows."""

    step: int = 0
    sample: int = 0  # the next row of the data order, counted in rows of data.seq_len
    tokens: int = 0
    elapsed_seconds: float = 0.0
    step_seconds: float = 0.0  # the longest of the last steps but one
    loss: float | None = None
    val_loss: float | None = None
    val_bpb: float | None = None
    val_step: int | None = None  # the step at which they were found
    val_whole: bool = False  # and whether by the whole validation split
    val_rows: int = 0  # or by how many
    val_rows_of: int = 0  # of its rows
    val_stride: int | None = None  # at this distance from each other, where they overlap
    val_final: bool = False  # and whether at the end of the run
    val_other: dict[str, float] = field(default_factory=dict)  # val_bpb by the other count of bytes, where there are two
    best_step: int | None = None
    best_bpb: float | None = None
    best_by: list[int | str | None] = field(default_factory=list)  # the rows, stride and rule of that score; empty: not known
    evaluation_seconds: float = 0.0  # of evaluations during training, where they are bounded
    resumed_from: str | None = None  # the checkpoint or run of another folder whose state this run began with
    wandb_id: str | None = None  # of the run at Weights & Biases, which goes on with this one
    starts: list[int] = field(default_factory=list)  # the first steps of the stages that have begun
    phases_begun: int = 0  # of data.phases
    places: dict[str, int] = field(default_factory=dict)  # how many rows of each bucket have been read

    def note_score(self, found: Score, final: bool) -> None:
        """Keep what an evaluation of this step found."""
        self.val_loss, self.val_bpb, self.val_other = found.loss, found.bits_per_byte, found.other
        self.val_step, self.val_whole, self.val_final = self.step, found.rows == found.rows_of, final
        self.val_rows, self.val_rows_of, self.val_stride = found.rows, found.rows_of, found.stride

    def note_best(self, found: Score) -> bool:
        """Keep a score of this step if it is the best so far, and say so: NaN is worse than any number.

        A score by other rows, as another session may have, is not compared: the first of them is the best so far.
        """
        bpb = found.bits_per_byte
        by: list[int | str | None] = [found.rows, found.stride, found.rule]
        best = math.isfinite(bpb) and (self.best_bpb is None or self.best_by not in ([], by) or not self.best_bpb <= bpb)
        if best:
            self.best_step, self.best_bpb, self.best_by = self.step, bpb, by
        return best

    def position(self, seconds: float) -> Position:
        """Where the next step begins, at a time that was agreed upon."""
        return Position(self.step, self.sample, self.tokens, seconds, tuple(self.starts), self.phases_begun, self.places)


@dataclass(frozen=True)
class RunOutputs:
    """Where the first rank writes: the run folder, its heartbeat and the thread that saves. Other ranks have none."""

    folder: RunFolder
    heartbeat: Heartbeat
    saver: Saver
