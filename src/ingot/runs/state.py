"""A run's heartbeat (state.json), the lock on its folder, and its result (result.json, written when a session ends).

The process of a run writes state.json every few seconds, so a stale file means that the process has died. Errors in the writing
thread never stop the run: they are reported once, and the thread keeps trying. A crashed session leaves no result.json.

Only one process may own a run folder at a time; on a single host the folder's lock enforces this. On a shared disk other hosts
may not see the lock, and a lock file can be deleted, so a process that has acquired the lock checks whether another process still
writes state.json. It watches the file for changes: a recent timestamp proves nothing, because the clocks of two hosts differ. If
two processes start at the same time without a shared lock, both take the folder. As soon as one of them finds its state.json
overwritten by the other, it stops (Heartbeat.check).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

from ingot.errors import RunError, Setting
from ingot.runtime.files import read_dict, read_json, to_json, write_atomically, writing
from ingot.runtime.locks import FolderLock

Status = Literal["running", "stopped", "completed", "halted", "failed"]
STATE = "state.json"
RESULT = "result.json"
LOCK = ".lock"
LOCK_TIMEOUT_SECONDS = 0.5  # the nanogpt command holds the lock briefly to test whether a folder is free
CLOCK_SKEW_SECONDS = 300.0  # assumed maximum difference between the clocks of two hosts, as in Kerberos


@dataclass(frozen=True)
class State:
    """The content of state.json; times are ISO 8601 in UTC."""

    status: Status
    host: str
    pid: int
    boot_id: str
    started_at: str
    updated_at: str
    heartbeat_seconds: float = 5.0
    step: int = 0
    max_steps: int | None = None
    budget_seconds: float | None = None
    loss: float | None = None
    val_bpb: float | None = None
    val_rows: int | None = None  # rows scored by the last evaluation
    val_rows_of: int | None = None  # rows in the whole validation split
    tokens: int = 0
    tokens_per_second: float | None = None
    elapsed_seconds: float = 0.0
    flops_per_token: float | None = None  # training FLOPs per token at the sequence length data.seq_len
    checkpoint: str | None = None
    error: str | None = None
    stop_reason: str | None = None  # signal:NAME, walltime, stop_file, data or bucket_exhausted:NAME; None: not stopped

    @property
    def age_seconds(self) -> float:
        """Return the seconds since the last heartbeat according to this host's clock; the clock of the run's host may differ."""
        return time.time() - datetime.fromisoformat(self.updated_at).timestamp()


class Heartbeat:
    """A context manager around training that writes state.json at the start, every few seconds, and when the status changes.

    Any thread may call `update`, which waits for the disk only if it changes the status.
    """

    def __init__(
        self, folder: Path, every_seconds: float = 5.0, warn: Callable[[str], None] = lambda line: None, **values: Any
    ) -> None:
        now = utc_now()
        self._path, self._warn = folder / STATE, warn
        self._warned = self._written = False
        self._stranger: State | None = None  # last state.json written by another host; if it never changes, it is stale
        self._other: State | None = None  # state of another live process that writes to this folder
        self.state = State("running", *this_process(), now, now, heartbeat_seconds=every_seconds, **values)  # to be written next
        self._changing, self._writing = threading.Lock(), threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def update(self, **values: Any) -> None:
        """Change fields of the state; state.json is written at once if the status changes, else at the next heartbeat."""
        with self._changing:
            before, self.state = self.state, replace(self.state, **values)
        if "status" in values and values["status"] != before.status:
            self._write(durable=True)

    def check(self) -> None:
        """Raise RunError if another live process also writes state.json."""
        if self._other is not None:
            raise RunError(
                f"{self._path.parent} is also in use by process {self._other.pid} on {self._other.host}, and the folder's disk "
                "does not share locks between hosts; this process stops",
                Setting("training.output_dir"),
                advice="start this run again when the other process has ended, or choose another {0}",
            )

    def __enter__(self) -> Self:
        self._write(durable=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(timeout=2 * self.state.heartbeat_seconds)
        if self.state.status != "running" or error is None:
            return
        interrupted = isinstance(error, KeyboardInterrupt)
        reason = "interrupted" if interrupted else str(error) or type(error).__name__
        self.update(status="stopped" if interrupted else "failed", error=reason)

    def _beat(self) -> None:
        while not self._over.wait(self.state.heartbeat_seconds):
            # Not synced: during a checkpoint write a sync can take longer than a heartbeat, and a live run would look dead.
            self._write(durable=False)

    def _write(self, durable: bool) -> None:
        with self._writing:  # read the values under the lock, so that an old status never overwrites a new one
            mine, there = self.state, read_state(self._path.parent) if self._written else None
            if there is not None and there.status == "running" and (there.host, there.boot_id) != (mine.host, mine.boot_id):
                before, self._stranger = self._stranger, there
                if before is None and not durable:
                    return  # the next heartbeat shows whether the other process is alive
                if before is not None and before.updated_at != there.updated_at:
                    self._other = there
            if self._other is not None:
                return
            try:
                content = to_json(replace(mine, updated_at=utc_now()), indent=2) + "\n"
                write_atomically(self._path, content, durable=durable)
                self._warned, self._written = False, True
            except OSError as error:
                if not self._warned:
                    self._warned = True
                    with contextlib.suppress(Exception):
                        self._warn(f"cannot write {self._path}: {error.strerror or error}; still trying")


def read_state(folder: Path) -> State | None:
    """Read state.json in a run folder; return None if the file is missing or damaged."""
    try:
        state = State(**_values(State, read_json(folder / STATE)))
        valid = state.status in get_args(Status) and math.isfinite(state.age_seconds)
        valid = valid and 0 < state.heartbeat_seconds < math.inf and state.pid > 0  # os.kill treats pids <= 0 as process groups
    except (OSError, ValueError, TypeError, OverflowError):
        return None
    return state if valid else None


def _values(kind: type[State | TrainingResult], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a record that are fields of the dataclass `kind`; raise TypeError if one has the wrong type."""
    types: dict[str, Any] = {"None": type(None), "int": int, "float": int | float, "dict[str, float]": dict}
    values = {field.name: record[field.name] for field in fields(kind) if field.name in record}
    for field in fields(kind):
        names = str(field.type).split(" | ")
        if field.name in values and not any(isinstance(values[field.name], types.get(name, str)) for name in names):
            raise TypeError(f"{field.name} is not {field.type}")
    return values


