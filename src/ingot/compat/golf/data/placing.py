"""From the hub's cache into a folder: several threads, room on the disk, and no name before its file is whole.

Threads are daemons, so that an error or Ctrl-C need not wait for a connection that stalls; they place nothing after that.
"""

from __future__ import annotations

import os
import queue
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Event, Thread

from ingot.data.store.staging import writing
from ingot.errors import DataError
from ingot.runtime.files import fsync_dir, sweep_temporaries

GRACE_SECONDS = 1.0  # for threads to drop what they have when the download ends early


def in_threads(work: Callable[[str], None], names: Sequence[str], workers: int, stop: Event) -> None:
    """Work on every name; the first error ends the others and is raised."""
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run() -> None:
        while not stop.is_set():
            try:
                name = todo.get_nowait()
            except queue.Empty:
                return
            try:
                work(name)
            except BaseException as error:
                outcomes.put(error)
                return
            outcomes.put(None)

    for name in names:
        todo.put(name)
    threads = [Thread(target=run, daemon=True) for _ in range(min(workers, len(names)))]
    try:
        for thread in threads:
            thread.start()
        for _ in names:
            if (error := outcomes.get()) is not None:
                raise error
    except BaseException:
        stop.set()
        deadline = time.monotonic() + GRACE_SECONDS
        for thread in threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        raise


def place(blob: Path, target: Path) -> None:
    """Give content of the client's cache its name in our folder: a second name for it if the disk can, else a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.urandom(4).hex()}.part")
    try:
        try:
            part.hardlink_to(blob.resolve())  # a name in the cache is a link to the content
        except OSError:  # another disk, or one that knows no links
            shutil.copyfile(blob, part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)  # also after a rename: onto another name of the same content it does nothing
    fsync_dir(target.parent)


def sweep(folders: Iterable[Path]) -> None:
    """Remove what killed downloads left; only whoever holds the folder may."""
    for folder in folders:
        with writing(folder):
            sweep_temporaries(folder)
            for leftover in folder.glob(".*.part"):
                leftover.unlink(missing_ok=True)


def check_space(needs: Iterable[tuple[Path, int]]) -> None:
    """Refuse what cannot fit before the first byte: folders, which may share a disk, and the bytes each will take."""
    disks: dict[int, tuple[Path, int]] = {}
    for folder, size in needs:
        disk = disk_of(folder)
        disks[disk] = (folder, disks.get(disk, (folder, 0))[1] + size)
    for folder, size in disks.values():
        if size > (free := shutil.disk_usage(_existing(folder)).free):
            raise DataError(f"{size / 1e9:,.1f} GB are to be downloaded and the disk of {folder} has {free / 1e9:,.1f} GB free")


def disk_of(folder: Path) -> int:
    """The disk that a folder is on, or will be when it is made."""
    return _existing(folder).stat().st_dev


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder
