"""metrics.jsonl as it grows, in bins: each line is read once, from the byte where the last reading ended.

For whoever looks on for long: memory and the time of a look do not depend on how much was trained. A damaged line is skipped and
counted, and a file that a resume has replaced is read from its start. What was read can be kept beside the run's other caches.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import from_json

from ingot.runs.bins import MOST_BINS, Bins, Columns
from ingot.runs.step_times import StepTimes
from ingot.runs.timing import Timing
from ingot.runtime.files import open_to_read, write_atomically

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
