"""Small files that nobody ever sees half-written: a temporary name beside the target, then one rename.

A process killed in between leaves only the temporary file; whoever owns the folder next sweeps it away.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ingot.errors import CheckpointError, DataError, Setting


def write_atomically(path: Path, content: bytes | str, *, durable: bool = True) -> None:
    """Replace a file by new content or leave it as it was; durable: the new content survives a power cut."""
    with replacing(path, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when the block ends, and disappears when it fails."""
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        fsync_dir(path.parent)


def fsync_dir(path: Path) -> None:
    """Make the names in a folder durable: a renamed file is safe only after this."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network disks cannot sync folders
            raise
    finally:
        os.close(descriptor)


def sweep_temporaries(folder: Path) -> None:
    """Remove what killed processes left of atomic writes; only the owner of the folder may do this."""
    for leftover in folder.glob(".*.tmp"):
        if leftover.is_file():
            leftover.unlink(missing_ok=True)


def to_json(record: object, indent: int | None = None) -> str:
    """JSON that every reader accepts: nan and infinities, which JSON does not have, become null."""
    return json.dumps(_finite(record), allow_nan=False, indent=indent)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the disk's refusal into an error that says what to do."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}",
            Setting("training.output_dir"),
            advice="make room for it or choose another {0}",
        ) from error


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def remove_if_empty(folder: Path) -> None:
    """Remove a folder that nothing was written to."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def file_sha256(path: Path) -> str:
    """The sha256 of a file."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
