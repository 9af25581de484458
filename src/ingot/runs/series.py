"""metrics.jsonl as it grows, in bins: each line is read once, from the byte where the last reading ended.

For whoever looks on for long: memory and the time of a look do not depend on how much was trained. A damaged line is skipped and
counted, and a file that a resume has replaced is read from its start. What was read can be kept beside the run's other caches.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic_core import from_json

from ingot.runs.metrics import is_number
from ingot.runs.reporter import scored_tasks
from ingot.runtime.files import open_to_read, write_atomically

# The numbers of any count of lines in a bounded number of bins: minimum, mean and maximum of neighbours.

MOST_BINS = 768  # a chart is about as many pixels wide; 1,000 further lines change at most 884 bins

Columns = NDArray[np.float64]


class Bins:
    """Bins of several columns; a number that is not finite counts as none."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.lines, self.stride = 0, 1
        shape = (len(self.names), MOST_BINS)
        self.low, self.high = np.full(shape, np.nan), np.full(shape, np.nan)  # (columns, bins)
        self._total, self._count = np.zeros(shape), np.zeros(shape)

    @property
    def used(self) -> int:
        """How many bins hold a line."""
        return -(-self.lines // self.stride)

    @property
    def mean(self) -> Columns:
        """The mean of each column in each bin, nan where there is none."""
        return np.divide(self._total, self._count, out=np.full_like(self._total, np.nan), where=self._count > 0)

    def push(self, columns: Columns) -> int:
        """Take further lines, (columns, lines), and return the first bin that has changed."""
        count = columns.shape[1]
        first = self.lines // self.stride
        while (self.lines + count - 1) // self.stride >= MOST_BINS:
            self._join_pairs()
            first = 0
        place = (self.lines + np.arange(count)) // self.stride
        for row, values in enumerate(columns):
            known = np.isfinite(values)
            at, found = place[known], values[known]
            np.fmin.at(self.low[row], at, found)
            np.fmax.at(self.high[row], at, found)
            np.add.at(self._total[row], at, found)
            np.add.at(self._count[row], at, 1.0)
        self.lines += count
        return first

    def _join_pairs(self) -> None:
        rest = (len(self.names), MOST_BINS // 2)
        empty, zeros = np.full(rest, np.nan), np.zeros(rest)
        self.low = np.hstack([np.fmin(self.low[:, ::2], self.low[:, 1::2]), empty])
        self.high = np.hstack([np.fmax(self.high[:, ::2], self.high[:, 1::2]), empty])
        self._total = np.hstack([self._total[:, ::2] + self._total[:, 1::2], zeros])
        self._count = np.hstack([self._count[:, ::2] + self._count[:, 1::2], zeros])
        self.stride *= 2

    def pack(self) -> Columns:
        """All numbers of the used bins, to be kept."""
        return np.stack([part[:, : self.used] for part in (self.low, self.high, self._total, self._count)])

    def unpack(self, packed: Columns, lines: int, stride: int) -> None:
        """Take over what was kept; ValueError where it does not fit."""
        self.lines, self.stride = lines, stride
        if packed.shape != (4, len(self.names), self.used) or self.used > MOST_BINS:
            raise ValueError("these are bins of another kind")
        for part, known in zip((self.low, self.high, self._total, self._count), packed, strict=True):
            part[:, : self.used] = known


# How long the steps of a run took, by its metrics.jsonl: percentiles, and where it stood still.

STALL = 3.0  # times the median that a step takes where it is called a stall
SHARES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True)
class Stall:
    """A stretch of steps that took far longer than usual."""

    step: int  # the last of them
    seconds: float  # more than usual


@dataclass(frozen=True)
class Timing:
    """Seconds per step: percentiles by name, and the stalls, longest first."""

    percentiles: dict[str, float]
    stalls: list[Stall]


def step_times(records: Iterable[Mapping[str, Any]]) -> Timing:
    """The timing of a run; empty where it has not two records of one session."""
    trained = [record for record in records if record.get("kind") == "train"]
    found: list[tuple[int, float, int]] = []  # the step, the seconds of one, how many
    for before, after in pairwise(trained):
        numbers: list[Any] = [one.get(name) for name in ("step", "elapsed_seconds") for one in (before, after)]
        if before.get("session") != after.get("session") or not all(map(is_number, numbers)):
            continue
        steps, seconds = int(numbers[1]) - int(numbers[0]), float(numbers[3]) - float(numbers[2])
        if steps > 0 and seconds >= 0:
            found.append((int(numbers[1]), seconds / steps, steps))
    if not found:
        return Timing({}, [])
    each = sorted(one for _, one, _ in found)
    usual = statistics.median(each)
    slow = [Stall(step, (one - usual) * steps) for step, one, steps in found if one > STALL * usual]
    percentiles = {name: each[min(len(each) - 1, int(share * len(each)))] for name, share in SHARES.items()}
    return Timing(percentiles, sorted(slow, key=lambda stall: -stall.seconds))


# How long steps took, of lines that come bit by bit, in bounded memory; `timing.step_times` says it of all lines at once.

WIDTH, SHORTEST, CLASSES = 0.01, 1e-6, 2800  # classes of times by their logarithm: from a microsecond to 15 days
MOST_SLOW = 64  # stretches that are remembered


class StepTimes:
    """How many steps took how long, and the slowest stretches."""

    def __init__(self) -> None:
        self.counts = np.zeros(CLASSES)
        self.slowest: list[tuple[int, float, int]] = []  # the step, the seconds of one, how many

    def push(self, step: NDArray[np.float64], seconds: NDArray[np.float64], steps: NDArray[np.float64]) -> None:
        """Take stretches of steps: the last of each, the seconds of one, how many."""
        classes = np.log(np.maximum(seconds, SHORTEST) / SHORTEST) / WIDTH
        np.add.at(self.counts, np.minimum(classes, CLASSES - 1).astype(int), 1.0)
        for at in np.argsort(seconds)[-MOST_SLOW:]:
            self.slowest.append((int(step[at]), float(seconds[at]), int(steps[at])))
        self.slowest = sorted(self.slowest, key=lambda one: -one[1])[:MOST_SLOW]

    def recall(self, counts: NDArray[np.float64], slowest: Sequence[Sequence[Any]]) -> None:
        """Take over what was kept; ValueError where it does not fit."""
        if counts.shape != (CLASSES,):
            raise ValueError("these are times of another kind")
        self.counts = counts
        self.slowest = [(int(step), float(seconds), int(steps)) for step, seconds, steps in slowest]

    def timing(self) -> Timing:
        """Percentiles, right to a hundredth of their value, and the slowest of the stalls."""
        if not (total := self.counts.sum()):
            return Timing({}, [])
        upto = np.cumsum(self.counts)
        places = {name: int(np.searchsorted(upto, share * total, side="right")) for name, share in SHARES.items()}
        percentiles = {name: SHORTEST * float(np.exp((min(place, CLASSES - 1) + 0.5) * WIDTH)) for name, place in places.items()}
        usual = percentiles["p50"]
        slow = [Stall(step, (each - usual) * steps) for step, each, steps in self.slowest if each > STALL * usual]
        return Timing(percentiles, sorted(slow, key=lambda stall: -stall.seconds))


AXES = ("step", "tokens", "elapsed_seconds")
TRAINED = (*AXES, "loss", "grad_norm", "learning_rate", "tokens_per_second")
STEP_SECONDS = "step_seconds"  # from the time between two lines
JUDGED = (*AXES, "val_bpb", "val_loss")
KINDS = ("train", "evaluation")
BLOCK = 1 << 20  # bytes read at once: some 3,000 lines, 10 ms
LARGEST = 2.0**53  # up to it, every whole number is a float; no step, token or second of a run comes near it
HEAD = 4096  # bytes by which a file is known again
FORM = 1  # of what is kept


class Series:
    """The numbers of a run so far. One thread reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0  # how often the file was replaced
        self._begin()

    def _begin(self) -> None:
        self.trained, self.judged = Bins((*TRAINED, STEP_SECONDS)), Bins(JUDGED)
        self.times = StepTimes()
        self.lines = self.damaged = 0
        self.changed = [0, 0]  # the first bins, of steps and of evaluations, that have changed since `told` was called
        self._inode, self._offset, self._last = 0, 0, b""
        self._before: tuple[float, float, float] | None = None  # step, seconds and session of the last line of a step
        self._tokens: Any = 0

    def told(self) -> None:
        """Whoever shows the numbers has them all."""
        self.changed = [MOST_BINS, MOST_BINS]

    def timing(self) -> Timing:
        """How long steps took; percentiles are right to a hundredth of their value."""
        return self.times.timing()

    @property
    def offset(self) -> int:
        """How many bytes were read."""
        return self._offset

    def read_block(self) -> bool:
        """Read a stretch of what is new; whether there may be more. OSError where the file cannot be read."""
        with open_to_read(self.path) as file:
            inode = os.fstat(file.fileno()).st_ino
            if self._offset and not (inode == self._inode and self._follows(file.seek, file.read)):
                self.generation += 1
                self._begin()
            self._inode = inode
            file.seek(self._offset)
            content = file.read(BLOCK)
        end = content.rfind(b"\n") + 1
        if not end and len(content) == BLOCK:  # no line of ours is so long
            self.damaged += 1
            self._offset, self._last = self._offset + BLOCK, content[-HEAD:]
            return True
        if not end:
            return False  # a last line may still be written
        self._offset += end
        self._last = content[content.rfind(b"\n", 0, end - 1) + 1 : end][-HEAD:]
        self._take(content[:end])
        return len(content) == BLOCK

    def _follows(self, seek: Callable[[int], int], read: Callable[[int], bytes]) -> bool:
        """Whether the file still has the line that was read last where it was: numbers of files are used again."""
        seek(self._offset - len(self._last))
        return read(len(self._last)) == self._last

    def _take(self, content: bytes) -> None:
        parsed, damaged = parse_lines(content)
        records = [record for record in parsed if _has_place(record)]
        damaged += len(parsed) - len(records)
        self.lines, self.damaged = self.lines + len(records) + damaged, self.damaged + damaged
        trained, judged = [], []
        for record in records:
            kind = record.get("kind")
            if kind == "train":
                trained.append(record)
                self._tokens = record.get("tokens")
            elif kind == "evaluation":  # its tokens are those that it scored
                judged.append({**record, "tokens": record.get("trained_tokens", self._tokens)})
        if trained:
            columns = _columns(trained, (*TRAINED, "session"))
            seconds = self._step_seconds(columns[0], columns[2], columns[-1])
            first = self.trained.push(np.vstack([columns[:-1], seconds]))
            self.changed[0] = min(self.changed[0], first)
        if judged:
            self.changed[1] = min(self.changed[1], self.judged.push(_columns(judged, JUDGED)))

    def _step_seconds(self, step: Columns, elapsed: Columns, session: Columns) -> Columns:
        """Seconds of one step before each line; nan before the first of a session."""
        known = np.stack([step, elapsed, session])  # (3, lines)
        before = np.array(self._before if self._before is not None else (np.nan,) * 3)[:, None]
        self._before = (float(step[-1]), float(elapsed[-1]), float(session[-1]))
        steps, seconds, sessions = np.diff(np.hstack([before, known]), axis=1)
        fits = (steps > 0) & (seconds >= 0) & (sessions == 0)
        each = np.divide(seconds, steps, out=np.full_like(seconds, np.nan), where=fits)
        self.times.push(step[fits], each[fits], steps[fits])
        return each

    def keep(self, file: Path) -> None:
        """Keep what was read, so that the next reader begins there."""
        stamp, known = self._stamp(self._offset), (self.trained, self.judged)
        if stamp is None:
            return
        about = {
            "form": FORM,
            "stamp": stamp,
            "offset": self._offset,
            "last": self._last.decode("latin-1"),
            "bins": [[bins.lines, bins.stride] for bins in known],
            "lines": self.lines,
            "damaged": self.damaged,
            "before": self._before,
            "tokens": self._tokens,
            "slowest": self.times.slowest,
        }
        packed = io.BytesIO()
        words = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
        np.savez(packed, about=words, trained=known[0].pack(), judged=known[1].pack(), times=self.times.counts)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, packed.getvalue(), durable=False)

    def recall(self, file: Path) -> bool:
        """Begin with what was kept, where it is of this very file; whether it was."""
        try:
            with np.load(file, allow_pickle=False) as kept:
                about = json.loads(kept["about"].tobytes())
                if about["form"] != FORM or not _is_same(about["stamp"], self._stamp(int(about["offset"]))):
                    return False
                self._offset, self._last = int(about["offset"]), about["last"].encode("latin-1")
                for bins, name, (lines, stride) in zip(
                    (self.trained, self.judged), ("trained", "judged"), about["bins"], strict=True
                ):
                    bins.unpack(kept[name], lines, stride)
                self.times.recall(kept["times"], about["slowest"])
            self.lines, self.damaged, self._tokens = about["lines"], about["damaged"], about["tokens"]
            self._before = tuple(about["before"]) if about["before"] is not None else None
            with open_to_read(self.path) as read:
                self._inode = os.fstat(read.fileno()).st_ino
                if self._follows(read.seek, read.read):
                    return True
        except Exception:  # whatever is wrong with a cache, the file itself is there to be read
            pass
        self._begin()
        return False

    def _stamp(self, offset: int) -> list[Any] | None:
        """What a file is known by: its size, its time and the first of the bytes that were read."""
        try:
            with open_to_read(self.path) as file:
                found = os.fstat(file.fileno())
                return [found.st_size, found.st_mtime_ns, hashlib.sha256(file.read(min(HEAD, offset))).hexdigest()]
        except OSError:
            return None


def _is_same(kept: Sequence[Any], now: Sequence[Any] | None) -> bool:
    """Whether a file is the one that was kept, or that one with more lines."""
    return now is not None and kept[2] == now[2] and (now[0] > kept[0] or list(kept[:2]) == list(now[:2]))


def parse_lines(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """The records of whole lines, and how many lines are not records."""
    try:  # all at once, in a third of the time
        found = from_json(b"[" + content[:-1].replace(b"\n", b",") + b"]")
        if len(found) == content.count(b"\n") and all(type(record) is dict for record in found):
            return found, 0
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
    """Fields of records as numbers, (fields, records); nan for what is missing or not a number."""
    found = np.empty((len(names), len(records)))
    for row, name in enumerate(names):
        values = [record.get(name) for record in records]
        try:
            found[row] = values
        except (TypeError, ValueError, OverflowError):
            found[row] = [_number(value) for value in values]
    found[~np.isfinite(found)] = np.nan
    return found


def _has_place(record: Mapping[str, Any]) -> bool:
    """Whether a record can be drawn: one of a step or of an evaluation says which, and no axis is longer than any run."""
    if record.get("kind") in KINDS and not isinstance(record.get("step"), int | float):
        return False
    return not any(_is_too_large(record.get(name)) for name in AXES)


def _is_too_large(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) > LARGEST


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else float("nan")
    except OverflowError:
        return float("nan")


# The curves of a run, as its metrics.jsonl tells them: training loss and bits per byte, over steps, tokens or seconds.

Axis = Literal["steps", "tokens", "seconds"]
Point = tuple[float, float]
FIELDS = {"steps": "step", "tokens": "tokens", "seconds": "elapsed_seconds"}
MOST_POINTS = 400  # of one curve: more are means of neighbours, which no picture shows apart


@dataclass(frozen=True)
class Curves:
    """What a run's numbers were, each with the place on the axis; `val_bpb` is empty where nothing was evaluated."""

    loss: list[Point]
    val_bpb: list[Point]
    tasks: dict[str, list[Point]] = field(default_factory=dict)  # the accuracy on each task that evaluations scored


def curves_of(records: Sequence[Mapping[str, Any]], axis: Axis = "steps") -> Curves:
    """The curves that records tell; a number that is not finite leaves a gap."""
    trained = [record for record in records if record.get("kind") == "train"]
    evaluations = [record for record in records if record.get("kind") == "evaluation"]
    if axis == "tokens":  # an evaluation's own are those that it scored
        evaluations = [{**record, "tokens": _trained_before(record, trained)} for record in evaluations]
    return Curves(thinned(_points(trained, axis, "loss")), _points(evaluations, axis, "val_bpb"), _accuracies(evaluations, axis))


def _trained_before(evaluation: Mapping[str, Any], trained: Sequence[Mapping[str, Any]]) -> Any:
    """The tokens trained on before an evaluation; in files that do not tell, those of the last step that was logged by then."""
    if "trained_tokens" in evaluation:
        return evaluation["trained_tokens"]
    return next((record.get("tokens") for record in reversed(trained) if record.get("step", 0) <= evaluation.get("step", 0)), 0)


def _accuracies(evaluations: Iterable[Mapping[str, Any]], axis: Axis) -> dict[str, list[Point]]:
    """Accuracies by task: per character where answers are of different lengths, as papers have it of most."""
    found: dict[str, list[Point]] = {}
    for record in evaluations:
        for name, task in scored_tasks(record).items():
            score = {**record, "accuracy": task.get("acc_norm", task.get("acc"))}
            found.setdefault(name, []).extend(_points([score], axis, "accuracy"))
    return found


def read_line(records: Iterable[Mapping[str, Any]], name: str) -> list[Point]:
    """A number of the records of steps, thinned out."""
    return thinned(_points((record for record in records if record.get("kind") == "train"), "steps", name))


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """As many points as asked for at most, each the mean of a stretch of neighbours."""
    if len(points) <= most:
        return list(points)
    bounds = [len(points) * i // most for i in range(most + 1)]
    stretches = [points[begin:end] for begin, end in pairwise(bounds)]
    return [(_mean(x for x, _ in stretch), _mean(y for _, y in stretch)) for stretch in stretches]


def _points(records: Iterable[Mapping[str, Any]], axis: Axis, name: str) -> list[Point]:
    pairs: list[tuple[Any, Any]] = [(record.get(FIELDS[axis]), record.get(name)) for record in records]
    return [(float(x), float(y)) for x, y in pairs if is_number(x) and is_number(y)]


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
