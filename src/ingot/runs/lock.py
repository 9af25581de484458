"""One process per run folder, and nothing to clean up after a dead one.

On one kernel the lock of the folder decides. It may not reach the other hosts of a shared disk, and there the lock file may have
been deleted, so after getting the lock we also check for a heartbeat that is still being written. A recent one is judged by
watching whether the file changes, because the clocks of two hosts differ. Two processes that start together where no lock reaches
both get the folder, and find out by their heartbeats (Heartbeat.check).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from ingot.errors import Interrupted, RunError, Setting
from ingot.runs.state import CLOCK_SKEW_SECONDS, State, read_state, this_process, utc_now
from ingot.runtime.files import to_json, writing
from ingot.runtime.locks import FolderLock

LOCK = ".lock"
LOCK_TIMEOUT_SECONDS = 0.5  # the nanogpt command takes the lock for an instant to see whether a folder is free


class RunLock:
    """The right to write into a run folder, held until released or until the process ends in whatever way."""

    def __init__(
        self,
        folder: Path,
        notify: Callable[[str], None] = lambda line: None,
        elsewhere: str = "another {0}",
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.folder, self._notify, self._elsewhere, self._stop = folder, notify, elsewhere, stop
        self._lock = FolderLock(folder, LOCK)

    def acquire(self) -> Self:
        """Take the folder; RunError says who has it. May watch a silent heartbeat for two of its intervals.

        Interrupted: `stop`, which is called meanwhile, returned True.
        """
        if self._lock.held is not False:
            return self
        with writing(self.folder / LOCK):
            if not self._lock.acquire(LOCK_TIMEOUT_SECONDS):
                raise _in_use(self.folder, _holder(self._lock.read()) or _owner(read_state(self.folder)), self._elsewhere)
            try:
                self._take_over(self._lock.read())
            except BaseException:
                self._lock.release()
                raise
        return self

    def release(self) -> None:
        """Release the folder."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def _take_over(self, before: bytes) -> None:
        """Record that we have the folder, unless a process beyond the reach of our lock still writes there."""
        host, pid, boot_id = this_process()
        ours = not before.strip() or _holder(before) is not None  # any other content is not ours to replace
        if ours:
            self._lock.write(to_json({"host": host, "pid": pid, "boot_id": boot_id, "since": utc_now()}).encode())
        try:
            state = read_state(self.folder)
            if state is None or state.status != "running":
                return
            if not self._proves_dead(state, before) and _is_beating(self.folder, state, self._notify, self._stop):
                raise _in_use(self.folder, _owner(state), self._elsewhere)
        except BaseException:
            if ours:
                self._lock.write(before)
            raise
        self._notify(f"taking over from process {state.pid} on {state.host}, which was last heard of at step {state.step}")

    def _proves_dead(self, state: State, before: bytes) -> bool:
        """Return True if holding the lock proves that the process of a state is gone.

        The process must be of this kernel and have held this very lock: the folder's, or the file that names it, since a deleted
        and recreated file is another lock.
        """
        named = _record(before)
        same_file = (named.get("pid"), named.get("boot_id")) == (state.pid, state.boot_id)
        return state.boot_id == this_process()[2] and (self._lock.folder_held or bool(self._lock.held and same_file))


def is_lock(path: Path) -> bool:
    """Return True if a file is the lock of a run by its content; an empty one was just created."""
    content = FolderLock(path.parent, path.name).read()
    return path.is_file() and (not content or _holder(content) is not None)


def _is_beating(folder: Path, seen: State, notify: Callable[[str], None], stop: Callable[[], bool]) -> bool:
    """Return True if a process beyond the reach of our lock still writes state.json."""
    if seen.age_seconds > 3 * seen.heartbeat_seconds + CLOCK_SKEW_SECONDS:
        return False
    patience = 2.2 * seen.heartbeat_seconds + 0.5
    notify(f"{folder} was in use on {seen.host} a moment ago; watching for {patience:.0f} s whether it still is")
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        time.sleep(min(0.25, seen.heartbeat_seconds / 4))
        if stop():
            raise Interrupted
        now = read_state(folder)
        if now is not None and now != seen:
            return now.status == "running"
    return False


def _holder(content: bytes) -> tuple[Any, Any, str] | None:
    record = _record(content)
    return (record["pid"], record["host"], str(record["since"])) if {"pid", "host", "since"} <= record.keys() else None


def _record(content: bytes) -> dict[str, Any]:
    """Return the content of a lock file; empty if it was just created or is somebody else's."""
    try:
        return dict(json.loads(content))
    except (ValueError, TypeError):
        return {}


def _owner(state: State | None) -> tuple[Any, Any, str] | None:
    return (state.pid, state.host, state.started_at) if state is not None else None


def _in_use(folder: Path, owner: tuple[Any, Any, str] | None, elsewhere: str) -> RunError:
    who = "another process"
    if owner is not None:
        pid, host, since = owner
        who = f"process {pid} on {host} since {since[:19].replace('T', ' ')} UTC"
    advice = f"wait for it, stop it, or choose {elsewhere}"
    return RunError(f"{folder} is in use by {who}", Setting("training.output_dir"), advice=advice)
