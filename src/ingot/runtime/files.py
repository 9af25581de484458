"""Atomic writes of files and folders: write under a temporary name next to the target, then rename.

A process killed in between leaves only the temporary file, which the next process that locks the folder removes.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import importlib.util
import io
import json
import os
import re
import resource
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, is_dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from ingot.errors import CheckpointError, ConfigError, DataError, IngotError, Setting, Unreadable
from ingot.runtime.locks import FolderLock

MOST_JSON = 1 << 28  # maximum size of a JSON file in bytes; the largest contain a model's tensor list or a tokenizer

NO_PLAIN_FILE = "it is a pipe or a device, not a plain file"
FULL = (errno.ENOSPC, errno.EDQUOT)  # error numbers of a full disk or quota
_OUTPUT_DIR = Setting("training.output_dir")
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.tmp", re.DOTALL)


def is_url(name: str | Path) -> bool:
    """Return True for a URL such as s3://bucket/run; a Path keeps only one of the two slashes."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/" + "/" * isinstance(name, str), str(name)) is not None


def user_path(name: str | Path) -> Path:
    """Return a path given by a user, with ~ expanded; the ~ of an unknown user is kept. URLs are refused."""
    if is_url(name):
        allowed = "training.output_dir, training.resume, training.weights, data.path and the PATH of a model"
        raise ConfigError(f"{name} is a URL, but only {allowed} accept URLs; download it and give its path")
    return Path(os.path.expanduser(name))  # noqa: PTH111 (Path.expanduser raises for an unknown user)


