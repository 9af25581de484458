"""The thread that looks at all runs and tells every open page what has changed.

It reads while somebody looks on, and once at the start. Runs that train come before old ones that are read for the first time:
a new line is told within a second, however much is still to be read.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from ingot.errors import IngotError, one_line, shown
from ingot.runs.series import AXES, STEP_SECONDS, Bins, Series
from ingot.runs.state import NAME as STATE
from ingot.runs.view import Run, run_names, run_record
from ingot.runtime.files import read_json, to_json, write_atomically

# One run as the page knows it: its numbers in bins and what its other files say, each file read again when it has changed.

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


LOOK_SECONDS = 0.5  # between looks at files that grow
SCAN_SECONDS = 2.0  # between looks for runs that are new, and at the processes of those that are running
TURN_SECONDS = 0.3  # of reading old lines, before new ones are looked for again
MOST_WAITING = 2000  # messages that may wait for a page; with more of them it has to ask again

Queue = asyncio.Queue[bytes | None]


class Watcher:
    """The runs below some folders, as they go on."""

    def __init__(self, folders: Sequence[Path], cache: Path) -> None:
        self.runs: dict[str, Watched] = {}  # newest first
        self._folders, self._cache = list(folders), cache
        self._pages: dict[int, tuple[asyncio.AbstractEventLoop, Queue]] = {}
        self._new: list[tuple[asyncio.AbstractEventLoop, Queue]] = []  # pages that have not been told anything
        self._lock = threading.Lock()  # around the pages
        self._ended = False  # the pages; under the lock
        self._wake, self._closed = threading.Event(), False
        self._scanned = -SCAN_SECONDS
        self._progress: Message = {}
        self._thread = threading.Thread(target=self._work, name="ingot-ui", daemon=True)

    @property
    def has_pages(self) -> bool:
        """Whether somebody looks on."""
        return bool(self._pages or self._new)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and keep what it has read."""
        self._closed = True
        self._wake.set()
        self._thread.join()
        for watched in self.runs.values():
            with _guarded(watched):
                watched.keep()
        self.end_pages()

    def end_pages(self) -> None:
        """End the streams of all pages, and of those that are opened from now on."""
        with self._lock:
            self._ended = True
            self._pages |= {id(page[1]): page for page in self._new}
            self._new = []
            for number in list(self._pages):
                self._put(number, None)

    def open_page(self) -> tuple[int, Queue]:
        """A queue of all that is known, and of what will change; its number closes it."""
        queue: Queue = asyncio.Queue()
        with self._lock:
            if self._ended:
                queue.put_nowait(None)
            else:
                self._new.append((asyncio.get_running_loop(), queue))
        self._wake.set()
        return id(queue), queue

    def close_page(self, number: int) -> None:
        """Nobody reads this queue any more."""
        with self._lock:
            self._pages.pop(number, None)
            self._new = [page for page in self._new if id(page[1]) != number]

    def _work(self) -> None:
        while not self._closed:
            self.look()
            if all(watched.loaded for watched in self.runs.values()):
                self._wake.wait(LOOK_SECONDS if self.has_pages else None)
                self._wake.clear()

    def look(self) -> None:
        """One round: runs that are new, lines that are new, and a stretch of what was not read yet."""
        self._greet()
        if scan := time.monotonic() - self._scanned >= SCAN_SECONDS:
            self._scan()
        for watched in list(self.runs.values()):
            if watched.loaded and (scan or watched.is_running):  # those that have ended cost next to nothing
                self._look_at(watched, lambda: True)
        until = time.monotonic() + TURN_SECONDS
        for watched in list(self.runs.values()):
            if not watched.loaded and time.monotonic() < until and not self._closed:
                self._look_at(watched, lambda: time.monotonic() < until)
        self._tell_progress()

    def _look_at(self, watched: Watched, goes_on: Callable[[], bool]) -> None:
        if watched.fails_still():
            return
        told: list[Message] = []
        with _guarded(watched):
            while watched.read() and goes_on() and not self._closed:
                pass
            told = watched.numbers()
            watched.series.told()
            if watched.look():
                told.append(watched.told())
        self._tell([watched.told()] if watched.has_failed else told)

    def _greet(self) -> None:
        """Tell pages that have just been opened all that is known."""
        with self._lock:
            pages, self._new = self._new, []
        if not pages:
            return
        known = list(self.runs.values())
        events = [[self._listed(), *(watched.told() for watched in known if watched.facts)]]
        events += [watched.numbers(whole=True) for watched in known if watched.series.lines and not watched.has_failed]
        packed = [_event(messages) for messages in [*events, [self._progress] if self._progress else []] if messages]
        with self._lock:
            for loop, queue in pages:
                self._pages[id(queue)] = (loop, queue)
                for event in packed if not self._ended else (None,):
                    self._put(id(queue), event)

    def _scan(self) -> None:
        self._scanned = time.monotonic()
        places = find_runs(self._folders)
        known = {(watched.place, watched.run.path): watched for watched in self.runs.values()}
        if places.items() == known.keys():
            return
        runs = sorted(places.items(), key=lambda run: _when(run[1]), reverse=True)
        names = run_names([path for _, path in runs])
        found = [known.get(run) or Watched(run[1], name, self._cache) for run, name in zip(runs, names, strict=True)]
        for watched, name in zip(found, names, strict=True):
            watched.name = name
            if not watched.fails_still():
                with _guarded(watched):
                    watched.look()
        self.runs = {watched.id: watched for watched in found}
        self._tell([self._listed(), *(watched.told() for watched in found if watched.facts)])

    def _listed(self) -> Message:
        return {"type": "runs", "ids": list(self.runs)}

    def _tell_progress(self) -> None:
        waiting = [watched for watched in self.runs.values() if not watched.loaded]
        if not waiting and not self._progress.get("left", 1):
            return
        total = sum(watched.size for watched in self.runs.values())
        left = sum(max(0, watched.size - watched.series.offset) for watched in waiting)
        self._progress = {
            "type": "progress", "read": total - left, "bytes": total, "left": len(waiting), "runs": len(self.runs)
        }  # fmt: skip
        self._tell([self._progress])

    def _tell(self, messages: Sequence[Message]) -> None:
        if not messages or not self._pages:
            return
        event = _event(messages)
        with self._lock:
            for number in list(self._pages):
                self._put(number, event)

    def _put(self, number: int, event: bytes | None) -> None:
        if (page := self._pages.get(number)) is None:  # it has had its end
            return
        loop, queue = page
        if queue.qsize() > MOST_WAITING:
            event = None
        if event is None:
            self._pages.pop(number)
        with suppress(RuntimeError):  # the server has ended
            loop.call_soon_threadsafe(queue.put_nowait, event)


