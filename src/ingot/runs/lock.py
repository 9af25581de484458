"""One process per run folder, and nothing to clean up after a dead one.

On one kernel flock decides: the kernel frees it on any death. It may not reach the other hosts of a shared disk, so after getting
the lock we also look whether a process of another boot still writes its heartbeat. A recent one is judged by watching the file
move, because the clocks of two hosts differ.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from ingot.errors import RunError, Setting
from ingot.runs.state import CLOCK_SKEW_SECONDS, State, read_state, this_process, utc_now
from ingot.runtime.files import to_json, writing

NAME = ".lock"
_NO_FLOCK = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
_Flock = Literal["ours", "theirs", "unsupported"]


class RunLock:
    """The right to write into a run folder, held until released or until the process ends in whatever way."""

    def __init__(self, folder: Path, notify: Callable[[str], None] = lambda line: None, elsewhere: str = "another {0}") -> None:
        self.folder, self._notify, self._elsewhere = folder, notify, elsewhere
        self._descriptor: int | None = None
        _close_in_forked_children(self)

    def acquire(self) -> Self:
        """Take the folder, or raise RunError that says who has it; may watch a silent heartbeat for two of its intervals."""
        if self._descriptor is not None:
            return self
        path = self.folder / NAME
        with writing(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            before = _content(descriptor)
            try:
                flock = _try_flock(descriptor)
                if flock == "theirs":
                    owner = _holder(_content(descriptor)) or _owner(read_state(self.folder))
                    raise _in_use(self.folder, owner, self._elsewhere)
                host, pid, boot_id = this_process()
                _rewrite(descriptor, to_json({"host": host, "pid": pid, "boot_id": boot_id, "since": utc_now()}).encode())
                try:
                    self._outlive_other_hosts(boot_id if flock == "ours" else None)
                except BaseException:
                    _rewrite(descriptor, before)
                    raise
            except BaseException:
                os.close(descriptor)
                raise
        self._descriptor = descriptor
        return self

    def release(self) -> None:
        """Let the folder go; the lock file stays, because removing it would race with the next process."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def _outlive_other_hosts(self, locked_boot_id: str | None) -> None:
        state = read_state(self.folder)
        if state is None or state.status != "running":
            return
        if state.boot_id != locked_boot_id and _beats(self.folder, state, self._notify):
            raise _in_use(self.folder, _owner(state), self._elsewhere)
        self._notify(f"taking over from process {state.pid} on {state.host}, which was last heard of at step {state.step}")


def _beats(folder: Path, seen: State, notify: Callable[[str], None] = lambda line: None) -> bool:
    """Whether somebody beyond the reach of our lock still writes state.json."""
    if seen.age_seconds > 3 * seen.heartbeat_seconds + CLOCK_SKEW_SECONDS:
        return False
    patience = 2.2 * seen.heartbeat_seconds + 0.5
    notify(f"{folder} was in use on {seen.host} a moment ago; watching for {patience:.0f} s whether it still is")
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        time.sleep(min(0.25, seen.heartbeat_seconds / 4))
        now = read_state(folder)
        if now is not None and now != seen:
            return now.status == "running"
    return False


def _try_flock(descriptor: int) -> _Flock:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "theirs"
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        return "unsupported"
    return "ours"


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, 4096, 0)


def _rewrite(descriptor: int, content: bytes) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, content, 0)


def _holder(content: bytes) -> tuple[Any, Any, str] | None:
    try:
        record = json.loads(content)
        return record["pid"], record["host"], str(record["since"])
    except (ValueError, KeyError, TypeError):  # it has just been taken and nothing is written yet
        return None


def _owner(state: State | None) -> tuple[Any, Any, str] | None:
    return (state.pid, state.host, state.started_at) if state is not None else None


def _in_use(folder: Path, owner: tuple[Any, Any, str] | None, elsewhere: str) -> RunError:
    who = "another process"
    if owner is not None:
        pid, host, since = owner
        who = f"process {pid} on {host} since {since[:19].replace('T', ' ')} UTC"
    advice = f"wait for it, stop it, or choose {elsewhere}"
    return RunError(f"{folder} is in use by {who}", Setting("training.output_dir"), advice=advice)


def _close_in_forked_children(lock: RunLock) -> None:
    # A forked child shares the lock and would keep it after our death; closing its copy leaves ours locked.
    reference = weakref.ref(lock)

    def close() -> None:
        if (held := reference()) is not None:
            held.release()

    os.register_at_fork(after_in_child=close)
