"""Signal handling outside the training loop: stop the program during start-up, and ignore repeated signals after a stopped run.

Start-up takes seconds, mostly for imports. A single process has nothing to save yet and exits at once. With several ranks,
each stores its signal until the run installs handlers, because the run must forward the signal to the other ranks.
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

# SIGINT is not listed, because Python raises KeyboardInterrupt for it.
STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
REPEAT_SECONDS = 30.0  # after a stopped run, repeated signals are ignored for this long; a later one ends the program

_heard: list[int] = []


@contextmanager
def listening_early(listens: bool = True) -> Iterator[None]:
    """Handle stop signals in the block until the run installs its own handlers; unblock those that the parent process blocked."""
    try:
        if listens and threading.current_thread() is threading.main_thread():  # Python allows handlers only in the main thread
            for number in STOPPING:
                if signal.getsignal(number) is signal.SIG_DFL:  # keep a signal ignored if the caller ignores it, as nohup does
                    signal.signal(number, _hear)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        yield
    finally:
        for number in STOPPING:
            if signal.getsignal(number) is _hear:
                signal.signal(number, signal.SIG_DFL)


def heard_early() -> int:
    """Forget the signals that arrived before the run installed its handlers; return the first of them, or 0 if none did."""
    number = _heard[0] if _heard else 0
    _heard.clear()
    return number


def replace_handler(number: int, handler: Any) -> Any:
    """Install a signal handler and return the one to restore later: the previous handler, or SIG_DFL if that was `_hear`."""
    before = signal.signal(number, handler)
    return signal.SIG_DFL if before is _hear else before


def leave_closed_terminal() -> None:
    """Redirect output to /dev/null if the terminal was closed, because printing would fail and the run must still save."""
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
    """Return the handler to use after a stopped run: `before`, or one that ignores repeated signals for REPEAT_SECONDS."""
    if number == signal.SIGINT or before is not signal.SIG_DFL:
        return before
    # At exit, Python restores the default handlers half a second before torch has shut down, so ignore the signal from then on.
    atexit.register(signal.signal, number, signal.SIG_IGN)
    until = time.monotonic() + REPEAT_SECONDS

    def ignore_repeated(number: int, frame: FrameType | None) -> None:
        if time.monotonic() > until:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    return ignore_repeated