@contextmanager
def _guarded(watched: Watched) -> Iterator[None]:
    """Whatever goes wrong with one run is said of it, and the others are read."""
    try:
        yield
    except Exception as error:
        watched.fail(error)


def find_runs(folders: Sequence[Path]) -> dict[str, Path]:
    """The run folders among folders, in them, and in the folders there, by where they really are: each once.

    A link may be made to lead elsewhere, so a run is known by a path of its own where there is one.
    """
    found: dict[str, Path] = {}
    for folder in folders:
        for path in (folder,) if _is_run(folder) else (below for child in _folders(folder) for below in _self_or_below(child)):
            place = os.path.realpath(path)
            if place not in found or (found[place].is_symlink() and not path.is_symlink()):
                found[place] = path
    return found


def _self_or_below(folder: Path) -> list[Path]:
    return [folder] if _is_run(folder) else [path for path in _folders(folder) if _is_run(path)]


def _is_run(folder: Path) -> bool:
    return os.path.exists(folder / STATE)  # noqa: PTH110 (of every run every two seconds, and Path's takes twice as long)


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [folder / entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except OSError:
        return []


def _when(path: Path) -> float:
    """When a run was last heard of, by its files."""
    for name in ("metrics.jsonl", "state.json"):
        with suppress(OSError):
            return (path / name).stat().st_mtime
    return 0.0


def _event(messages: Sequence[Message]) -> bytes:
    return b"data: " + to_json(list(messages)).encode() + b"\n\n"
