"""Exclusive folder locks with flock, which the kernel releases when the process ends for any reason.

The folder itself is locked, so that deleting a lock file does not release the lock. A lock file in the folder can be locked too,
since some network file systems lock only files open for writing. The lock file also records which process holds the lock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

# Error numbers of file systems without locks; EBADF comes from NFS, which locks only files open for writing.
_NO_FLOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)
_OPEN_FILE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # do not follow symlinks or block on a pipe
_RETRY_SECONDS = 0.05


class FolderLock:
    """An exclusive lock on a folder, held until it is released or the process ends for any reason.

    `held` is True if the lock is held, False if not, and None if the file system does not support locks. `folder_held` is True if
    the folder itself is locked, which proves that no other process on this machine holds the lock.
    """

    def __init__(self, folder: Path, file: str | None = None) -> None:
        self.folder, self.file = folder, folder / file if file is not None else None
        self.held: bool | None = False
        self.folder_held = False
        self._descriptors: list[int] = []
        _LOCKS.add(self)

    def acquire(self, wait_seconds: float | None = 0.0, notify: Callable[[], None] = lambda: None) -> bool:
        """Wait up to `wait_seconds` (None: forever) for the lock; return True on success. Call `notify` before waiting."""
        assert not self._descriptors, "the lock was already acquired"
        deadline = time.monotonic() + wait_seconds if wait_seconds is not None else None
        told = False
        while not self._try():
            self.release()
            if deadline is not None and time.monotonic() >= deadline:
                return False
            if not told:
                told = True
                notify()
            time.sleep(_RETRY_SECONDS)
        return True

    def release(self) -> None:
        """Release the lock. The lock file is kept, because the next process may already have opened it."""
        descriptors, self._descriptors = self._descriptors, []
        self.held = self.folder_held = False
        for descriptor in descriptors:
            os.close(descriptor)

    def read(self) -> bytes:
        """Return the first 4,096 bytes of the lock file, which record the holder; empty if the file is missing or unreadable."""
        assert self.file is not None
        with suppress(OSError):
            descriptor = os.open(self.file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                return os.pread(descriptor, 4096, 0)
            finally:
                os.close(descriptor)
        return b""

    def write(self, content: bytes) -> None:
        """Replace the content of the lock file; call this only while the lock is held."""
        os.ftruncate(self._descriptors[-1], 0)
        os.pwrite(self._descriptors[-1], content, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _try(self) -> bool:
        """Try once to acquire the lock and return True on success; otherwise the caller must call `release` to close files."""
        try:
            folder = self._open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
            of_folder = _try_flock(folder)
            of_file: bool | None = None
            if of_folder is not False and self.file is not None:
                file = self._open(self.file, _OPEN_FILE)
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise OSError(errno.EINVAL, "it is not a plain file")
                of_file = _try_flock(file)
        except BaseException:
            self.release()
            raise
        if False in (of_folder, of_file) or not self._still_there():
            return False
        self.folder_held = of_folder is True
        self.held = True if of_folder or of_file else None
        return True

    def _open(self, path: Path, flags: int) -> int:
        self._descriptors.append(os.open(path, flags, 0o666))
        return self._descriptors[-1]

    def _still_there(self) -> bool:
        """Return True if the paths still refer to the locked files, which another process may have renamed or removed."""
        paths = (self.folder, self.file) if self.file is not None else (self.folder,)
        try:
            return all(os.path.samestat(p.stat(), os.fstat(d)) for p, d in zip(paths, self._descriptors, strict=True))
        except FileNotFoundError:
            return False


def _try_flock(descriptor: int) -> bool | None:
    """Lock an open file or folder; return True on success, False if it is locked already, None if locks are not supported."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # File systems without folder locks raise various errors.
        if error.errno in _NO_FLOCK or stat.S_ISDIR(os.fstat(descriptor).st_mode):
            return None
        raise
    return True


_LOCKS: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _release_in_forked_child() -> None:
    # A forked child shares the lock and would keep it after the parent dies. Closing the child's copy keeps the parent's lock.
    for lock in list(_LOCKS):
        lock.release()


os.register_at_fork(after_in_child=_release_in_forked_child)
