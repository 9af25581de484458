"""state.json: how a run is doing, written by its own process every few seconds, so that its silence says something too.

The thread that writes it never harms the run: a full disk or a vanished folder is reported once and tried again.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

from ingot.errors import RunError, Setting
from ingot.runtime.files import read_dict, read_json, to_json, write_atomically

Status = Literal["running", "stopped", "completed", "halted", "failed"]
STATE = "state.json"
CLOCK_SKEW_SECONDS = 300.0  # a heartbeat older than this is old on any pair of clocks worth the name (Kerberos allows the same)


@dataclass(frozen=True)
class State:
    """What state.json says; times are ISO 8601 in UTC."""

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
    val_rows: int | None = None  # by which it was found
    val_rows_of: int | None = None  # all rows of the validation split
    tokens: int = 0
    tokens_per_second: float | None = None
    elapsed_seconds: float = 0.0
    flops_per_token: float | None = None  # of training, at data.seq_len
    checkpoint: str | None = None
    error: str | None = None
    stop_reason: str | None = None  # signal:NAME, walltime, stop_file, data, bucket_exhausted:NAME; None: its steps are done

    @property
    def age_seconds(self) -> float:
        """Seconds since the last heartbeat by our clock; another host's clock may differ."""
        return time.time() - datetime.fromisoformat(self.updated_at).timestamp()


