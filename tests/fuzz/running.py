"""Runs a case in this process, as a shell would run its program, and watches what it does to the process and to the disk."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import resource
import signal
import stat
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, chdir, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import typer

from .cases import Case

SECONDS = 300.0  # after which a case is taken for hung; sound ones take less than one
RUNTIME = "5"  # seconds that a run may train: what would go on for ever saves and stops then
GUARD = 8 << 30  # bytes of address space beyond those there are at the start, so that no case takes the machine with it
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
TEMPORARY = "tmp"
STOPPED = ": saving and stopping; "  # what a run says that was asked to stop

Files = Mapping[str, tuple[int, ...]]


class Hung(BaseException):
    """The case did not end."""


@dataclass
class Outcome:
    """How a case ended, and what it left."""

    code: int = 0
    out: str = ""
    err: str = ""
    error: str = ""  # a traceback, where one would have been seen
    seconds: float = 0.0
    peak: int = 0  # bytes of memory above those before it
    before: Files = field(default_factory=dict)
    after: Files = field(default_factory=dict)
    left: list[str] = field(default_factory=list)  # of processes, threads and handlers


def settle() -> None:
    """Make this process ready for many cases: none may take all of the machine's memory, and what is here already stays here."""
    most = _status("VmSize") + GUARD
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    typer.main.get_command = cache(typer.main.get_command)  # a tenth of a second, and a program does it once
    gc.collect()
    gc.freeze()  # torch's objects are many: each later collection would look at them for 0.2 s


def run_case(case: Case, home: Path) -> Outcome:
    """Run a case; `home` is a folder outside of it, for what is printed and cached."""
    found = Outcome()
    (case.folder / TEMPORARY).mkdir()
    found.before = _files(case.folder)
    children = _children()
    threads, handlers = set(threading.enumerate()), [signal.getsignal(number) for number in SIGNALS]
    memory, began = _reset_peak(), time.monotonic()
    with ExitStack() as around:
        around.enter_context(_printing_to(home))
        around.enter_context(patch.dict(os.environ, _environment(case, home), clear=True))
        around.enter_context(patch.object(sys, "argv", [case.scenario.program, *case.words]))
        around.enter_context(patch.object(tempfile, "tempdir", str(case.folder / TEMPORARY)))
        # A program is as old as its process; here every case is a program.
        around.enter_context(patch("ingot.console.entry.process_age", lambda: time.monotonic() - began))
        around.enter_context(chdir(case.at))
        around.enter_context(_shown_warnings())
        around.enter_context(_alarm(SECONDS))
        found.code, found.error = _call(case)
    found.seconds, found.peak = time.monotonic() - began, max(0, _status("VmHWM") - memory)
    found.out, found.err = ((home / name).read_text(errors="backslashreplace") for name in ("stdout", "stderr"))
    found.left = [*_new_children(children), *_threads(threads), *_open_files(case.folder)]
    stopped = STOPPED in found.err  # then signals that are repeated must not end the program before it has ended
    for number, handler in zip(SIGNALS, handlers, strict=True):
        if signal.getsignal(number) is not handler and not stopped:
            found.left.append(f"a handler of {number.name}")
        signal.signal(number, handler)
    found.after = _files(case.folder)
    _as_before(found.peak)
    return found


def _call(case: Case) -> tuple[int, str]:
    """The exit code, and a traceback where there is one."""
    try:
        return int(case.scenario.main(list(case.words)) or 0), ""
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None), ""
    except Hung:
        return 1, f"hung\n{traceback.format_exc()}"
    except BaseException:
        return 1, traceback.format_exc()


def _environment(case: Case, home: Path) -> dict[str, str]:
    """A clean environment with the variables of the case."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "HF_HUB_OFFLINE") if name in os.environ}
    return {
        **kept,
        "HOME": str(home),
        "TMPDIR": str(case.folder / TEMPORARY),
        "INGOT_CACHE": str(home / "cache"),
        "INGOT_MAX_RUNTIME": RUNTIME,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "disabled",
        **case.variables,
    }


@contextmanager
def _printing_to(home: Path) -> Iterator[None]:
    """Everything printed, by libraries too, goes into files; stdin is empty."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(number) for number in range(3)]
    streams = sys.stdout, sys.stderr
    ends = [os.open(os.devnull, os.O_RDONLY)]
    ends += [os.open(home / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600) for name in ("stdout", "stderr")]
    for number, end in enumerate(ends):
        os.dup2(end, number)
        os.close(end)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        sys.stdout, sys.stderr = streams
        for number, end in enumerate(kept):
            os.dup2(end, number)
            os.close(end)


@contextmanager
def _shown_warnings() -> Iterator[None]:
    """Warnings as a fresh Python shows them, each time."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        warnings.showwarning = lambda *warning: print(warnings.formatwarning(*warning[:4]), file=sys.stderr)
        yield


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise Hung after so many seconds; where Python is not reached, end with a traceback after twice as many."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(2 * seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def _files(folder: Path) -> dict[str, tuple[int, ...]]:
    """What is in a folder: of files what changes when they are written."""
    found = {}
    for path in folder.rglob("*"):
        at = path.lstat()
        is_folder = stat.S_ISDIR(at.st_mode)
        name = str(path.relative_to(folder))
        found[name] = (at.st_mode,) if is_folder else (at.st_mode, at.st_size, at.st_mtime_ns, at.st_ino)
    return found


def _children() -> set[str]:
    """Processes that were started here and have not been waited for."""
    found: set[str] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found |= set(task.read_text().split())
    return found


def _new_children(before: set[str]) -> list[str]:
    """Those that were not there before and are still there a second later."""
    new: set[str] = set()
    for _ in range(20):
        if not (new := _children() - before):
            break
        time.sleep(0.05)
    return [f"process {pid}" for pid in sorted(new)]


def _threads(before: set[threading.Thread]) -> list[str]:
    """Threads that are still there a second later."""
    new = [thread for thread in threading.enumerate() if thread not in before]
    for thread in new:
        thread.join(1.0)
    return [f"thread {thread.name}" for thread in new if thread.is_alive()]


def _open_files(folder: Path) -> list[str]:
    """Files of the case that are still open."""
    found = _open_below(folder)
    if found:
        gc.collect()
        found = _open_below(folder)
    return [f"open file {name}" for name in found]


def _open_below(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if (target := str(entry.readlink())).startswith(f"{folder}/"):
                found.append(Path(target).name)
    return found


def _as_before(peak: int) -> None:
    """What one program sets for its process must not reach the next."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)
    if peak > 1 << 28:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


def _reset_peak() -> int:
    """Forget the most memory there was; returns what there is."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    """A number of bytes that Linux knows of this process."""
    lines: dict[str, Any] = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(lines[name].split()[0]) << 10
