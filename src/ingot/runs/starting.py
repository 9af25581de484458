"""The first seconds of a run: its folder is there before it is claimed, so that a request to stop can be left in it.

Who asks and who starts need not meet: a request stays where it is, and a session obeys those that are younger than itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ingot.runs.folder import RunFolder
from ingot.runtime.locks import FolderLock


@contextmanager
def starting(path: Path | None) -> Iterator[None]:
    """A block in which a run begins in a folder, which is made; one in which nothing came of it is removed again."""
    made = [one for one in (path, *path.parents) if not one.exists()] if path is not None and _is_sound(path) else []
    with suppress(OSError):  # said by who claims it
        for folder in reversed(made):
            folder.mkdir()
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for folder in made:
                if [one.name for one in folder.iterdir()] == [RunFolder(folder).stop_path.name]:
                    RunFolder(folder).forget_stop()
                folder.rmdir()
        raise


def is_claimed(path: Path) -> bool:
    """Whether some process of this machine has a folder for itself; False as well where the disk has no locks."""
    with suppress(OSError), FolderLock(path) as lock:
        return not lock.acquire()
    return False


def _is_sound(path: Path) -> bool:
    try:
        return not path.is_symlink() and not path.exists()
    except OSError:
        return False
