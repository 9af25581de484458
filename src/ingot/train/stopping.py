"""When a run stops: signals, and what the ranks agree on before each step.

The first signal asks the loop to save and end. After it only SIGINT ends the process at once: schedulers repeat the others.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

from ingot.backends.base import Group
from ingot.config.schema import BudgetSection
from ingot.errors import INTERRUPTED
from ingot.train.clock import Clock, fits

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Shutdown:
    """A context in which signals set `requested` instead of ending the program."""

    def __init__(self, announce: bool = True):
        self.requested = False
        self._announce = announce
        self._first_at = 0.0
        self._before: dict[int, Any] = {}
        # torchrun's agent passes on a Ctrl-C that the terminal has already sent to every rank: that is one request, not two.
        self._echo_seconds = 1.0 if "TORCHELASTIC_RUN_ID" in os.environ else 0.0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # only there does Python let us listen
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self.requested, self._first_at = True, time.monotonic()
            if self._announce:  # past Python's streams: the signal may have come in the middle of a print
                with suppress(OSError):  # whoever read the messages may have left
                    here = "\r\x1b[K" if os.isatty(2) else ""  # over the ^C and whatever line is being drawn
                    end = "once more" if number == signal.SIGINT else "SIGINT"
                    os.write(2, f"{here}{signal.Signals(number).name}: saving and stopping; {end} to end at once\n".encode())
        elif number == signal.SIGINT and time.monotonic() - self._first_at >= self._echo_seconds:
            if self._announce and os.isatty(2):
                with suppress(OSError):
                    os.write(2, b"\r\x1b[K")
            os._exit(INTERRUPTED)


def sync_clock_and_stop(
    group: Group, clock: Clock, shutdown: Shutdown, budget: BudgetSection, step_seconds: float
) -> tuple[float, bool, bool]:
    """The seconds trained, whether anybody was asked to stop, and whether the budget is spent: the same on every rank."""
    # One rank's clock decides for all: with a clock per rank the learning rates differ and the replicas drift apart.
    elapsed = spent = -1.0
    if group.ranks.first:
        elapsed = clock.elapsed
        spent = float(not fits(elapsed, step_seconds, budget.seconds, budget.overshoot))
    elapsed, stop, spent = group.maximum([elapsed, shutdown.requested, spent])
    return elapsed, stop > 0, spent > 0
