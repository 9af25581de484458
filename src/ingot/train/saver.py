"""Saving while training goes on, and which of the saved states stay."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ingot.errors import CheckpointError
from ingot.runs.checkpoints import PARTIAL, Kind, Tensors, note_progress, read_kind, save_checkpoint, saved_steps
from ingot.runtime.files import writing

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
            note_progress(path, progress, kind)
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
