"""A folder of token data that appears complete or not at all, whatever its format.

It is written under a hidden name beside the target and renamed. A folder is replaced only if it holds nothing but token data.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ingot.errors import DataError
from ingot.runtime.files import fsync_dir

OURS = re.compile(r"dataset\.json|meta\.pkl|(train|val)(\.bin|\.index|/[^/]+(/\d{5}\.(bin|idx))?)?|[\w.-]*(train|val)_\d{6}\.bin")


def check_output(output: Path, overwrite: bool) -> None:
    """Refuse an output that exists, unless it may be replaced and holds nothing else."""
    try:
        if not os.path.lexists(output):
            return
        if not output.is_dir():
            raise DataError(f"output {output} is a file; give a folder that does not exist yet")
        names = sorted(path.relative_to(output).as_posix() for path in output.rglob("*"))
    except OSError as error:
        raise DataError(f"cannot read {output}: {error.strerror}") from error
    if foreign := next((name for name in names if not OURS.fullmatch(name)), None):
        raise DataError(
            f"output {output} holds {foreign}, so it is not only token data and is never replaced; give another folder"
        )
    if names and not overwrite:
        raise DataError(f"output {output} exists; replace it with --force or give another folder")


@contextmanager
def new_folder(output: Path, overwrite: bool) -> Iterator[Path]:
    """A folder beside `output` that takes its name when the block succeeds and vanishes when it fails."""
    check_output(output, overwrite)
    target = output.resolve()
    try:
        with ExitStack() as undo:
            for parent in reversed([parent for parent in target.parents if not parent.exists()]):
                parent.mkdir(exist_ok=True)
                undo.callback(_remove_if_empty, parent)
            prefix = f".{target.name}.partial-"
            _sweep(target.parent, prefix)
            folder, lock = _locked(target.parent, prefix)
            undo.callback(os.close, lock)
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            yield folder
            for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
                fsync_dir(inner)
            _publish(folder, target, output, overwrite)
            fsync_dir(target.parent)
    except OSError as error:
        raise DataError(
            f"cannot write {output}: {error.strerror or error}; free space, or give a folder you can write to"
        ) from error


def _locked(parent: Path, prefix: str) -> tuple[Path, int]:
    while True:
        folder = parent / f"{prefix}{secrets.token_hex(4)}"
        folder.mkdir()
        with suppress(FileNotFoundError):  # another process took it for a leftover before it was locked
            lock = os.open(folder, os.O_RDONLY)
            if _lock(lock) is not False and folder.exists():
                return folder, lock
            os.close(lock)


def _sweep(parent: Path, prefix: str) -> None:
    """Removes what killed processes left; the folder of one that lives is locked."""
    for folder in [path for path in parent.iterdir() if path.name.startswith(prefix)]:
        with suppress(OSError):
            lock = os.open(folder, os.O_RDONLY)
            if _lock(lock):
                shutil.rmtree(folder, ignore_errors=True)
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


def _publish(folder: Path, target: Path, output: Path, overwrite: bool) -> None:
    old = folder.with_name(f"{folder.name}-old")
    check_output(output, overwrite)
    with suppress(FileNotFoundError):
        target.rename(old)
    try:
        folder.rename(target)
    except OSError:
        with suppress(OSError):
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
