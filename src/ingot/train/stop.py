"""Stop conditions: training budget, signals, wall-clock limit and stop file, and their synchronisation over ranks.

The first stop request makes the training loop save and exit. After that, a SIGINT ends the process at once, and
other signals are ignored, because schedulers repeat them.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from ingot.backends.base import Group
from ingot.config.schema import BudgetSection, TrainingSection
from ingot.errors import INTERRUPTED, ConfigError, Interrupted, Setting
from ingot.runtime.signals import STOPPING, handler_after_stop, heard_early, leave_closed_terminal, replace_handler


class Clock:
    """A clock for the training time over all sessions of a run; paused while the run evaluates, samples or copies its state."""

    def __init__(self, spent: float = 0.0, now: Callable[[], float] = time.perf_counter):
        self._spent, self.now = spent, now
        self._since: float | None = None

    @property
    def elapsed(self) -> float:
        """Return the training seconds so far, including those of earlier sessions."""
        return self.elapsed_at(self.now())

    def elapsed_at(self, when: float) -> float:
        """Return the training seconds up to time `when`; the clock must not have been paused since then."""
        return self._spent + (when - self._since if self._since is not None else 0.0)

    def start(self) -> None:
        """Start or resume counting training time."""
        if self._since is None:
            self._since = self.now()

    def stop(self) -> None:
        """Stop counting training time."""
        self._spent, self._since = self.elapsed, None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the clock during a `with` block."""
        running = self._since is not None
        self.stop()
        try:
            yield
        finally:
            if running:
                self.start()


def longest_but_one(seconds: Collection[float]) -> float:
    """Return the second longest duration (the longest may be due to a slow disk), or the only one, or 0 if there is none."""
    return sorted(seconds)[-2:][0] if seconds else 0.0


def fits(elapsed: float, step_seconds: float, budget: float | None, overshoot: bool = False) -> bool:
    """Return True if a step of `step_seconds` would end (with `overshoot`: begin) within the budget."""
    if budget is None:
        return True
    return elapsed < budget if overshoot else elapsed + step_seconds <= budget


SETTING = "training.max_runtime_seconds"
JOB_END = "SLURM_JOB_END_TIME"
VARIABLES = {JOB_END: "unix seconds", "INGOT_MAX_RUNTIME": "seconds above 0", "GPT_SIMPLE_MAX_RUNTIME": "seconds above 0"}
# Minimum time reserved for the last save: this many seconds, or this share of the session if that is less.
RESERVE_SECONDS, RESERVE_SHARE = 30.0, 0.1
SAVES = 2  # number of saves that the reserve has to cover: the one in progress, and the last one


@dataclass(frozen=True)
class Walltime:
    """The wall-clock limit of a session: its end, the setting or variable it comes from, and the reserve for the last save."""

    ends_at: float  # Unix time at which the session ends
    seconds: float  # duration of the whole session, which ends at `ends_at`
    source: str
    reserve: float | None = None  # seconds reserved for the last save; None: estimated from earlier saves

    def __str__(self) -> str:
        return f"{self.source} ends this session in {max(0.0, self.ends_at - time.time()):,.0f} s"

    def reserve_seconds(self, save_seconds: float) -> float:
        """Return the seconds to reserve for the last save if a save takes `save_seconds`."""
        if self.reserve is not None:
            return self.reserve
        return max(min(RESERVE_SECONDS, RESERVE_SHARE * self.seconds), SAVES * save_seconds)


def find_walltime(
    training: TrainingSection,
    began: float,
    environment: Mapping[str, str] = os.environ,
    warn: Callable[[str], None] = lambda text: None,
) -> Walltime | None:
    """Return the wall-clock limit of a session that began at Unix time `began`, from the config or else from the environment."""
    source, number = SETTING, training.max_runtime_seconds
    for name, unit in VARIABLES.items() if number is None else ():
        if value := environment.get(name):
            with suppress(ValueError):
                if 0 < float(value) < math.inf:
                    source, number = name, float(value)
                    break
            # Only warn, so that a variable set by the cluster does not prevent a job from training.
            warn(f"{name}={value} in the environment is not a number of {unit}, so it is ignored")
    if number is None:
        return None
    ends_at = number if source == JOB_END else began + number
    if source == JOB_END and ends_at <= time.time():
        advice = f"correct or unset {JOB_END}, or set {{0}}, which takes precedence"
        past = f"{JOB_END}={environment[JOB_END]} in the environment is {time.time() - ends_at:,.0f} s in the past"
        raise ConfigError(past, Setting(SETTING), advice=advice)
    walltime = Walltime(ends_at, ends_at - began, source, training.walltime_reserve_seconds)
    if walltime.reserve is not None and walltime.reserve >= walltime.seconds:
        reserve = Setting("training.walltime_reserve_seconds", f"{walltime.reserve:g}")
        nothing = f"{{0}} leaves no time for training: {{1}} limits this session to {walltime.seconds:,.0f} s"
        raise ConfigError(nothing, reserve, Setting(source), advice="lower {0} or raise {1}")
    return walltime


