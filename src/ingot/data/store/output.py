"""A folder that a command fills file by file: one process at a time, and no name before its file is whole."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path

from ingot.errors import DataError, Setting
from ingot.runtime import files
from ingot.runtime.locks import FolderLock

LOCK = ".download.lock"


def writing(path: Path) -> contextlib.AbstractContextManager[None]:
    """Turn the disk's refusal into a sentence."""
    return files.writing(path, DataError, Setting("output"))


@contextlib.contextmanager
def alone_in(folder: Path, notify: Callable[[str], None]) -> Iterator[bool]:
    """Make a folder and hold it, waiting for whoever has it; false where that cannot be: no locks, or nothing to be written."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder, LOCK) as lock:
        with writing(folder / LOCK):
            try:
                lock.acquire(None, lambda: notify(f"another download into {folder} is under way; waiting for it"))
            except OSError as error:
                if error.errno not in (errno.EROFS, errno.EACCES):  # a folder for reading may hold all that is asked for
                    raise
        yield bool(lock.held)
