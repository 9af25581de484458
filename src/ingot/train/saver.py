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
from ingot.runs.checkpoints import Tensors, note_progress, save_checkpoint
from ingot.runs.steps import PARTIAL, saved_steps
from ingot.runtime.files import writing

STATE_BYTES = 12  # of a parameter with the two averages of AdamW, in float32
SLOW_DISK = 200e6  # bytes per second


class Saver:
    """Writes checkpoints in a thread while training goes on; one at a time."""

    def __init__(
        self, folder: Path, keep_last: int, keep_every: int, done: Callable[[Path], None], failed: Callable[[str], None]
    ):
        self._folder, self._keep_last, self._keep_every = folder, keep_last, keep_every
        self._done, self._failed = done, failed
        self._thread: threading.Thread | None = None
        self.error: CheckpointError | None = None
        self.longest_seconds = 0.0  # from asking for a save until it was on the disk

    def save(self, step: int, tensors: Tensors, progress: Mapping[str, Any], best: int | None) -> None:
        """Begin to write, after the save before has ended. A failure is reported and kept in `error` until a save succeeds."""
        began = time.monotonic()
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(began, step, tensors, progress, best), name="checkpoint")
        self._thread.start()

    def note(self, step: int, progress: Mapping[str, Any]) -> None:
        """Give the checkpoint of a step another progress."""
        self.wait()
        with writing(self._folder):
            note_progress(saved_steps(self._folder)[step], progress)

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def expected_seconds(self, parameters: int) -> float:
        """How long a save takes: the longest so far, before the first by the size of the state on a slow disk."""
        return self.longest_seconds or parameters * STATE_BYTES / SLOW_DISK

    def _write(self, began: float, step: int, tensors: Tensors, progress: Mapping[str, Any], best: int | None) -> None:
        try:
            path = save_checkpoint(self._folder, step, tensors, progress)
            retain(self._folder, self._keep_last, self._keep_every, best)
        except OSError as error:
            self.error = CheckpointError(
                f"cannot save step {step} in {self._folder}: {error.strerror or error}; make room for it"
            )
            with suppress(CheckpointError):  # nor may the log be writable
                self._failed(f"{self.error}; training goes on and the next save tries again")
            return
        self.error, self.longest_seconds = None, max(self.longest_seconds, time.monotonic() - began)
        with suppress(CheckpointError):
            self._done(path)


def retain(folder: Path, keep_last: int, keep_every: int, best: int | None) -> None:
    """Delete all but the newest, the best and the milestones."""
    steps = saved_steps(folder)
    kept = {*list(steps)[-keep_last:], best}
    for step, path in steps.items():
        if step not in kept and not (keep_every and step % keep_every == 0):
            doomed = path.rename(path.with_name(path.name + PARTIAL))  # a kill in between must not leave half a checkpoint
            shutil.rmtree(doomed, ignore_errors=True)
