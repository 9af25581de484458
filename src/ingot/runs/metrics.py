"""The file metrics.jsonl: one JSON object per line, and every logged step exactly once, even after crashes and resumes.

A resumed run calls `truncate_after` before its first `append`: the killed process may have trained past its last checkpoint and
may have died in the middle of a line.
"""

from __future__ import annotations

import errno
import json
import math
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from ingot.runtime.files import FULL, open_to_append, to_json, write_atomically, writing

MAX_PENDING_LINES = 10_000  # lines kept in memory while the disk is full; beyond that the oldest are dropped


class LineFile:
    """A file to which any thread may append lines; while the disk is full, lines are kept in memory and the run continues."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pending: deque[bytes] = deque(maxlen=MAX_PENDING_LINES)
        self._lock = threading.Lock()

    def append(self, line: str) -> None:
        """Write the pending lines and then this line; if the disk is full, this line becomes pending too."""
        with self._lock, writing(self.path):
            self._pending.append(line.encode(errors="backslashreplace") + b"\n")
            try:
                self._write()
            except OSError as error:
                if error.errno not in FULL:
                    self._pending.pop()
                    raise

    def flush(self) -> None:
        """Write the pending lines; raise CheckpointError if the disk is still full."""
        with self._lock, writing(self.path):
            if self._pending:
                self._write()

    def _write(self) -> None:
        lines = b"".join(self._pending)
        with open_to_append(self.path) as file:
            end = file.tell()
            try:
                if file.write(lines) != len(lines):  # a disk that fills up causes a short write without an error
                    raise OSError(errno.ENOSPC, "No space left on device")
            except OSError:
                file.truncate(end)
                raise
        self._pending.clear()


class Metrics(LineFile):
    """The metrics.jsonl of a run, to which the run appends records."""

    def append_record(self, record: Mapping[str, Any]) -> None:
        """Append a record as one line of JSON."""
        self.append(to_json(dict(record)))

    def truncate_after(self, step: int, evaluated: bool = True) -> int:
        """Drop damaged lines, records after `step` and, unless `evaluated`, evaluations at `step`; return the number dropped."""

        def is_kept(line: bytes) -> bool:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                return False
            if not isinstance(record, dict):
                return False
            last = step - 1 if record.get("kind") == "evaluation" and not evaluated else step
            return not isinstance(record.get("step"), int | float) or record["step"] <= last

        with writing(self.path):
            content = self.path.read_bytes() if self.path.exists() else b""
            lines = content.splitlines()
            kept = [line for line in lines if is_kept(line)]
            repaired = b"".join(line + b"\n" for line in kept)
            if repaired != content:
                write_atomically(self.path, repaired)
        return len(lines) - len(kept)


def is_number(value: object) -> TypeGuard[float]:
    """Return True if a value read from a possibly damaged file is a finite number that a float can hold."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False