WALLTIME, STOP_FILE = 1001, 1002  # stop reasons that are not signals; a signal's reason is its number
STOP_FILE_INTERVAL = 0.5  # seconds between checks for the stop file; more checks would be slow on a network file system


class Shutdown:
    """A context manager in which signals set `reason` instead of ending the program; `watch` adds a stop file and time limit."""

    def __init__(self, announce: bool = True):
        self.reason = 0  # 0: no stop was requested
        self._announce = announce
        self._first_at = 0.0
        self.breaks_off = False  # True while there is nothing to save: a signal then raises Interrupted at once
        self._before: dict[int, Any] = {}
        self._walltime: Walltime | None = None
        self._save_seconds: Callable[[], float] = lambda: 0.0
        self._stop_file: Path | None = None
        self._looked_at = -STOP_FILE_INTERVAL
        # torchrun's agent forwards a Ctrl-C that the terminal has already sent to every rank: count it as one request, not two.
        self._echo_seconds = 1.0 if "TORCHELASTIC_RUN_ID" in os.environ else 0.0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows signal handlers only in the main thread
            nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            numbers = [number for number in (signal.SIGINT, *STOPPING) if not (nohup and number == signal.SIGHUP)]
            self._before = {number: replace_handler(number, self._handle) for number in numbers}
            if number := heard_early():
                self.ask(number)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler_after_stop(number, handler) if self.reason and error is None else handler)

    def watch(self, stop_file: Path, walltime: Walltime | None, save_seconds: Callable[[], float]) -> None:
        """Also request a stop when `stop_file` exists or when `walltime` leaves just enough time to save."""
        self._stop_file, self._walltime, self._save_seconds = stop_file, walltime, save_seconds

    @property
    def requested(self) -> bool:
        """Return True if this rank has received a stop request."""
        return self.reason_before(0.0) != 0

    def reason_before(self, step_seconds: float) -> int:
        """Return the reason to stop before a step expected to take `step_seconds`, or 0 to continue."""
        if not self.reason and not self.has_time(step_seconds):
            self.ask(WALLTIME)
        if not self.reason and self._stop_file is not None and time.monotonic() - self._looked_at >= STOP_FILE_INTERVAL:
            self._looked_at = time.monotonic()
            if self._stop_file.is_file():
                self.ask(STOP_FILE)
        return self.reason

    def has_time(self, seconds: float) -> bool:
        """Return True if, `seconds` from now, there will still be time for the last save."""
        limit = self._walltime
        return limit is None or time.time() + seconds + limit.reserve_seconds(self._save_seconds()) < limit.ends_at

    def last_reason(self) -> int:
        """Return why this rank has stopped. A stop file takes precedence over other reasons, so that it ends a chain of jobs."""
        return STOP_FILE if self._stop_file is not None and self._stop_file.is_file() else self.reason

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_closed_terminal()
        if not self.reason:
            self.ask(number)
            if self.breaks_off:
                raise Interrupted
        elif number == signal.SIGINT and time.monotonic() - self._first_at >= self._echo_seconds:
            if self._announce and os.isatty(2):
                with suppress(OSError):
                    os.write(2, b"\r\x1b[K")
            os._exit(INTERRUPTED)

    def ask(self, reason: int) -> None:
        """Request a stop and announce it on stderr."""
        self.reason, self._first_at = reason, time.monotonic()
        if self._announce:  # write to the file descriptor, because the signal may have interrupted a print
            with suppress(OSError):  # stderr may be a closed pipe
                here = "\r\x1b[K" if os.isatty(2) else ""  # overwrites the ^C and the progress line
                end = "send SIGINT again" if reason == signal.SIGINT else "send SIGINT"
                name = reason_name(reason).removeprefix("signal:")
                os.write(2, f"{here}{name}: saving and stopping; {end} to end at once\n".encode())


def reason_name(reason: int) -> str:
    """Return the name of a stop reason, as written to state.json and result.json."""
    return {WALLTIME: "walltime", STOP_FILE: "stop_file"}.get(reason) or f"signal:{signal.Signals(reason).name}"


def sync_clock_and_stop(
    group: Group, clock: Clock, shutdown: Shutdown, budget: BudgetSection, durations: Collection[float]
) -> tuple[float, int, bool]:
    """Return the training seconds, the stop reason (0: none) and whether the budget is spent; all ranks get the same values.

    For the budget, the next step is assumed to take as long as the second longest recent step; for the wall-clock limit, as long
    as the longest one.
    """
    # One rank's clock decides for all: with a clock per rank, learning rates would differ and replicas would drift apart.
    elapsed = spent = -1.0
    if group.ranks.first:
        elapsed = clock.elapsed
        spent = float(not fits(elapsed, longest_but_one(durations), budget.seconds, budget.overshoot))
    elapsed, reason, spent = group.maximum([elapsed, shutdown.reason_before(max(durations, default=0.0)), spent])
    return elapsed, int(reason), spent > 0
