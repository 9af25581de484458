"""The numbers of metrics.jsonl in bounded memory, read incrementally: curves, step times, best score and task scores.

Each line is read once, from the byte offset where the last read ended, so the cost of watching a run does not grow with its
length. Damaged lines are skipped and counted. A file that a resume has replaced is read again from the start.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from ingot.errors import Unreadable
from ingot.runtime.files import open_to_read

AXES = ("step", "tokens", "elapsed_seconds")
STEP_SECONDS = "step_seconds"  # computed from the elapsed seconds of two neighbouring lines
COLUMNS = {
    "train": (*AXES, "loss", "grad_norm", "learning_rate", "tokens_per_second", STEP_SECONDS),
    "evaluation": (*AXES, "val_bpb", "val_loss"),
}
MAX_BINS = 768  # about the width of a chart in pixels; 1,000 more lines change at most 884 bins
MAX_AXIS = 2.0**53  # largest integer a float holds exactly; no step, token count or second of a run comes near it
BLOCK_BYTES = 1 << 20  # bytes read at once: about 3,000 lines, 10 ms
LAST_LINE_BYTES = 4096  # bytes of the last line compared to detect that the file was replaced

Columns = NDArray[np.float64]
Axis = Literal["steps", "tokens", "seconds"]
Point = tuple[float, float]
AXIS_COLUMNS: dict[Axis, str] = {"steps": "step", "tokens": "tokens", "seconds": "elapsed_seconds"}


class Bins:
    """Minimum, mean and maximum of several columns over neighbouring lines, in at most MAX_BINS bins; nan counts as missing."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.lines, self.stride = 0, 1
        shape = (len(self.names), MAX_BINS)
        self.low, self.high = np.full(shape, np.nan), np.full(shape, np.nan)  # (columns, bins)
        self._sum, self._count = np.zeros(shape), np.zeros(shape)

    @property
    def used(self) -> int:
        """Number of bins that hold a line."""
        return -(-self.lines // self.stride)

    @property
    def mean(self) -> Columns:
        """Mean of each column in each bin, nan for bins without a value."""
        return np.divide(self._sum, self._count, out=np.full_like(self._sum, np.nan), where=self._count > 0)

    def push(self, columns: Columns) -> int:
        """Add lines of shape (columns, lines) and return the first bin that changed."""
        count = columns.shape[1]
        first = self.lines // self.stride
        while (self.lines + count - 1) // self.stride >= MAX_BINS:  # merge pairs of neighbouring bins
            for part, merge, empty in (
                (self.low, np.fmin, np.nan), (self.high, np.fmax, np.nan), (self._sum, np.add, 0.0), (self._count, np.add, 0.0),
            ):  # fmt: skip
                part[:, : MAX_BINS // 2] = merge(part[:, ::2], part[:, 1::2])
                part[:, MAX_BINS // 2 :] = empty
            self.stride *= 2
            first = 0
        bins = (self.lines + np.arange(count)) // self.stride
        for row, values in enumerate(columns):
            finite = np.isfinite(values)
            at, finite_values = bins[finite], values[finite]
            np.fmin.at(self.low[row], at, finite_values)
            np.fmax.at(self.high[row], at, finite_values)
            np.add.at(self._sum[row], at, finite_values)
            np.add.at(self._count[row], at, 1.0)
        self.lines += count
        return first

    def points(self, x: str, y: str) -> list[Point]:
        """Return (mean of x, mean of y) of every bin that has both."""
        pair = self.mean[[self.names.index(x), self.names.index(y)], : self.used]
        return [(float(a), float(b)) for a, b in pair.T[np.isfinite(pair).all(axis=0)]]


STALL_FACTOR = 3.0  # a step this many times slower than the median counts as a stall
PERCENTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
CLASS_WIDTH, SHORTEST, CLASSES = 0.01, 1e-6, 2800  # log-spaced histogram: 1% wide classes from a microsecond to 15 days
MAX_SLOW = 64  # number of slowest stretches to keep


@dataclass(frozen=True)
class Stall:
    """A stretch of steps that took far longer than usual."""

    step: int  # its last step
    seconds: float  # in excess of the usual time


@dataclass(frozen=True)
class Timing:
    """Seconds per step: percentiles by name, and stalls, longest first."""

    percentiles: dict[str, float]
    stalls: list[Stall]


@dataclass(frozen=True)
class Curves:
    """Points of a run over one axis; `val_bpb` is empty if nothing was evaluated, `tasks` holds the accuracy on each task."""

    loss: list[Point]
    val_bpb: list[Point]
    tokens_per_second: list[Point]
    tasks: dict[str, list[Point]]


class Series:
    """The numbers of one metrics.jsonl so far. One thread reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0  # how often the file was replaced
        self._reset()

    def _reset(self) -> None:
        self.bins = {kind: Bins(names) for kind, names in COLUMNS.items()}
        self.first_changed = dict.fromkeys(COLUMNS, 0)  # first bin that changed since `mark_sent`
        self._step_counts = np.zeros(CLASSES)  # histogram of seconds per step
        self._slowest: list[list[float]] = []  # last step, seconds per step, number of steps
        self.lines = self.damaged = self.offset = 0  # `offset`: bytes read
        self.best: dict[str, Any] | None = None  # step and val_bpb of the last evaluation that was the best so far
        self.scored: dict[str, Any] | None = None  # step and tasks of the last evaluation that scored tasks
        self.accuracies: dict[str, list[list[float]]] = {}  # per task: rows of the three axes and the accuracy
        self._inode, self._last_line = 0, b""
        self._previous = [np.nan] * 3  # step, elapsed seconds and session of the last train line
        self._tokens: Any = 0

    def mark_sent(self) -> None:
        """Mark all current numbers as sent to the viewer."""
        self.first_changed = dict.fromkeys(COLUMNS, MAX_BINS)

    def timing(self) -> Timing:
        """Return the percentiles of seconds per step, accurate to 1%, and the longest stalls."""
        if not (total := self._step_counts.sum()):
            return Timing({}, [])
        cumulative = np.cumsum(self._step_counts)
        percentiles = {
            name: SHORTEST * math.exp((int(np.searchsorted(cumulative, share * total, side="right")) + 0.5) * CLASS_WIDTH)
            for name, share in PERCENTILES.items()
        }
        median = percentiles["p50"]
        stalls = [
            Stall(int(step), (each - median) * steps) for step, each, steps in self._slowest if each > STALL_FACTOR * median
        ]
        return Timing(percentiles, sorted(stalls, key=lambda stall: -stall.seconds))

    def curves(self, axis: Axis = "steps") -> Curves:
        """Return the curves over steps, tokens or seconds; a number that is not finite leaves a gap."""
        x = AXIS_COLUMNS[axis]
        train, evaluations = self.bins["train"], self.bins["evaluation"]
        tasks = {
            name: [(row[AXES.index(x)], row[-1]) for row in rows if np.isfinite([row[AXES.index(x)], row[-1]]).all()]
            for name, rows in self.accuracies.items()
        }
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
            if self.offset and not (inode == self._inode and self._has_last_line(file)):
                self.generation += 1
                self._reset()
            self._inode = inode
            file.seek(self.offset)
            content = file.read(BLOCK_BYTES)
        end = content.rfind(b"\n") + 1
        if not end and len(content) == BLOCK_BYTES:  # Ingot writes no line this long
            self.damaged += 1
            self.offset, self._last_line = self.offset + BLOCK_BYTES, content[-LAST_LINE_BYTES:]
            return True
        if not end:
            return False  # the last line may still be being written
        self.offset += end
        self._last_line = content[content.rfind(b"\n", 0, end - 1) + 1 : end][-LAST_LINE_BYTES:]
        self._add(content[:end])
        return len(content) == BLOCK_BYTES

    def _has_last_line(self, file: BufferedReader) -> bool:
        """Return True if the last line read is still at its offset; the inode proves nothing, because file systems reuse them."""
        file.seek(self.offset - len(self._last_line))
        return file.read(len(self._last_line)) == self._last_line

    def _add(self, content: bytes) -> None:
        parsed, damaged = parse_lines(content)
        records = [record for record in parsed if _can_be_drawn(record)]
        damaged += len(parsed) - len(records)
        self.lines, self.damaged = self.lines + len(records) + damaged, self.damaged + damaged
        train, evaluations = [], []
        for record in records:
            if record.get("kind") == "train":
                train.append(record)
                self._tokens = record.get("tokens")
            elif record.get("kind") == "evaluation":  # its "tokens" are those scored, not trained
                evaluations.append({**record, "tokens": record.get("trained_tokens", self._tokens)})
        if train:
            columns = _columns(train, (*COLUMNS["train"][:-1], "session"))
            self._push("train", np.vstack([columns[:-1], self._step_seconds(columns[[0, 2, -1]])]))
        if evaluations:
            self._push("evaluation", _columns(evaluations, COLUMNS["evaluation"]))
        for record in evaluations:
            if record.get("best") and np.isfinite(_number(record.get("val_bpb"))):
                self.best = {"step": record["step"], "val_bpb": record["val_bpb"]}
            tasks = record.get("tasks")
            tasks = {name: task for name, task in tasks.items() if isinstance(task, dict)} if isinstance(tasks, dict) else {}
            if tasks:
                self.scored = {"step": record["step"], "tasks": tasks}
            for name, task in tasks.items():
                # acc_norm scores by log-probability per character, which papers report for answers of different lengths.
                values = [*(record.get(axis) for axis in AXES), task.get("acc_norm", task.get("acc"))]
                self.accuracies.setdefault(name, []).append([_number(value) for value in values])

    def _push(self, kind: str, columns: Columns) -> None:
        self.first_changed[kind] = min(self.first_changed[kind], self.bins[kind].push(columns))

    def _step_seconds(self, lines: Columns) -> Columns:
        """Return seconds per step before each of (step, elapsed, session) lines; nan before the first line of a session."""
        before = np.array(self._previous)[:, None]
        self._previous = [float(value) for value in lines[:, -1]]
        steps, seconds, sessions = np.diff(np.hstack([before, lines]), axis=1)
        valid = (steps > 0) & (seconds >= 0) & (sessions == 0)
        each = np.divide(seconds, steps, out=np.full_like(seconds, np.nan), where=valid)
        classes = np.log(np.maximum(each[valid], SHORTEST) / SHORTEST) / CLASS_WIDTH
        np.add.at(self._step_counts, np.minimum(classes, CLASSES - 1).astype(int), 1.0)
        stretches = [*self._slowest, *np.stack([lines[0], each, steps])[:, valid].T.tolist()]
        self._slowest = sorted(stretches, key=lambda stretch: -stretch[1])[:MAX_SLOW]
        return each


def parse_lines(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the records of complete lines, and the number of lines that are not JSON objects."""
    try:  # parse all lines at once, which takes a third of the time
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
    """Return fields of records as an array of shape (fields, records); nan for missing or non-finite values."""
    columns = np.empty((len(names), len(records)))
    for row, name in enumerate(names):
        values = [record.get(name) for record in records]
        try:
            columns[row] = values
        except (TypeError, ValueError, OverflowError):
            columns[row] = [_number(value) for value in values]
    columns[~np.isfinite(columns)] = np.nan
    return columns


def _can_be_drawn(record: Mapping[str, Any]) -> bool:
    """Return True if a train or evaluation record has a step and no implausibly large axis value."""
    if record.get("kind") in COLUMNS and not isinstance(record.get("step"), int | float):
        return False
    return not any(isinstance(value := record.get(name), int | float) and abs(value) > MAX_AXIS for name in AXES)


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else float("nan")
    except OverflowError:
        return float("nan")
