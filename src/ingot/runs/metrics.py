"""metrics.jsonl: one JSON object per line, each step once, whatever happened to the processes that wrote it.

A resumed run calls `truncate_after` before its first `append`: the killed process may have gone on past its last checkpoint
and may have died in the middle of a line.
"""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.errors import CheckpointError
from ingot.runtime.files import FULL, open_to_append, open_to_read, to_json, write_atomically, writing

# A file of a run that grows line by line, on a disk that may be full for a while.

HELD_LINES = 10_000  # that wait for room; beyond them the oldest go


class LineFile:
    """Lines that threads add to a file; a full disk keeps them waiting, and the run goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: deque[bytes] = deque(maxlen=HELD_LINES)
        self._writing = threading.Lock()

    def append(self, line: str) -> None:
        """Add a line, after those for which there was no room: it is in the file when this returns, or waits for the next one.

        CheckpointError: the disk refuses it for another reason.
        """
        with self._writing, writing(self.path):
            self._held.append(line.encode(errors="backslashreplace") + b"\n")
            try:
                self._write()
            except OSError as error:
                if error.errno not in FULL:
                    self._held.pop()
                    raise

    def flush(self) -> None:
        """Write the lines that wait; CheckpointError: there still is no room."""
        with self._writing, writing(self.path):
            if self._held:
                self._write()

    def _write(self) -> None:
        """Write all lines or nothing."""
        lines = b"".join(self._held)
        with open_to_append(self.path) as file:
            end = file.tell()
            try:
                if file.write(lines) != len(lines):  # a disk that fills up takes part of a line without complaint
                    raise OSError(errno.ENOSPC, "No space left on device")
            except OSError:
                file.truncate(end)
                raise
        self._held.clear()


@dataclass(frozen=True)
class Mark:
    """How far metrics.jsonl was read: which file, up to where, and the line before that, because inodes are used again."""

    inode: int
    offset: int
    line: bytes = b""
    start: int = 0  # where the reading began; at 0 the records are all there are, and what was read before no longer counts


class Metrics:
    """The record of a run, step by step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = LineFile(path)

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one record; it is in the file when this returns, or waits there for room on the disk."""
        self._lines.append(to_json(dict(record)))

    def flush(self) -> None:
        """Write the records that wait."""
        self._lines.flush()

    def truncate_after(self, step: int, evaluated: bool = True) -> int:
        """Drop the records of later steps and lines that are not records; returns how many lines went.

        `evaluated`: whether the evaluation at this very step belongs to what is continued, or will be repeated.
        """
        with writing(self.path):
            content = self.path.read_bytes() if self.path.exists() else b""
            lines = content.splitlines()
            kept = [line for line in lines if (record := _parse(line)) is not None and not _is_after(record, step, evaluated)]
            repaired = b"".join(line + b"\n" for line in kept)
            if repaired != content:
                write_atomically(self.path, repaired)
        return len(lines) - len(kept)

    def read_since(self, since: Mark | None = None) -> tuple[list[dict[str, Any]], Mark]:
        """The records after a mark, and the next mark; from the start where a resume has replaced the file."""
        try:
            with open_to_read(self.path) as file:
                inode, start = os.fstat(file.fileno()).st_ino, 0
                if since is not None and since.inode == inode:
                    file.seek(since.offset - len(since.line))
                    start = since.offset if file.read(len(since.line)) == since.line else 0
                file.seek(start)
                content = file.read()
        except FileNotFoundError:
            return [], Mark(0, 0)
        lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)  # a last line may still be written
        records = []
        for number, line in enumerate(lines, start=1):
            if (record := _parse(line)) is None:
                after = f" after byte {start:,}" if start else ""
                raise CheckpointError(f"{self.path}, line {number}{after}, is not a JSON object; delete that line")
            records.append(record)
        last = lines[-1] if lines else since.line if since is not None and start else b""
        return records, Mark(inode, start + sum(map(len, lines)), last, start)


def is_number(value: object) -> bool:
    """Whether a value of a record can be drawn and counted with: finite, and no larger than a float holds."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:
        return False


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _is_after(record: dict[str, Any], step: int, evaluated: bool) -> bool:
    last = step - 1 if record.get("kind") == "evaluation" and not evaluated else step
    return isinstance(record.get("step"), int | float) and record["step"] > last
