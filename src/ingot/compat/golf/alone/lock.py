"""In place of ingot.runs.lock: a submission runs on one machine, where the lock of the folder itself decides."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any, Self

from ingot.errors import RunError

NAME = ".lock"


class RunLock:
    """The right to write into a run folder, held until released or until the process ends in whatever way."""

    def __init__(self, folder: Path, *_: Any, elsewhere: str = "another folder", **__: Any) -> None:
        self._folder, self._elsewhere, self._held = folder, elsewhere, -1

    def acquire(self) -> Self:
        """Take the folder, or raise RunError."""
        if self._held < 0:
            self._held = os.open(self._folder, os.O_RDONLY)
            try:
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.release()
                raise RunError(f"{self._folder} is in use by another process; wait for it or use {self._elsewhere}") from None
            except OSError:  # some disks have no locks
                pass
        return self

    def release(self) -> None:
        """Let the folder go."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


def is_lock(path: Path) -> bool:
    """Whether a file is a lock of a run: no other has its name."""
    return path.is_file()
