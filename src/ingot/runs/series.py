"""The numbers of metrics.jsonl, read incrementally: curves, step times, best score and task scores.

Each line is read once, from the byte offset where the last read ended, so the cost of watching a run does not grow with its
length. Damaged lines are skipped and counted. A file that a resume has replaced is read again from the start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from ingot.errors import Unreadable
from ingot.runs.metrics import is_number
from ingot.runtime.files import open_to_read

AXES = ("step", "tokens", "elapsed_seconds")
STEP_SECONDS = "step_seconds"  # computed from the elapsed seconds of consecutive lines
COLUMNS = {
    "train": (*AXES, "loss", "grad_norm", "learning_rate", "tokens_per_second", STEP_SECONDS),
    "evaluation": (*AXES, "val_bpb", "val_loss"),
}
MAX_BINS = 768  # about the width of a chart in pixels
MAX_AXIS = 2.0**53  # largest integer that a float holds exactly; no step, token count or time of a run comes near this limit
BLOCK_BYTES = 1 << 20  # bytes read at once: about 3,000 lines, 10 ms
LAST_LINE_BYTES = 4096  # bytes at the end of the last line read; if they change, the file was replaced

Columns = NDArray[np.float64]
Axis = Literal["steps", "tokens", "seconds"]
Point = tuple[float, float]
AXIS_COLUMNS: dict[Axis, str] = {"steps": "step", "tokens": "tokens", "seconds": "elapsed_seconds"}


class Bins:
    """Columns with one number per line of metrics.jsonl; `binned` groups consecutive lines into at most MAX_BINS bins."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.lines = tuple(names), 0
        self._values = np.empty((len(self.names), 0))  # (columns, capacity)

    @property
    def stride(self) -> int:
        """Return the number of lines per bin, a power of two."""
        return 1 << max(0, -(-self.lines // MAX_BINS) - 1).bit_length()

    def column(self, name: str) -> Columns:
        """Return a column: one value per line."""
        return self._values[self.names.index(name), : self.lines]

    def push(self, columns: Columns) -> None:
        """Append lines, given as an array of shape (columns, lines)."""
        before, self.lines = self.lines, self.lines + columns.shape[1]
        if self.lines > self._values.shape[1]:  # at least double the capacity, so that reading takes linear time
            self._values = np.hstack([self._values, np.empty((len(self.names), self.lines))])
        self._values[:, before : self.lines] = columns

    def binned(self, first: int = 0) -> dict[str, Columns]:
        """Return the minimum, mean and maximum of each column per bin, from bin `first` on; nan values are ignored."""
        lines = self._values[:, first * self.stride : self.lines]
        starts, known = np.arange(0, lines.shape[1], self.stride), np.isfinite(lines)
        total = np.add.reduceat(np.where(known, lines, 0.0), starts, axis=1)
        count = np.add.reduceat(known, starts, axis=1, dtype=float)
        mean = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
        return {"low": np.fmin.reduceat(lines, starts, axis=1), "mean": mean, "high": np.fmax.reduceat(lines, starts, axis=1)}

    def points(self, x: str, y: str) -> list[Point]:
        """Return (mean of column x, mean of column y) for every bin that has values in both columns."""
        pair = self.binned()["mean"][[self.names.index(x), self.names.index(y)]]
        return [(float(a), float(b)) for a, b in pair.T[np.isfinite(pair).all(axis=0)]]


STALL_FACTOR = 3.0  # a step this many times slower than the median counts as a stall
PERCENTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
MAX_STALLS = 64


@dataclass(frozen=True)
class Timing:
    """Percentiles of the seconds per step, and the longest stalls as (step, seconds lost compared with the median)."""

    percentiles: dict[str, float]
    stalls: list[tuple[int, float]]


@dataclass(frozen=True)
class Curves:
    """The curves of a run over steps, tokens or seconds; `tasks` has one curve of accuracies per task."""

    loss: list[Point]
    val_bpb: list[Point]
    tokens_per_second: list[Point]
    tasks: dict[str, list[Point]]


class Series:
    """The numbers read so far from one metrics.jsonl. Only one thread may call `read`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0  # number of times that the file was replaced
        self._reset()

    def _reset(self) -> None:
        self.bins = {kind: Bins(names) for kind, names in COLUMNS.items()}
        self.lines = self.damaged = self.offset = 0  # `offset`: number of bytes read so far
        self.evaluations: list[dict[str, Any]] = []  # evaluation records, each with the training tokens so far in `tokens`
        self.slowest_rank: list[float] | None = None  # rank number, its median step time, and that of the median rank
        self._inode, self._last_line = 0, b""
        self._previous = np.full((3, 1), np.nan)  # step, elapsed seconds and session of the last train line
        self._tokens: Any = 0

    @property
    def best(self) -> dict[str, Any] | None:
        """Return the record of the best evaluation; None if nothing was evaluated."""
        return next((one for one in reversed(self.evaluations) if one.get("best") and is_number(one.get("val_bpb"))), None)

    def timing(self) -> Timing:
        """Return the percentiles of seconds per step, and the longest stalls."""
        step, seconds = self.bins["train"].column("step"), self.bins["train"].column(STEP_SECONDS)
        if not (known := np.isfinite(seconds)).any():
            return Timing({}, [])
        shares = np.quantile(seconds[known], list(PERCENTILES.values()), method="higher")
        percentiles = dict(zip(PERCENTILES, shares.tolist(), strict=True))
        median = percentiles["p50"]
        excess = (seconds - median) * np.diff(step, prepend=np.nan)
        slow = np.flatnonzero(seconds > STALL_FACTOR * median)
        longest = slow[np.argsort(-excess[slow])][:MAX_STALLS]
        return Timing(percentiles, [(int(step[line]), float(excess[line])) for line in longest])

    def curves(self, axis: Axis = "steps") -> Curves:
        """Return the curves over steps, tokens or seconds; numbers that are not finite are left out."""
        x = AXIS_COLUMNS[axis]
        train, evaluations = self.bins["train"], self.bins["evaluation"]
        tasks: dict[str, list[Point]] = {}
        for record in self.evaluations:
            for name, task in record["tasks"].items():
                # acc_norm ranks answers by log-probability per character; papers report it if the answers differ in length.
                place, accuracy = record.get(x), task.get("acc_norm", task.get("acc"))
                if is_number(place) and is_number(accuracy):
                    tasks.setdefault(name, []).append((float(place), accuracy))
        return Curves(train.points(x, "loss"), evaluations.points(x, "val_bpb"), train.points(x, "tokens_per_second"), tasks)

    def read(self) -> Series:
        """Read all new lines; raise Unreadable if the file exists and cannot be read."""
        try:
            while self.read_block():
                pass
        except FileNotFoundError:
            pass
        except OSError as error:
            raise Unreadable(self.path, error.strerror) from None
        return self

    def read_block(self) -> bool:
        """Read one block of new lines and return True if there may be more; raise OSError if the file cannot be read."""
        with open_to_read(self.path) as file:
            inode = os.fstat(file.fileno()).st_ino
            # The last line read must still be at its offset. The same inode alone proves nothing: file systems reuse inodes.
            file.seek(self.offset - len(self._last_line))
            if self.offset and not (inode == self._inode and file.read(len(self._last_line)) == self._last_line):
                self.generation += 1
                self._reset()
            self._inode = inode
            file.seek(self.offset)
            content = file.read(BLOCK_BYTES)
        end = content.rfind(b"\n") + 1
        is_full = len(content) == BLOCK_BYTES
        if end:
            self.offset += end
            self._last_line = content[content.rfind(b"\n", 0, end - 1) + 1 : end][-LAST_LINE_BYTES:]
            self._add(content[:end])
        elif is_full:  # the line is longer than a block, so Ingot did not write it
            self.damaged += 1
            self.offset, self._last_line = self.offset + BLOCK_BYTES, content[-LAST_LINE_BYTES:]
        return is_full  # after a partial block, at most an incomplete line is left to read

    def _add(self, content: bytes) -> None:
        parsed, damaged = parse_lines(content)
        self.lines, self.damaged = self.lines + len(parsed) + damaged, self.damaged + damaged
        train, evaluations = [], []
        for record in parsed:
            if (record.get("kind") in COLUMNS and not isinstance(record.get("step"), int | float)) or any(
                isinstance(value := record.get(name), int | float) and abs(value) > MAX_AXIS for name in AXES
            ):
                self.damaged += 1
            elif record.get("kind") == "train":
                train.append(record)
                self._tokens = record.get("tokens")
            elif record.get("kind") == "evaluation":  # its "tokens" counts scored tokens, not training tokens
                tasks = record.get("tasks")
                tasks = {name: task for name, task in tasks.items() if isinstance(task, dict)} if isinstance(tasks, dict) else {}
                evaluations.append({**record, "tokens": record.get("trained_tokens", self._tokens), "tasks": tasks})
            elif (
                record.get("kind") == "ranks" and isinstance(p50 := record.get("p50"), list) and p50 and all(map(is_number, p50))
            ):
                self.slowest_rank = [int(np.argmax(p50)), max(p50), float(np.median(p50))]
        if train:
            columns = _columns(train, (*COLUMNS["train"][:-1], "session"))
            steps, seconds, sessions = np.diff(np.hstack([self._previous, columns[[0, 2, -1]]]), axis=1)
            self._previous = columns[[0, 2, -1], -1:]
            valid = (steps > 0) & (seconds >= 0) & (sessions == 0)  # False for the first line of a session
            columns[-1] = np.divide(seconds, steps, out=np.full_like(seconds, np.nan), where=valid)
            self.bins["train"].push(columns)
        if evaluations:
            self.bins["evaluation"].push(_columns(evaluations, COLUMNS["evaluation"]))
            self.evaluations += evaluations


def parse_lines(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the records of complete lines, and the number of lines that are not JSON objects."""
    try:  # parse all lines at once, which takes a third of the time of parsing them one by one
        parsed = from_json(b"[" + content[:-1].replace(b"\n", b",") + b"]")
        if len(parsed) == content.count(b"\n") and all(type(record) is dict for record in parsed):
            return parsed, 0
    except (ValueError, RecursionError):
        pass
    records, damaged = [], 0
    for line in content.splitlines():
        try:
            record = from_json(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            damaged += 1
    return records, damaged


def _columns(records: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Columns:
    """Return fields of records as an array of shape (fields, records); values that are not finite numbers become nan."""
    values = [[record.get(name) for record in records] for name in names]
    try:
        columns = np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        columns = np.array([[value if is_number(value) else np.nan for value in column] for column in values], dtype=np.float64)
    columns[~np.isfinite(columns)] = np.nan
    return columns
