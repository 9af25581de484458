"""The thread that reads all runs and sends changes to every open page.

The thread reads once at startup, and after that only while a page is open. Each round reads one block of lines per run, so a new
line reaches the page within seconds even while long old runs are still being read.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.errors import IngotError, one_line, shown
from ingot.runs.metrics import is_number
from ingot.runs.series import AXES, STEP_SECONDS, Bins
from ingot.runs.view import Run, find_runs, run_names
from ingot.runtime.files import to_json

MAX_STALLS = 8
PAGE_RUNS = 200  # maximum number of runs read and shown at a time; limits memory and the size of the page
# The (column, statistic) pairs that are sent to the page for each bin, by kind of record.
SENT = {
    "train": (
        *((name, "mean") for name in (*AXES, "grad_norm", "learning_rate", "tokens_per_second", "loss")),
        ("loss", "low"),
        ("loss", "high"),
        (STEP_SECONDS, "high"),
    ),
    "evaluation": tuple((name, "mean") for name in (*AXES, "val_bpb", "val_loss")),
}
FROM_RESULT = ("artifact_bytes", "artifact_bpb", "final_loss", "val_loss", "tokens_per_second")
POLL_SECONDS = 0.5  # interval between reads of growing files
SCAN_SECONDS = 2.0  # interval at which to search for new runs and check which processes are alive
MAX_QUEUED = 2000  # maximum number of messages queued for a page; a page that falls further behind is disconnected

Message = dict[str, Any]


@dataclass(eq=False)
class Page:
    """A page that is open in a browser, with the queue of its event stream; None ends the stream."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[bytes | None]
    greeted: bool = False  # True once the page has been sent the current state


