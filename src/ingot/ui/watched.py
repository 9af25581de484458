"""One run as the page knows it: its numbers in bins and what its other files say, each file read again when it has changed."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ingot.errors import IngotError, one_line, shown
from ingot.runs.run import Run
from ingot.runs.series import AXES, STEP_SECONDS, Bins, Series
from ingot.runs.view import run_record
from ingot.runtime.files import read_json, write_atomically

KEPT_LINES = 2000  # after so many further lines what was read is kept anew
MOST_STALLS = 8
# What the page is sent of each bin: means, where it is not said otherwise.
SENT = {
    "trained": (
        *((name, "mean") for name in (*AXES, "grad_norm", "learning_rate", "tokens_per_second", "loss")),
        ("loss", "low"),
        ("loss", "high"),
        (STEP_SECONDS, "high"),
    ),
    "judged": tuple((name, "mean") for name in (*AXES, "val_bpb", "val_loss")),
}
FILES = ("metrics.jsonl", "state.json", "result.json", "samples", "config.yaml")
OF_RESULT = ("artifact_bytes", "artifact_bpb", "final_loss", "val_loss", "tokens_per_second")

Message = dict[str, Any]
Stamp = tuple[int, int, int] | None


class Watched:
    """A run folder that is looked at again and again. One thread looks; messages may be made by any."""

    def __init__(self, path: Path, name: str, cache: Path) -> None:
        self.place = os.path.realpath(path)
        self.id = hashlib.sha256(os.fsencode(self.place)).hexdigest()[:12]  # a name need not be UTF-8
        self.run, self.name = Run(path), name
        self.facts: Message = {}
        self._cache = cache
        self._begin()

    def _begin(self) -> None:
        self.series = Series(self.run.path / "metrics.jsonl")
        self.settings: dict[str, Any] | None = None  # those that decide what a run comes to; None: not known
        self.loaded = False  # all that was there when the looking began
        self._failed: list[Stamp] | None = None  # its files when they could not be read
        self._kept_lines = 0
        self._stamps: dict[str, Stamp] = {}
        self._recalled = False
        self._counted: tuple[int, int, int, bool] | None = None
        self._result: Message = {}
        self._samples: list[int] = []

    def fail(self, error: Exception) -> None:
        """Take down that the run cannot be read, and why."""
        self._failed, self.loaded = self._stamps_now(), True
        why = one_line(f"the run cannot be read: {type(error).__name__}: {error}")
        self.facts = {"status": "unreadable", "error": why, "path": self._path, "loaded": True, "arm": None}

    @property
    def has_failed(self) -> bool:
        """Whether the run could not be read."""
        return self._failed is not None

    def fails_still(self) -> bool:
        """Whether it could not be read and no file has changed since; if one has, it is read again from its start."""
        if self._failed is None:
            return False
        if self._failed == self._stamps_now():
            return True
        self._begin()
        return False

    @property
    def size(self) -> int:
        """Bytes of its metrics.jsonl."""
        found = _stamp(self.series.path)
        return found[1] if found is not None else 0

    def read(self) -> bool:
        """Read a stretch of new lines; whether there may be more."""
        if not self._recalled:
            self._recalled = True
            if self.series.recall(self._kept("npz")):
                self._kept_lines = self.series.lines
                self.loaded = self.size == self.series.offset
                return not self.loaded
        if not self._is_new("metrics.jsonl", of_lines=True):
            self.loaded = True
            return False
        try:
            more = self.series.read_block()
        except OSError:
            more = False
        if more:
            self._stamps.pop("metrics.jsonl", None)
        else:
            self.loaded = True
            self.keep(KEPT_LINES)
        return more

    def keep(self, lines: int = 1) -> None:
        """Keep what was read, if it is so many lines more than what is kept; a disk that is full is no reason to complain."""
        if not self.has_failed and abs(self.series.lines - self._kept_lines) >= lines:
            with suppress(OSError):
                self.series.keep(self._kept("npz"))
                self._kept_lines = self.series.lines

    def read_settings(self) -> bool:
        """Read the settings where the file has changed; whether it had."""
        if not self._is_new("config.yaml"):
            return False
        stamp, kept = self._stamps["config.yaml"], self._kept("json")
        with suppress(OSError, ValueError, KeyError, TypeError):
            known = read_json(kept)
            if known["stamp"] == list(stamp or ()):
                self.settings = dict(known["settings"])
                return True
        from ingot.train.resume import compared

        try:
            # As JSON gives them back, so that settings that were kept and others compare.
            self.settings = json.loads(json.dumps(compared(self.run.config)))
        except (IngotError, TypeError):  # of another version
            self.settings = None
            return True
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(kept, json.dumps({"stamp": stamp, "settings": self.settings}), durable=False)
        return True

    @property
    def is_running(self) -> bool:
        """Whether its process was there when it was last looked at."""
        return self.facts.get("status") == "running"

    def look(self) -> bool:
        """Look at how the run is doing, where a file has changed or its process may have gone; whether there is news."""
        settings = self.loaded and self.read_settings()
        new = [self._is_new(name) for name in ("state.json", "result.json", "samples")]
        counted = (self.series.generation, self.series.lines, self.series.damaged, self.loaded)
        if not (settings or any(new) or counted != self._counted or self.is_running):
            return False
        before, self._counted = self.facts, counted
        try:
            known = run_record(self.run)
        except IngotError:
            return False
        if new[1]:
            result = self.run.result() or {}
            self._result = {name: result.get(name) for name in OF_RESULT}
        if new[2]:
            self._samples = sorted(self.run.samples())
        timing = self.series.timing()
        self.facts = {
            **{name: value for name, value in known.items() if name not in ("last_heard_seconds", "run")},
            "path": self._path,
            "result": self._result,
            "samples": self._samples,
            "lines": self.series.lines,
            "damaged": self.series.damaged,
            "percentiles": timing.percentiles,
            "stalls": [[stall.step, round(stall.seconds, 3)] for stall in timing.stalls[:MOST_STALLS]],
            "loaded": self.loaded,
            **self._of_settings(),
        }
        return self.facts != before

    def told(self) -> Message:
        """What is said of the run."""
        return {"type": "run", "id": self.id, "name": self.name, **self.facts}

    def numbers(self, whole: bool = False) -> list[Message]:
        """What has changed in its numbers since the last time, or all of them."""
        first = [0, 0] if whole else self.series.changed
        found = [self._bins("trained", self.series.trained, first[0]), self._bins("judged", self.series.judged, first[1])]
        return [message for message in found if message is not None]

    def _bins(self, kind: str, bins: Bins, first: int) -> Message | None:
        used = bins.used
        if first >= used and not (first == 0 and self.series.generation):
            return None
        parts = {"mean": bins.mean, "low": bins.low, "high": bins.high}
        columns = {
            name if part == "mean" else f"{name}_{part}": _packed(parts[part][bins.names.index(name), first:used])
            for name, part in SENT[kind]
            if bins.stride > 1 or part == "mean" or name == STEP_SECONDS  # of one line, all three are the same
        }
        return {"type": "bins", "id": self.id, "kind": kind, "from": first, "columns": columns}

    def _of_settings(self) -> Message:
        from ingot.experiments.compare import arm_key

        if self.settings is None:
            return {"arm": None, "seed": None, "data": None}
        arm = hashlib.sha256(arm_key(self.settings).encode()).hexdigest()[:12]
        return {"arm": arm, "seed": self.settings.get("training.seed"), "data": self.settings.get("data.path")}

    def _is_new(self, name: str, of_lines: bool = False) -> bool:
        """Whether a file or folder of the run is not as it was when this was asked before."""
        found = _stamp(self.run.path / name)
        if name in self._stamps and self._stamps[name] == found:
            return False
        self._stamps[name] = found
        return not of_lines or found is not None

    def _stamps_now(self) -> list[Stamp]:
        return [_stamp(self.run.path / name) for name in FILES]

    @property
    def _path(self) -> str:
        return shown(str(self.run.path), kept="")

    def _kept(self, ending: str) -> Path:
        return self._cache / f"{self.id}.{ending}"


def _stamp(path: Path) -> Stamp:
    try:
        found = os.stat(path)  # noqa: PTH116 (half the time of Path's, and it is asked of every run twice a second)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _packed(values: np.ndarray[Any, Any]) -> str:
    """Numbers as base64 of float32: a third of what JSON takes, and read in one call."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode()