class Heartbeat:
    """Writes state.json now, every few seconds, and at once when the status changes; a context around training.

    Any thread may call `update`, which never waits for the disk unless it changes the status. Where the lock of a folder does not
    reach other hosts, two that start together both get it: whoever finds the other's state in place of its own writes no more.
    """

    def __init__(
        self, folder: Path, every_seconds: float = 5.0, warn: Callable[[str], None] = lambda line: None, **known: Any
    ) -> None:
        now = utc_now()
        self._path = folder / STATE
        self._warn = warn
        self._warned = self._written = False
        self._stranger: State | None = None  # which stood in place of ours, and may have been copied there
        self._other: State | None = None  # of a process that writes here too
        self._state = State("running", *this_process(), started_at=now, updated_at=now, heartbeat_seconds=every_seconds)
        self._state = replace(self._state, **known)
        self._changing, self._writing = threading.Lock(), threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    @property
    def state(self) -> State:
        """What the next heartbeat will say."""
        return self._state

    def update(self, **known: Any) -> None:
        """Set the latest values by their names in `State`."""
        with self._changing:
            before, self._state = self._state, replace(self._state, **known)
        if "status" in known and known["status"] != before.status:
            self._write(durable=True)

    def check(self) -> None:
        """RunError where another process has taken the folder."""
        if self._other is not None:
            raise RunError(
                f"{self._path.parent} is in use by process {self._other.pid} on {self._other.host} too, which the locks of its "
                "disk do not reach; this one ends",
                Setting("training.output_dir"),
                advice="start it again after the other, or choose another {0}",
            )

    def __enter__(self) -> Self:
        self._write(durable=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(timeout=2 * self._state.heartbeat_seconds)
        if self._state.status != "running" or error is None:
            return
        if isinstance(error, KeyboardInterrupt):
            self.update(status="stopped", error="interrupted")
        else:
            self.update(status="failed", error=str(error) or type(error).__name__)

    def _beat(self) -> None:
        while not self._over.wait(self._state.heartbeat_seconds):
            # Not synced: a sync that queues behind a checkpoint can take longer than a heartbeat, and a live run would look dead.
            self._write(durable=False)

    def _write(self, durable: bool) -> None:
        with self._writing:  # the values are read inside, so an old status never overwrites a new one
            mine, seen = self._state, read_state(self._path.parent) if self._written else None
            if seen is not None and seen.status == "running" and (seen.host, seen.boot_id) != (mine.host, mine.boot_id):
                before, self._stranger = self._stranger, seen
                if before is None and not durable:
                    return  # whether it lives is seen at the next beat
                if before is not None and before.updated_at != seen.updated_at:
                    self._other = seen
            if self._other is not None:
                return
            try:
                write_atomically(
                    self._path, to_json(asdict(replace(mine, updated_at=utc_now())), indent=2) + "\n", durable=durable
                )
                self._warned, self._written = False, True
            except OSError as error:
                if not self._warned:
                    self._warned = True
                    with contextlib.suppress(Exception):
                        self._warn(f"cannot write {self._path}: {error.strerror or error}; still trying")


def read_state(folder: Path) -> State | None:
    """What the run in this folder last said of itself; None where there is no state.json or a damaged one."""
    try:
        record = read_json(folder / STATE)
        state = State(**{field.name: record[field.name] for field in fields(State) if field.name in record})
        sound = all(_has_type(getattr(state, field.name), str(field.type)) for field in fields(State))
        sound = sound and state.status in get_args(Status) and math.isfinite(state.age_seconds)
        sound = sound and 0 < state.heartbeat_seconds < math.inf and state.pid > 0  # signals to others go to many processes
    except (OSError, ValueError, TypeError, OverflowError):
        return None
    return state if sound else None


def _has_type(value: object, kind: str) -> bool:
    """Whether a value is of the kind that a field of a state says."""
    kinds: dict[str, Any] = {"None": type(None), "int": int, "float": int | float, "dict[str, float]": dict}
    kinds["0"] = object  # the kind of everything in golf's one file, which has no annotations
    return any(isinstance(value, kinds.get(one, str)) for one in kind.split(" | "))


def this_process() -> tuple[str, int, str]:
    """Host, process id and boot id: the same boot id means the same kernel, hence locks that hold."""
    host = socket.gethostname()
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot_id = host
    return host, os.getpid(), boot_id


def utc_now() -> str:
    """The time as it is written everywhere in a run folder."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


# result.json: what the last session of a run came to, written when it ends; a session that died leaves none.

RESULT = "result.json"


@dataclass(frozen=True)
class TrainingResult:
    """What a session of a run came to."""

    status: Status
    final_loss: float | None  # nats per token, of the last step
    val_loss: float | None
    val_bpb: float | None  # bits per byte of the validation text
    val_other: dict[str, float]  # the same by the other count of bytes, where there are two
    val_rows: int  # by which these were found
    val_rows_of: int  # of the rows of the validation split
    total_tokens: int
    total_steps: int
    training_seconds: float
    tokens_per_second: float
    checkpoint_path: Path | None
    artifact_path: Path | None
    artifact_bytes: int | None
    artifact_bpb: float | None  # of the artifact, read again by another process
    artifact_rows: int | None  # by which that was found; None: by all
    sample: str | None
    run_dir: Path
    stop_reason: str | None = None  # signal:NAME, walltime, stop_file, data, bucket_exhausted:NAME; None: its steps are done
    data_fingerprint: str | None = None  # of what it was trained and scored on
    val_stride: int | None = None  # of a sliding score: tokens from one row to the next; None: rows did not overlap
    val_step: int | None = None  # at which the validation score was found; not the last one where evaluation.at_end is off
    peak_memory_bytes: int | None = None  # of the first rank: the GPU's, or of the process where there is none


def result_record(result: TrainingResult, session: int, export: Mapping[str, Any]) -> dict[str, Any]:
    """What result.json says: the result, with paths from the run folder on, and what the exporter found worth telling."""
    told = {name: _from(result.run_dir, value) for name, value in asdict(result).items() if name != "run_dir"}
    return {"session": session, "ended_at": utc_now(), **told, "export": dict(export)}


def read_result(folder: Path) -> dict[str, Any] | None:
    """What result.json says; None where there is none or a damaged one."""
    return read_dict(folder / RESULT)


def read_training_result(folder: Path) -> TrainingResult | None:
    """The result that result.json tells, with its paths from here on; None where there is none or one of another version."""
    record = read_result(folder) or {}
    told = {one.name: record[one.name] for one in fields(TrainingResult) if one.name in record}
    if not all(_has_type(told[one.name], str(one.type)) for one in fields(TrainingResult) if one.name in told):
        return None
    for name in ("checkpoint_path", "artifact_path"):
        told[name] = folder / told[name] if told.get(name) else None
    try:
        return TrainingResult(**told, run_dir=folder)
    except TypeError:
        return None


def _from(folder: Path, value: Any) -> Any:
    if not isinstance(value, Path):
        return value
    return str(value.relative_to(folder) if value.is_relative_to(folder) else value)
