"""Signals that schedulers repeat: after the first one was answered, the next must not make a saved stop look like a kill."""

from __future__ import annotations

import atexit
import os
import signal
import time
from functools import partial
from types import FrameType
from typing import Any

REPEAT_SECONDS = 30.0  # a program that goes on after its run ends by a later signal again


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