def write_atomically(path: Path, content: bytes | str, *, durable: bool = True) -> None:
    """Atomically replace the content of a file; with `durable`, sync it so that it survives a power cut."""
    with replace_file(path, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replace_file(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` if the block succeeds and is deleted otherwise; raise EINVAL for a device."""
    temporary = temporary_beside(path)
    if not (path.is_symlink() or path.is_file() or path.is_dir()) and path.exists():
        raise OSError(errno.EINVAL, NO_PLAIN_FILE, str(path))
    try:
        with temporary.open("xb", buffering=1 << 20) as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        fsync_dir(path.parent)


@contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` when the block succeeds and is deleted when the block fails.

    If `path` exists, each file replaces the file of the same name, and all other files in `path` stay. The caller must sync the
    files that it writes.
    """
    path = path.resolve()  # a symlink may point to another disk
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):  # temporary folders left behind by killed processes
        if _TEMPORARY.fullmatch(left.name) and left.is_dir() and not left.is_symlink():
            with FolderLock(left) as lock:
                if lock.acquire() and lock.held:
                    shutil.rmtree(left, ignore_errors=True)
    partial = temporary_beside(path)
    partial.mkdir()
    with FolderLock(partial) as lock:
        lock.acquire()  # shows other processes that the folder is in use
        try:
            yield partial
            fsync_dir(partial)
            if path.exists():
                for place, _, names in os.walk(partial, topdown=False):
                    target = path / Path(place).relative_to(partial)
                    target.mkdir(parents=True, exist_ok=True)
                    for name in names:
                        (Path(place) / name).replace(target / name)
                    fsync_dir(target)
                shutil.rmtree(partial)
            else:
                partial.rename(path)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    fsync_dir(path.parent)


def temporary_beside(path: Path) -> Path:
    """Return a random hidden path in the same folder, with a name that `sweep_temporaries` recognises."""
    if not path.name:  # the path is / or .
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")


def open_to_read(path: Path) -> BufferedReader:
    """Open a regular file for reading; raise EINVAL for a pipe or device, because reading from it may block forever."""
    return open(path, "rb", opener=open_plain)  # Path.open accepts no opener


def open_plain(path: str, flags: int) -> int:
    """Open a regular file and return its descriptor; for use as the `opener` of open()."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(mode := os.fstat(descriptor).st_mode) and not stat.S_ISDIR(mode):  # open() rejects folders itself
        os.close(descriptor)
        raise OSError(errno.EINVAL, NO_PLAIN_FILE, str(path))
    return descriptor


def read_json(path: Path) -> Any:
    """Return the parsed content of a JSON file; raise ValueError if it is not JSON, and OSError if it cannot be read."""
    with open_to_read(path) as file:
        if os.fstat(file.fileno()).st_size > MOST_JSON:
            raise ValueError("it is too large")
        try:
            return json.loads(file.read())
        except RecursionError:
            raise ValueError("it is nested too deeply") from None


def read_dict(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if the file is missing, unreadable or not a JSON object."""
    with suppress(CheckpointError):
        return read_object(path)
    return None


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; raise CheckpointError if the file is missing or damaged, and Unreadable on I/O errors."""
    try:
        found = read_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (ValueError, IsADirectoryError):
        found = None
    except OSError as error:
        raise Unreadable(path, error.strerror) from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is damaged: it is not a JSON object")
    return found


def open_to_append(path: Path, buffering: int = 0) -> BinaryIO:
    """Open a file for appending; raise ELOOP for a symlink, because its target may be any file."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # O_NONBLOCK: do not block on a pipe
    return os.fdopen(os.open(path, flags, 0o666), "ab", buffering)


def fsync_dir(path: Path) -> None:
    """Sync a folder, so that a file renamed in it survives a power cut under its new name."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)


def sweep_temporaries(folder: Path) -> None:
    """Remove temporary files that killed processes left in a folder; call this only if this process holds the folder's lock."""
    for leftover in folder.glob(".*.tmp"):
        if _TEMPORARY.fullmatch(leftover.name) and leftover.is_file():
            leftover.unlink(missing_ok=True)


def to_json(record: object, indent: int | None = None, escape: bool = True) -> str:
    """Format a record as standard JSON; nan and infinity become null, paths become strings. With `escape`, write only ASCII."""
    standard = json.loads(json.dumps(record, default=_plain), parse_constant=lambda name: None)
    return json.dumps(standard, indent=indent, ensure_ascii=escape)


def _plain(value: Any) -> object:
    """Convert a dataclass to a dict or a path to a string, because `json` can format neither."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else os.fspath(value)


@contextmanager
def writing(path: Path, error: type[IngotError] = CheckpointError, setting: Setting = _OUTPUT_DIR) -> Iterator[None]:
    """Convert an OSError in the block to an `error` with advice; `setting` is the setting that determines `path`."""
    try:
        yield
    except OSError as refused:
        if refused.errno == errno.ELOOP and path.is_symlink():
            what = f"{path} is a symbolic link, and Ingot does not write through links"
            raise error(what, setting, advice="remove it or choose another {0}") from refused
        what = f"cannot write {path}: {refused.strerror or refused}"
        advice = "free disk space or choose another {0}" if refused.errno in FULL else "make it writable or choose another {0}"
        raise error(what, setting, advice=advice) from refused


@contextmanager
def writing_output(path: Path) -> Iterator[None]:
    """Convert an OSError in the block to a ConfigError that says that `path` cannot be written."""
    try:
        yield
    except OSError as refused:
        raise ConfigError(f"{path} cannot be written: {refused.strerror or refused}") from None


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert an OSError in the block to a DataError that names the file."""
    try:
        yield
    except OSError as refused:
        raise DataError(f"cannot read {refused.filename or path}: {refused.strerror}") from refused


@contextmanager
def readable(path: Path, error: type[IngotError]) -> Iterator[None]:
    """Convert an OSError, MemoryError or ValueError in the block to an `error` that says that `path` cannot be read."""
    try:
        yield
    except UnicodeDecodeError as wrong:
        raise error(f"{path} is not UTF-8 text (byte {wrong.start}); save it as UTF-8") from None
    except MemoryError:
        raise error(f"{path} cannot be read: it does not fit into memory") from None
    except (OSError, ValueError) as wrong:
        raise error(f"{path} cannot be read: {getattr(wrong, 'strerror', None) or wrong}") from None


def remove_if_empty(folder: Path) -> None:
    """Remove a folder if it is empty."""
    with suppress(OSError):
        folder.rmdir()


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal; raise DataError if the file cannot be read."""
    with reading(path), open_to_read(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_utf8(text: str) -> bool:
    """Return True if a string can be encoded as UTF-8; strings with lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def allow_open_files(most: int = 1 << 16) -> None:
    """Raise the limit on open files to `most` or as far as allowed, because shards stay memory-mapped once they are read.

    With the usual limit of 1,024 a run would crash after that many shards, possibly days after its start.
    """
    now, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
    for count in (wanted, min(wanted, 10_240)):  # macOS allows at most 10,240 but does not report that limit
        with suppress(OSError, ValueError):
            if now != resource.RLIM_INFINITY:
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, count), allowed))
            break


# Plots with matplotlib, an optional dependency. Call check_picture before the computation whose result is to be plotted.

SUFFIXES = (".png", ".svg")


def check_picture(file: Path, option: str) -> None:
    """Raise ConfigError if no plot can be written to `file`; `option` is the command-line option to name in the error."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"{option} needs matplotlib, which is not installed; install it with: pip install 'ingot-lm[plots]'")
    if file.suffix.lower() not in SUFFIXES or file.is_dir():
        raise ConfigError(f"{option} {file} is not a supported plot format; give a name that ends in {' or '.join(SUFFIXES)}")
    if not file.parent.is_dir():
        raise ConfigError(f"{option} {file} cannot be written: the folder {file.parent} does not exist; create it first")


def save_picture(figure: Any, file: Path) -> None:
    """Write a matplotlib figure atomically; the same figure always gives the same bytes."""
    import matplotlib

    image, form = io.BytesIO(), file.suffix.lower()[1:]
    # Keep text in SVGs as text, which is small. To make files reproducible, omit the date and use ids that depend on the content.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ingot"}):
        figure.savefig(image, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)
    with writing_output(file):
        write_atomically(file.resolve(), image.getvalue())