class WatchedRun:
    """A run as shown on the page. One thread reads its files again when they change; any thread may build messages."""

    def __init__(self, path: Path, name: str) -> None:
        self.real_path = os.path.realpath(path)
        self.id = hashlib.sha256(os.fsencode(self.real_path)).hexdigest()[:12]  # fsencode, because a path may not be valid UTF-8
        self.path, self.name = path, name
        self.facts = Message()
        self._reset()

    def _reset(self) -> None:
        self.run = Run(self.path)
        self.series = self.run.series
        self.settings: dict[str, Any] | None = None  # settings that affect the result; None if unknown
        self.loaded = False  # True if all lines have been read
        self._stamps: dict[str, tuple[int, int, int] | None] = {}  # inode, size and mtime of each file; None if it does not exist
        self._counts: tuple[int, int, int, bool] | None = None
        self._sent: dict[str, tuple[Bins, int, int]] = {}  # bins, with their number of lines and stride when last sent

    @property
    def is_running(self) -> bool:
        """Return True if the run's process was alive at the last check."""
        return self.facts.get("status") == "running"

    def update(self) -> list[Message]:
        """Read one block of new data and return messages about the changes; if the run cannot be read, a message says so."""
        try:
            self.read()
            messages = self.bin_messages()
            return [*messages, self.message()] if self.look() else messages
        except Exception as error:
            before, why = self.facts, one_line(f"the run cannot be read: {type(error).__name__}: {error}")
            self._reset()  # so that the next update reads the run from the beginning
            self.loaded, path = True, shown(str(self.path), kept="")
            self.facts = {"status": "unreadable", "error": why, "path": path, "loaded": True, "arm": None}
            return [self.message()] if self.facts != before else []

    def read(self) -> bool:
        """Read one block of new lines; return True if there may be more."""
        more = False
        if self._has_changed("metrics.jsonl") or not self.loaded:
            with suppress(OSError):
                more = self.series.read_block()
        self.loaded = not more
        return more

    def look(self) -> bool:
        """Update the run's facts if a file has changed or its process may have ended; return True if the facts have changed."""
        config = self.loaded and self._has_changed("config.yaml")  # reading the config is slow, so read all metrics first
        changed = [name for name in ("state.json", "result.json", "samples") if self._has_changed(name)]
        counts = (self.series.generation, self.series.lines, self.series.damaged, self.loaded)
        if not (config or changed or counts != self._counts or self.is_running):
            return False
        from ingot.experiments.compare import arm_key
        from ingot.train.resume import decisive_settings

        before, self._counts = self.facts, counts
        if config:
            self.settings = None
            with suppress(IngotError, TypeError):  # settings written by a different version of ingot may be invalid
                self.settings = decisive_settings(self.run.config)
        timing, settings, result = self.series.timing(), self.settings, self.run.result() or {}
        # Runs with the same arm differ only in their seeds.
        arm = hashlib.sha256(arm_key(settings).encode()).hexdigest()[:12] if settings is not None else None
        self.facts = {
            **{name: value for name, value in self.run.record().items() if name not in ("last_heard_seconds", "run")},
            "path": shown(str(self.path), kept=""),
            "result": {name: result[name] for name in FROM_RESULT if is_number(result.get(name))},
            "samples": sorted(self.run.samples()),
            "lines": self.series.lines,
            "damaged": self.series.damaged,
            "percentiles": timing.percentiles,
            "stalls": [[step, round(seconds, 3)] for step, seconds in timing.stalls[:MAX_STALLS]],
            "slowest_rank": self.series.slowest_rank,
            "loaded": self.loaded,
            "arm": arm,
            "seed": settings.get("training.seed") if settings is not None else None,
            "data": settings.get("data.path") if settings is not None else None,
        }
        return self.facts != before

    def message(self) -> Message:
        """Return the run's facts as a message."""
        return {"type": "run", "id": self.id, "name": self.name, **self.facts}

    def bin_messages(self, everything: bool = False) -> list[Message]:
        """Return messages with the bins that changed since the last call or, if `everything`, with all bins."""
        messages = []
        for kind, columns in SENT.items():
            bins, before = self.series.bins[kind], self._sent.get(kind)
            self._sent[kind] = now = (bins, bins.lines, bins.stride)
            if not everything and (now == before or (before is None and not bins.lines)):
                continue
            first = before[1] // bins.stride if before is not None and before[::2] == now[::2] and not everything else 0
            parts = bins.binned(first)
            packed = {
                name if part == "mean" else f"{name}_{part}": _pack(parts[part][bins.names.index(name)])
                for name, part in columns
                if bins.stride > 1 or part == "mean" or name == STEP_SECONDS  # a single line's mean, low and high are equal
            }
            messages.append({"type": "bins", "id": self.id, "kind": kind, "from": first, "columns": packed})
        return messages

    def _has_changed(self, name: str) -> bool:
        """Return True if the file or folder `name` of the run has changed since the last call."""
        try:
            status = os.stat(self.path / name)  # noqa: PTH116 (twice as fast as Path.stat, and called for every run twice a second)
            stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        except OSError:
            stamp = None
        changed = name not in self._stamps or self._stamps[name] != stamp
        self._stamps[name] = stamp
        return changed


