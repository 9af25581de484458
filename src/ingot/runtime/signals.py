"""Signals before and after a run: a signal during start-up stops the program too, and a repeated one has no effect.

Start-up takes seconds, mostly imports. A single process has nothing to save then and exits at once. A rank remembers the signal
until its run installs handlers, because the other ranks must learn of it.
"""

from __future__ import annotations

import atexit
import errno
import os
import signal
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ingot.errors import Interrupted

# SIGINT is not among them: Python raises KeyboardInterrupt for it.
STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
REPEAT_SECONDS = 30.0  # a later signal ends a program that continues after its run

_heard: list[int] = []


@contextmanager
def listening_early(listens: bool = True) -> Iterator[None]:
    """Handle the signals that stop a run before the run itself does; blocked ones are delivered at the start of the block."""
    try:
        if listens and threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            for number in STOPPING:
                if signal.getsignal(number) is signal.SIG_DFL:  # not if the caller ignores it, as nohup does
                    signal.signal(number, _hear)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        yield
    finally:
        for number in STOPPING:
            if signal.getsignal(number) is _hear:
                signal.signal(number, signal.SIG_DFL)


def heard_early() -> int:
    """Return and clear the first signal that arrived before the run installed its handlers; 0: none."""
    number = _heard[0] if _heard else 0
    _heard.clear()
    return number


def replace_handler(number: int, handler: Any) -> Any:
    """Install a handler and return the one to restore afterwards."""
    before = signal.signal(number, handler)
    return signal.SIG_DFL if before is _hear else before


def leave_closed_terminal() -> None:
    """Redirect output to /dev/null if the terminal was closed: printing would fail, and the run still has to save."""
    for stream in (1, 2):
        try:
            termios.tcgetattr(stream)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)


def _hear(number: int, frame: FrameType | None) -> None:
    _heard.append(number)
    if "RANK" not in os.environ:
        raise Interrupted(signal.Signals(number).name)


def handler_after_stop(number: int, before: Any) -> Any:
    """Return the handler of a signal after a run was stopped: for a while, repeated signals are ignored."""
    if number == signal.SIGINT or before is not signal.SIG_DFL:
        return before
    # Python restores its handlers before torch is closed, which takes half a second.
    atexit.register(signal.signal, number, signal.SIG_IGN)
    until = time.monotonic() + REPEAT_SECONDS

    def ignore_repeated(number: int, frame: FrameType | None) -> None:
        if time.monotonic() > until:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    return ignore_repeated
