"""A file of a run that grows line by line, on a disk that may be full for a while."""

from __future__ import annotations

import errno
import threading
from collections import deque
from pathlib import Path

from ingot.runtime.files import FULL, open_to_append, writing

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
