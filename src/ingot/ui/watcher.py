"""The thread that looks at all runs and tells every open page what has changed.

It reads while somebody looks on, and once at the start. Runs that train come before old ones that are read for the first time:
a new line is told within a second, however much is still to be read.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ingot.runs.state import NAME as STATE
from ingot.runs.view import run_names
from ingot.runtime.files import to_json
from ingot.ui.watched import Message, Watched

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
