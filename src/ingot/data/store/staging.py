"""Staging: token data is written to a hidden folder that replaces the output atomically.

The writing process locks the folder. Work in a folder left by a killed process is resumed if its journal describes the same work;
otherwise the folder is emptied. The journal is JSON lines: a description of the work, then the points to resume from. An
existing output is overwritten only if it contains nothing but token data: any other file may be the only copy of a text.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ingot.data.store.shards import has_header
from ingot.errors import ConfigError, DataError, Setting
from ingot.runtime import files
from ingot.runtime.files import fsync_dir, reading, remove_if_empty
from ingot.runtime.locks import FolderLock

log = logging.getLogger(__name__)

JOURNAL = "journal.jsonl"
OLD = "-old"  # suffix of the hidden folder with the previous output
FILES = re.compile(
    r"dataset\.json|meta\.pkl|(fineweb_)?(train|val)\.(bin|index)|[\w.-]*(train|val)_\d{6}\.bin|(train|val)/[^/]+/\d{5}\.(bin|idx)"
)
FOLDERS = re.compile(r"(train|val)(/[^/]+)?")  # gpt-simple's splits and buckets
EVIDENCE = re.compile(r"dataset\.json|train\.bin|.*\.idx")  # a folder with one of these files, or with a shard, holds token data


class StagedFolder:
    """A staging folder and its journal; `saved` is the last resume point in the journal, or None for new work."""

    def __init__(self, folder: Path, work: Any, saved: Any = None) -> None:
        self.folder, self.work, self.saved = folder, work, saved

    def save(self, point: Any) -> None:
        """Record a point from which this work can resume; the files that the point mentions must already be synced to disk."""
        fsync_dir(self.folder)
        with (self.folder / JOURNAL).open("a", encoding="utf-8") as file:
            if not file.tell():
                file.write(json.dumps(self.work) + "\n")
            file.write(json.dumps(point) + "\n")
            file.flush()
            os.fsync(file.fileno())
        fsync_dir(self.folder)
        self.saved = point


@contextmanager
def staged(
    output: Path, overwrite: bool, work: Any = None, is_sound: Callable[[Path, Any], bool] = lambda folder, point: False
) -> Iterator[StagedFolder]:
    """Yield a locked folder next to `output` that is renamed to `output` when the `with` block succeeds.

    On failure the folder is removed, unless it has a resume point for `work` and the failure is not a user error.
    `is_sound` checks that the files of a folder match a resume point in its journal.
    """
    target = output.resolve()
    folder, old = (target.with_name(f".{target.name}.partial-0{suffix}") for suffix in ("", OLD))
    with writing(output), ExitStack() as undo:
        for parent in reversed([parent for parent in target.parents if not parent.exists()]):
            parent.mkdir(exist_ok=True)
            undo.callback(remove_if_empty, parent)
        if folder.is_symlink():
            raise ConfigError(f"{folder} is a symbolic link, and Ingot does not write through links; remove it")
        folder.mkdir(exist_ok=True)
        lock = undo.enter_context(FolderLock(folder))
        if not lock.acquire() or (lock.held is None and any(folder.iterdir())):
            raise ConfigError(f"another process is writing {output}; wait for that process or, if it is gone, remove {folder}")
        stage = StagedFolder(folder, work, _last_point(folder, work, is_sound))

        def abandon(kind: Any, error: BaseException | None, trace: Any) -> None:
            """Remove the folder, unless its work can be resumed and the failure was not a user error."""
            mistake = isinstance(error, ConfigError | DataError) and not isinstance(error.__cause__, OSError)
            if stage.saved is not None and not mistake:
                log.warning("the data prepared so far is kept in %s; run the same command to resume", folder)
            else:
                shutil.rmtree(folder, ignore_errors=True)

        undo.push(abandon)
        if os.path.lexists(target):
            shutil.rmtree(old, ignore_errors=True)
        elif old.exists():
            old.rename(target)  # the process that was replacing the output was killed between its two renames
            log.warning("restored %s: the process that was replacing it was killed", target)
            check_output(output, overwrite)
        yield stage
        (folder / JOURNAL).unlink(missing_ok=True)
        for written in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
            fsync_dir(written)
        try:
            folder.rename(target)  # succeeds if the target does not exist or is an empty folder
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            check_output(output, overwrite)
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
            folder.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        undo.pop_all()
        lock.release()
        fsync_dir(target.parent)


def check_output(output: Path, overwrite: bool) -> None:
    """Raise an error unless the output is missing, an empty folder or, with `overwrite`, a folder of nothing but token data."""
    with reading(output):
        if not os.path.lexists(output):
            return
        if not output.is_dir():
            raise ConfigError(f"output {output} is a file; give a folder that does not exist yet")
        found = {path: path.relative_to(output).as_posix() for path in output.rglob("*")}
        # A symlink to a folder does not count as token data, because it may point anywhere.
        ours = {path: (FOLDERS if path.is_dir() else FILES).fullmatch(name) for path, name in found.items()}
        foreign = next((name for path, name in found.items() if not ours[path] or (path.is_dir() and path.is_symlink())), None)
        proven = any(EVIDENCE.fullmatch(name) or (path.suffix == ".bin" and has_header(path)) for path, name in found.items())
    if foreign or (found and not proven):
        holds = foreign or f"{min(found.values())}, which is not known to be token data"
        raise ConfigError(f"output {output} holds {holds}, but Ingot only replaces folders of token data; use another folder")
    if found and not overwrite:
        raise ConfigError(f"output {output} exists; replace it with --force or give another folder")


def _last_point(folder: Path, work: Any, is_sound: Callable[[Path, Any], bool]) -> Any:
    """Return the last resume point that a killed process left for the same work; if there is none, empty the folder."""
    why = "this command cannot resume from these files"
    try:
        links = any(path.is_symlink() for path in folder.rglob("*"))  # never write through symlinks
        text = b"" if work is None or links else (folder / JOURNAL).read_bytes()
        lines = text.split(b"\n")[:-1]  # a truncated last line is dropped
        was, now = json.loads(lines[0]), json.loads(json.dumps(work))
        if was == now and len(lines) > 1 and is_sound(folder, point := json.loads(lines[-1])):
            os.truncate(folder / JOURNAL, text.rfind(b"\n") + 1)
            return point
        why = "the files do not match the journal in that folder"
        if was != now:
            why = f"its inputs or settings were different ({', '.join(key for key in now if was.get(key) != now[key])})"
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        pass
    left = list(folder.iterdir())
    if left:
        log.warning("removing the files of an interrupted run in %s: %s", folder, why)
    for path in left:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    return None


# Folders that a command fills file by file: one process at a time, and each file is renamed into place when it is complete.

LOCK = ".download.lock"


def writing(path: Path) -> contextlib.AbstractContextManager[None]:
    """Convert an OSError raised while writing to `path` to a DataError with a readable message."""
    return files.writing(path, DataError, Setting("output"))


@contextlib.contextmanager
def alone_in(folder: Path, notify: Callable[[str], None]) -> Iterator[bool]:
    """Create a folder and wait for its lock; yield False if the folder cannot be locked, for example because it is read-only."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder, LOCK) as lock:
        with writing(folder / LOCK):
            try:
                lock.acquire(None, lambda: notify(f"another download into {folder} is under way; waiting for it"))
            except OSError as error:
                if error.errno not in (errno.EROFS, errno.EACCES):  # a read-only folder may already contain every requested file
                    raise
        yield bool(lock.held)