class Watcher:
    """A watcher that reads the runs below some folders and updates the pages that show them."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.runs: dict[str, WatchedRun] = {}  # newest first
        self._folders = list(folders)
        self.first, self._total = 0, 0  # index of the first run shown, and number of all runs
        self.pages: list[Page] = []
        self._lock = threading.Lock()  # guards the pages and `_ended`
        self._ended = False
        self._wake, self._closed = threading.Event(), False
        self._scanned = -SCAN_SECONDS
        self.thread = threading.Thread(target=self._work, name="ingot-ui", daemon=True)

    def turn(self, first: int) -> None:
        """Show the runs starting at index `first`, where 0 is the newest run."""
        self.first, self._scanned = max(0, first), -SCAN_SECONDS
        self._wake.set()

    def close(self) -> None:
        """End the thread and the event streams of all pages."""
        self._closed = True
        self._wake.set()
        self.thread.join()
        self.end_pages()

    def end_pages(self) -> None:
        """End the event streams of all open pages, and of those opened later."""
        with self._lock:
            self._ended = True
            for page in list(self.pages):
                self._put(page, None)

    def open_page(self) -> Page:
        """Return a page whose queue receives the current state and then every change."""
        page = Page(asyncio.get_running_loop(), asyncio.Queue())
        with self._lock:
            self.pages.append(page)
            if self._ended:
                self._put(page, None)
        self._wake.set()
        return page

    def close_page(self, page: Page) -> None:
        """Stop sending to a page."""
        with self._lock:
            self.pages = [other for other in self.pages if other is not page]

    def _work(self) -> None:
        while not self._closed:
            self.look()
            if all(run.loaded for run in self.runs.values()):
                self._wake.wait(POLL_SECONDS if self.pages else None)
                self._wake.clear()

    def look(self) -> None:
        """Do one round: find new runs, and read up to a block of new lines of each run."""
        self._greet()
        if scan := time.monotonic() - self._scanned >= SCAN_SECONDS:
            self._scan()
        for run in [run for run in self.runs.values() if scan or run.is_running or not run.loaded]:
            if self._closed:
                return
            self._send(run.update())

    def _greet(self) -> None:
        """Send the current state to newly opened pages."""
        pages = [page for page in self.pages if not page.greeted]
        if not pages:
            return
        runs = list(self.runs.values())
        batches = [[self._list_message(), *(run.message() for run in runs if run.facts)]]
        batches += [run.bin_messages(everything=True) for run in runs if run.series.lines]
        events = [_event(messages) for messages in batches if messages]
        with self._lock:
            for page in pages:
                page.greeted = True
                for event in events:
                    self._put(page, event)

    def _scan(self) -> None:
        self._scanned = time.monotonic()
        places = find_runs(self._folders)
        watched = {(run.real_path, run.path): run for run in self.runs.values()}
        newest_first = sorted(places.items(), key=lambda place: _modified(place[1]), reverse=True)
        newest_first = newest_first[self.first : self.first + PAGE_RUNS]
        if set(newest_first) == watched.keys() and len(places) == self._total:
            return
        self._total = len(places)
        names = run_names([path for _, path in newest_first])
        runs = [watched.get(place) or WatchedRun(place[1], name) for place, name in zip(newest_first, names, strict=True)]
        for run, name in zip(runs, names, strict=True):
            run.name = name
            with suppress(Exception):  # errors are reported when the run is read
                run.look()
        self.runs = {run.id: run for run in runs}
        self._send([self._list_message(), *(run.message() for run in runs if run.facts)])

    def _list_message(self) -> Message:
        return {"type": "runs", "ids": list(self.runs), "first": self.first, "total": self._total, "page": PAGE_RUNS}

    def _send(self, messages: Sequence[Message]) -> None:
        if not messages or not self.pages:
            return
        event = _event(messages)
        with self._lock:
            for page in [page for page in self.pages if page.greeted]:
                self._put(page, event)

    def _put(self, page: Page, event: bytes | None) -> None:
        if page not in self.pages:  # the page's event stream has ended
            return
        if page.queue.qsize() > MAX_QUEUED:
            event = None
        if event is None:
            self.pages.remove(page)
        with suppress(RuntimeError):  # the server has shut down
            page.loop.call_soon_threadsafe(page.queue.put_nowait, event)


def _modified(path: Path) -> float:
    for name in ("metrics.jsonl", "state.json"):
        with suppress(OSError):
            return (path / name).stat().st_mtime
    return 0.0


def _pack(values: Any) -> str:
    """Encode an array as base64 of float32, which takes a third of the size of JSON and is decoded in one call."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def _event(messages: Sequence[Message]) -> bytes:
    return b"data: " + to_json(list(messages)).encode() + b"\n\n"
