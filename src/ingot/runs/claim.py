"""Exclusive access to a run folder: one process at a time, and nothing to clean up after a crash.

On one host the folder's lock decides. On a shared disk other hosts may not see the lock, and the lock file may have been
deleted, so after acquiring the lock we also check for a heartbeat that is still being written. A recent heartbeat is judged by
watching whether the file changes, because the clocks of two hosts differ. Two processes that start at the same time without a
shared lock both acquire the folder, and detect the conflict by their heartbeats (Heartbeat.check).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from ingot.errors import RunError, Setting
from ingot.runs.state import CLOCK_SKEW_SECONDS, State, read_state, this_process, utc_now
from ingot.runtime.files import to_json, writing
from ingot.runtime.locks import FolderLock

LOCK = ".lock"
LOCK_TIMEOUT_SECONDS = 0.5  # the nanogpt command holds the lock briefly to test whether a folder is free


class RunLock:
    """An exclusive lock on a run folder, held until it is released or the process ends, even by a kill."""

    def __init__(self, folder: Path, notify: Callable[[str], None] = lambda line: None, elsewhere: str = "another {0}") -> None:
        self.folder, self._notify, self._elsewhere = folder, notify, elsewhere
        self._lock = FolderLock(folder, LOCK)

    def acquire(self) -> Self:
        """Acquire the lock; raise RunError with the current holder. May wait for two heartbeat intervals."""
        if self._lock.held is not False:
            return self
        with writing(self.folder / LOCK):
            if not self._lock.acquire(LOCK_TIMEOUT_SECONDS):
                raise self._in_use(_record(self._lock.read()))
            try:
                self._take_over()
            except BaseException:
                self._lock.release()
                raise
        return self

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()

    def _take_over(self) -> None:
        """Record this process as the holder, unless a process that our lock cannot exclude still writes to the folder."""
        host, pid, boot_id = this_process()
        before, state = self._lock.read(), read_state(self.folder)
        holder = _record(before)
        if state is not None and state.status == "running":
            # Our lock proves that the previous process on this host is gone if it is a lock on the folder itself, or on the same
            # lock file that names the process: a file that was deleted and recreated is a different lock.
            same_file = (holder.get("pid"), holder.get("boot_id")) == (state.pid, state.boot_id)
            dead = state.boot_id == boot_id and (self._lock.folder_held or bool(self._lock.held and same_file))
            if not dead and self._is_beating(state):
                raise self._in_use({})
            self._notify(f"taking over from process {state.pid} on {state.host}, which was last heard of at step {state.step}")
        if holder or not before.strip():  # never overwrite a file with other content
            self._lock.write(to_json({"host": host, "pid": pid, "boot_id": boot_id, "since": utc_now()}).encode())

    def _is_beating(self, seen: State) -> bool:
        """Return True if a process that our lock cannot exclude still writes state.json."""
        if seen.age_seconds > 3 * seen.heartbeat_seconds + CLOCK_SKEW_SECONDS:
            return False
        patience = 2.2 * seen.heartbeat_seconds + 0.5
        self._notify(f"{self.folder} was in use on {seen.host} a moment ago; watching for {patience:.0f} s whether it still is")
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            time.sleep(min(0.25, seen.heartbeat_seconds / 4))
            now = read_state(self.folder)
            if now is not None and now != seen:
                return now.status == "running"
        return False

    def _in_use(self, holder: dict[str, Any]) -> RunError:
        state, who = read_state(self.folder), "another process"
        if not holder and state is not None:
            holder = {"pid": state.pid, "host": state.host, "since": state.started_at}
        if holder:
            since = str(holder["since"])[:19].replace("T", " ")
            who = f"process {holder['pid']} on {holder['host']} since {since} UTC"
        advice = f"wait for it, stop it, or choose {self._elsewhere}"
        return RunError(f"{self.folder} is in use by {who}", Setting("training.output_dir"), advice=advice)


def is_lock(path: Path) -> bool:
    """Return True if a file's content is that of a run's lock file; an empty one was just created."""
    content = FolderLock(path.parent, path.name).read()
    return path.is_file() and (not content or bool(_record(content)))


def _record(content: bytes) -> dict[str, Any]:
    """Return the holder recorded in a lock file; {} if it was just created or is not a lock file of ours."""
    try:
        record = dict(json.loads(content))
    except (ValueError, TypeError):
        return {}
    return record if {"pid", "host", "since"} <= record.keys() else {}
