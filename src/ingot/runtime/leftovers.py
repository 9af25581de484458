"""Files that a user names as output, written whole or not at all, and what killed processes left of such writes.

A folder of the user's has no lock, so the file that is being written has one: what nobody holds and is a minute old is left over.
"""

from __future__ import annotations

import fcntl
import glob
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ingot.runtime.files import replace_file

SECONDS = 60.0  # between a file's making and its lock there is less
_NAME = re.compile(r"\.[0-9a-f]{8}\.tmp")


@contextmanager
def replace_users_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when the block ends; what killed writes of it left is removed before."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        if _NAME.fullmatch(left.name.removeprefix(f".{path.name}")):
            _remove_if_left(left)
    with replace_file(path) as file:
        with suppress(OSError):  # a disk without locks: nobody will take it for left over there
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file


def _remove_if_left(path: Path) -> None:
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime > SECONDS:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        finally:
            os.close(descriptor)
