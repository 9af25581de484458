"""Signals before and after a run: one that comes while a program starts stops it too, and one that is repeated changes nothing.

Starting takes seconds, of which most are imports. A program that is alone has nothing to lose then and ends at once. A rank
remembers the signal until its run listens, because the others have to hear of it.
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
from functools import partial
from types import FrameType
from typing import Any

from ingot.errors import Interrupted

# Besides SIGINT, which Python answers by KeyboardInterrupt.
STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
REPEAT_SECONDS = 30.0  # a program that goes on after its run ends by a later signal again

_heard: list[int] = []


@contextmanager
def listening_early(listens: bool = True) -> Iterator[None]:
    """A block in which the signals that stop a run are heard before it listens; one that was held back comes at its beginning.

    Interrupted, with the name of the signal: this process is alone and was asked to stop.
    """
    try:
        if listens and threading.current_thread() is threading.main_thread():  # only there does Python let us
            for number in STOPPING:
                if signal.getsignal(number) is signal.SIG_DFL:  # not where the caller ignores it, as nohup does
                    signal.signal(number, _hear)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        yield
    finally:
        for number in STOPPING:
            if signal.getsignal(number) is _hear:
                signal.signal(number, signal.SIG_DFL)


def heard_early() -> int:
    """The first signal that came before a run listened, once; 0: none did."""
    number = _heard[0] if _heard else 0
    _heard.clear()
    return number


def replace_handler(number: int, handler: Any) -> Any:
    """Handle a signal from now on; returns what is to be put back afterwards."""
    before = signal.signal(number, handler)
    return signal.SIG_DFL if before is _hear else before


def leave_closed_terminal() -> None:
    """Let what is still printed go nowhere if the terminal was closed: to print there is an error, and a run has yet to save."""
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
    """What handles a signal after a run was stopped: one that would end the process is taken for a repetition for a while."""
    if number == signal.SIGINT or before is not signal.SIG_DFL:
        return before
    # Python gives its handlers back before torch is closed, which takes half a second.
    atexit.register(signal.signal, number, signal.SIG_IGN)
    return partial(_pass_over, time.monotonic() + REPEAT_SECONDS)


def _pass_over(until: float, number: int, frame: FrameType | None) -> None:
    if time.monotonic() > until:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
