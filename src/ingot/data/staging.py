"""The hidden folder in which token data is made, and how it takes the place of the output all at once.

The folder is locked by the process that writes it. What a killed process leaves is continued if it was the same work, which its
journal says, and removed if not. A journal is lines of JSON: what the work is, and then the points from which it can go on. An
output that exists is replaced only if it holds nothing but token data, of whatever format.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ingot.errors import ConfigError, DataError
from ingot.runtime.files import fsync_dir

log = logging.getLogger(__name__)

JOURNAL = "journal.jsonl"
OURS = re.compile(r"dataset\.json|meta\.pkl|(train|val)(\.bin|\.index|/[^/]+(/\d{5}\.(bin|idx))?)?|[\w.-]*(train|val)_\d{6}\.bin")


class Stage:
    """The folder and its journal; `saved` is the last point of it, None where nothing is to be continued."""

    def __init__(self, folder: Path, work: Any, saved: Any = None) -> None:
        self.folder, self.saved = folder, saved
        self._work, self.can_continue = work, saved is not None

    def save(self, point: Any) -> None:
        """Notes a point from which this work can be continued; all files it speaks of must be on the disk."""
        fsync_dir(self.folder)
        with (self.folder / JOURNAL).open("a", encoding="utf-8") as file:
            if not file.tell():
                file.write(json.dumps(self._work) + "\n")
            file.write(json.dumps(point) + "\n")
            file.flush()
            os.fsync(file.fileno())
        fsync_dir(self.folder)
        self.can_continue = True


@contextmanager
def staged(
    output: Path, overwrite: bool, work: Any = None, is_sound: Callable[[Path, Any], bool] = lambda folder, point: False
) -> Iterator[Stage]:
    """A locked folder beside `output` that takes its name when the block succeeds.

    When it fails, the folder vanishes, unless the same `work` can be continued later; None never can. `is_sound` says whether
    the files of a folder are what a point in its journal says.
    """
    target = output.resolve()
    stage: Stage | None = None
    try:
        parents = [parent for parent in target.parents if not parent.exists()]
        with ExitStack() as undo:
            for parent in reversed(parents):
                parent.mkdir(exist_ok=True)
                undo.callback(_remove_if_empty, parent)
            stage, lock = _open_stage(target, work, is_sound)
            undo.callback(os.close, lock)
            undo.push(lambda kind, error, trace: _abandon(stage, error))
            yield stage
            (stage.folder / JOURNAL).unlink(missing_ok=True)
            for folder in (stage.folder, *(path for path in stage.folder.rglob("*") if path.is_dir())):
                fsync_dir(folder)
            _publish(stage.folder, target, output, overwrite)
            undo.pop_all()
            os.close(lock)
            fsync_dir(target.parent)
    except OSError as error:
        stays = "; what was written stays, and the same command then continues" if stage and stage.can_continue else ""
        raise DataError(
            f"cannot write {output}: {error.strerror or error}; free space, or give a folder you can write to{stays}"
        ) from error


def check_output(output: Path, overwrite: bool) -> None:
    """Refuse an output that exists, unless it is token data and may be replaced."""
    try:
        if not os.path.lexists(output):
            return
        if not output.is_dir():
            raise DataError(f"output {output} is a file; give a folder that does not exist yet")
        names = (path.relative_to(output).as_posix() for path in output.rglob("*"))
        foreign, empty = next((name for name in names if not OURS.fullmatch(name)), None), not any(output.iterdir())
    except OSError as error:
        raise DataError(f"cannot read {output}: {error.strerror}") from error
    if foreign:
        raise DataError(
            f"output {output} holds {foreign}, so it is not only token data and is never replaced; give another folder"
        )
    if not empty and not overwrite:
        raise DataError(f"output {output} exists; replace it with --force or give another folder")


def _abandon(stage: Stage, error: BaseException | None) -> bool:
    """Removes the folder, unless it can be continued and the user did nothing wrong."""
    mistake = isinstance(error, ConfigError | DataError) and not isinstance(error.__cause__, OSError)
    if stage.can_continue and not mistake:
        log.warning("what was prepared stays in %s; the same command continues it", stage.folder)
    else:
        shutil.rmtree(stage.folder, ignore_errors=True)
    return False


def _open_stage(target: Path, work: Any, is_sound: Callable[[Path, Any], bool]) -> tuple[Stage, int]:
    """The folder that a killed process left of the same work, or else a new one; other leftovers are removed."""
    prefix = f".{target.name}.partial-"
    taken: tuple[Stage, int] | None = None
    for folder in sorted(path for path in target.parent.iterdir() if path.name.startswith(prefix)):
        with suppress(OSError):
            lock = os.open(folder, os.O_RDONLY)
            if not _lock(lock) or not _is_at(folder, lock):  # a folder that is being written is locked by its writer
                os.close(lock)
                continue
            point = None if taken or work is None else _last_point(folder, work)
            if point is not None and is_sound(folder, point):
                taken = Stage(folder, work, point), lock
                continue
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
    if taken:
        return taken
    folder, lock = _locked_folder(target.parent, prefix)
    return Stage(folder, work), lock


def _last_point(folder: Path, work: Any) -> Any:
    """The last point in a journal of this work; a line that was cut short is removed from it."""
    journal = folder / JOURNAL
    try:
        text = journal.read_bytes()
        os.truncate(journal, text.rfind(b"\n") + 1)
        lines = text.split(b"\n")[:-1]
        if len(lines) < 2 or json.loads(lines[0]) != json.loads(json.dumps(work)):
            return None
        return json.loads(lines[-1])
    except (OSError, ValueError):
        return None


def _locked_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    while True:
        folder = parent / f"{prefix}{secrets.token_hex(4)}"
        folder.mkdir()
        with suppress(FileNotFoundError):  # another process took the folder for a leftover before it was locked
            lock = os.open(folder, os.O_RDONLY)
            if _lock(lock) is not False and folder.exists():
                return folder, lock
            os.close(lock)


def _lock(folder: int) -> bool | None:
    """True: locked until closed. False: another process has it. None: this file system has no locks."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(folder: Path, opened: int) -> bool:
    """Whether a name still means the folder that was opened: its writer may have given it another."""
    try:
        return os.path.samestat(folder.stat(), os.fstat(opened))
    except FileNotFoundError:
        return False


def _publish(folder: Path, target: Path, output: Path, overwrite: bool) -> None:
    old = folder.with_name(f"{folder.name}-old")
    while True:
        try:
            folder.rename(target)  # succeeds where there is nothing or an empty folder
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            check_output(output, overwrite)
            shutil.rmtree(old, ignore_errors=True)
            with suppress(FileNotFoundError):
                target.rename(old)
        else:
            shutil.rmtree(old, ignore_errors=True)
            return


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