def this_process() -> tuple[str, int, str]:
    """Return host name, process id and boot id. Processes with the same boot id run on one kernel, where locks are reliable."""
    host = socket.gethostname()
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot_id = host
    return host, os.getpid(), boot_id


def utc_now() -> str:
    """Return the current UTC time in ISO 8601, with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training session, as stored in result.json."""

    status: Status
    final_loss: float | None  # training loss of the last step, in nats per token
    val_loss: float | None
    val_bpb: float | None  # bits per byte of the validation text
    val_other: dict[str, float]  # bits per byte for the byte count that evaluation.bytes does not select, if it is different
    val_rows: int  # rows scored for val_bpb
    val_rows_of: int  # rows in the whole validation split
    total_tokens: int
    total_steps: int
    training_seconds: float
    tokens_per_second: float
    checkpoint_path: Path | None
    artifact_path: Path | None
    artifact_bytes: int | None
    artifact_bpb: float | None  # bits per byte of the artifact, scored in a fresh process
    artifact_rows: int | None  # rows scored for artifact_bpb; None: all rows of the validation split
    sample: str | None
    run_dir: Path
    stop_reason: str | None = None  # signal:NAME, walltime, stop_file, data or bucket_exhausted:NAME; None: not stopped
    data_fingerprint: str | None = None
    val_stride: int | None = None  # tokens between the starts of consecutive, overlapping rows; None: no overlap
    val_step: int | None = None  # step of the validation score; may be before the last step if evaluation.at_end is false
    peak_memory_bytes: int | None = None  # peak on the first rank: GPU memory, or process memory without a GPU


def read_training_result(folder: Path) -> TrainingResult | None:
    """Read result.json in a run folder; return None if the file is missing, damaged or from an incompatible version."""
    try:
        values = _values(TrainingResult, read_dict(folder / RESULT) or {})
        for name in ("checkpoint_path", "artifact_path"):
            values[name] = folder / values[name] if values.get(name) else None
        return TrainingResult(**values, run_dir=folder)
    except TypeError:
        return None


class RunLock:
    """An exclusive lock on a run folder, held until it is released or the process ends for any reason."""

    def __init__(self, folder: Path, notify: Callable[[str], None] = lambda line: None, elsewhere: str = "another {0}") -> None:
        self.folder, self._notify, self._elsewhere = folder, notify, elsewhere
        self._lock = FolderLock(folder, LOCK)

    def acquire(self) -> Self:
        """Acquire the lock, or raise a RunError that names the process using the folder. May wait for several heartbeats."""
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
        """Record this process as the holder of the lock; raise RunError if another process still writes to the folder."""
        host, pid, boot_id = this_process()
        before, state = self._lock.read(), read_state(self.folder)
        holder = _record(before)
        if state is not None and state.status == "running":
            # Holding the lock on the folder itself proves that the previous process on this host has ended. A lock on a lock file
            # proves it only if the file names that process, because a lock file deleted and recreated is a different lock.
            same_file = (holder.get("pid"), holder.get("boot_id")) == (state.pid, state.boot_id)
            dead = state.boot_id == boot_id and (self._lock.folder_held or bool(self._lock.held and same_file))
            if not dead and self._is_beating(state):
                raise self._in_use({})
            self._notify(f"taking over from process {state.pid} on {state.host}, which last reported step {state.step}")
        if holder or not before.strip():  # never overwrite a file that is not a lock file
            self._lock.write(to_json({"host": host, "pid": pid, "boot_id": boot_id, "since": utc_now()}).encode())

    def _is_beating(self, seen: State) -> bool:
        """Return True if another process still updates state.json, although this process could acquire the lock."""
        if seen.age_seconds > 3 * seen.heartbeat_seconds + CLOCK_SKEW_SECONDS:
            return False
        patience = 2.2 * seen.heartbeat_seconds + 0.5
        self._notify(f"{self.folder} was in use on {seen.host} a moment ago; checking for {patience:.0f} s whether it still is")
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
        advice = f"wait for that process, stop it, or choose {self._elsewhere}"
        return RunError(f"{self.folder} is in use by {who}", Setting("training.output_dir"), advice=advice)


def is_lock(path: Path) -> bool:
    """Return True if a file is a run's lock file. An empty file counts, because lock files are empty when they are created."""
    content = FolderLock(path.parent, path.name).read()
    return path.is_file() and (not content or bool(_record(content)))


def _record(content: bytes) -> dict[str, Any]:
    """Return the holder recorded in a lock file; {} if the file was just created or is not an Ingot lock file."""
    try:
        record = dict(json.loads(content))
    except (ValueError, TypeError):
        return {}
    return record if {"pid", "host", "since"} <= record.keys() else {}
