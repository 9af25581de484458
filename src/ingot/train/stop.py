"""When a run stops: signals, the end of its time on the machine, a stop file, and what the ranks agree on before each step.

The first of them asks the loop to save and end. After it only SIGINT ends the process at once: schedulers repeat the others.
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
from ingot.runtime.signals import handler_after_stop, heard_early, leave_closed_terminal, replace_handler

# The seconds a run has trained, over all its sessions, and when they are spent.


class Clock:
    """Counts training time only: it stands still while the run evaluates, samples or copies its state."""

    def __init__(self, spent: float = 0.0, now: Callable[[], float] = time.perf_counter):
        self._spent, self.now = spent, now
        self._since: float | None = None

    @property
    def elapsed(self) -> float:
        """Training seconds so far, those of earlier sessions included."""
        return self.elapsed_at(self.now())

    def elapsed_at(self, when: float) -> float:
        """Training seconds up to a time since which the clock has gone on without a pause."""
        return self._spent + (when - self._since if self._since is not None else 0.0)

    def start(self) -> None:
        """Let the time count."""
        if self._since is None:
            self._since = self.now()

    def stop(self) -> None:
        """Let the time pass without counting."""
        self._spent, self._since = self.elapsed, None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A stretch of work that is not training."""
        running = self._since is not None
        self.stop()
        try:
            yield
        finally:
            if running:
                self.start()


def longest_but_one(seconds: Collection[float]) -> float:
    """The second longest of the last steps, or the only one: a process that was stopped or a slow disk holds up a single one."""
    return sorted(seconds)[-2:][0] if seconds else 0.0


def fits(elapsed: float, step_seconds: float, budget: float | None, overshoot: bool = False) -> bool:
    """Whether a step that takes so many seconds would end inside the budget; with `overshoot`, whether it begins there."""
    if budget is None:
        return True
    return elapsed < budget if overshoot else elapsed + step_seconds <= budget


# When this session's time on the machine is over, and how long before that it saves and stops.

SETTING, RESERVE = "training.max_runtime_seconds", "training.walltime_reserve_seconds"
JOB_END = "SLURM_JOB_END_TIME"
VARIABLES = {JOB_END: "unix seconds", "INGOT_MAX_RUNTIME": "seconds above 0", "GPT_SIMPLE_MAX_RUNTIME": "seconds above 0"}
RESERVE_SECONDS, RESERVE_SHARE = 30.0, 0.1  # kept for the last save at least: the smaller of these seconds and this share
SAVES = 2  # that may lie before the end: one that is being written, and the last


@dataclass(frozen=True)
class Walltime:
    """When the session is over, who says so, and what is kept for the last save."""

    ends_at: float  # unix seconds
    seconds: float  # of the whole session
    source: str
    reserve: float | None = None  # None: by how long saves take

    def __str__(self) -> str:
        return f"{self.source} leaves {max(0.0, self.ends_at - time.time()):,.0f} s on the wall clock"

    def is_spent(self, step_seconds: float, save_seconds: float) -> bool:
        """Whether a step that long would not leave the reserve."""
        return time.time() + step_seconds + self.reserve_seconds(save_seconds) >= self.ends_at

    def reserve_seconds(self, save_seconds: float) -> float:
        """What is kept for the last save, where saves take that long."""
        if self.reserve is not None:
            return self.reserve
        return max(min(RESERVE_SECONDS, RESERVE_SHARE * self.seconds), SAVES * save_seconds)


def find_walltime(
    training: TrainingSection,
    began: float,
    environment: Mapping[str, str] | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> Walltime | None:
    """The end of a session that began at a unix time: the setting's, else the scheduler's, else a variable's; None: no end.

    A variable that is not a number is passed over, and `warn` is told of it: a job that would train is not ended by it.
    """
    variables = os.environ if environment is None else environment
    source, number = SETTING, training.max_runtime_seconds
    if number is None:
        source, number = _first_number(variables, warn)
    if number is None:
        return None
    ends_at = number if source == JOB_END else began + number
    if source == JOB_END and ends_at <= time.time():
        advice = f"correct or unset {JOB_END}, or set {{0}}, which goes before it"
        past = f"{JOB_END}={variables[JOB_END]} in the environment lies {time.time() - ends_at:,.0f} s in the past"
        raise ConfigError(past, Setting(SETTING), advice=advice)
    found = Walltime(ends_at, ends_at - began, source, training.walltime_reserve_seconds)
    if found.reserve is not None and found.reserve >= found.seconds:
        raise ConfigError(
            f"{{0}} leaves nothing of the {found.seconds:,.0f} s that {{1}} gives this session",
            Setting(RESERVE, f"{found.reserve:g}"),
            Setting(source),
            advice="lower the first or give it more time",
        )
    return found


def _first_number(variables: Mapping[str, str], warn: Callable[[str], None]) -> tuple[str, float | None]:
    """The first of the variables that is a number, and that number; None where there is none."""
    for name, unit in VARIABLES.items():
        if value := variables.get(name):
            with suppress(ValueError):
                if 0 < (number := float(value)) < math.inf:
                    return name, number
            warn(f"{name}={value} in the environment is not a number of {unit}: this session does not stop by it")
    return "", None


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
WALLTIME, STOP_FILE = 1001, 1002  # reasons to stop besides the numbers of signals
LOOK_SECONDS = 0.5  # between two looks for the stop file: a network disk answers slowly


class Shutdown:
    """A context in which signals set `reason` instead of ending the program; the first rank also watches clock and folder."""

    def __init__(self, announce: bool = True):
        self.reason = 0  # why it was asked to stop; 0: it was not
        self._announce = announce
        self._first_at = 0.0
        self._breaks_off = False
        self._before: dict[int, Any] = {}
        self._walltime: Walltime | None = None
        self._save_seconds: Callable[[], float] = lambda: 0.0
        self._stop_file: Path | None = None
        self._looked_at = -LOOK_SECONDS
        # torchrun's agent passes on a Ctrl-C that the terminal has already sent to every rank: that is one request, not two.
        self._echo_seconds = 1.0 if "TORCHELASTIC_RUN_ID" in os.environ else 0.0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # only there does Python let us listen
            ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()  # as nohup asks
            self._before = {number: replace_handler(number, self._handle) for number in SIGNALS if number not in ignored}
            if number := heard_early():
                self.ask(number)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler_after_stop(number, handler) if self.reason and error is None else handler)

    def watch(self, stop_file: Path, walltime: Walltime | None, save_seconds: Callable[[], float]) -> None:
        """Stop as well for a file, and before the end of a walltime by as much as saves are known to take."""
        self._stop_file, self._walltime, self._save_seconds = stop_file, walltime, save_seconds

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.reason_before(0.0) != 0

    def reason_before(self, step_seconds: float) -> int:
        """Why this rank is to stop rather than to take a step that long; 0: it is not."""
        if not self.reason and not self.has_time(step_seconds):
            self.ask(WALLTIME)
        if not self.reason and self._stop_file is not None and time.monotonic() - self._looked_at >= LOOK_SECONDS:
            self._looked_at = time.monotonic()
            if self._stop_file.is_file():
                self.ask(STOP_FILE)
        return self.reason

    def has_time(self, seconds: float) -> bool:
        """Whether so many seconds more leave enough of the walltime to save."""
        return self._walltime is None or not self._walltime.is_spent(seconds, self._save_seconds())

    def last_reason(self) -> int:
        """Why this rank stops, once it has saved: a stop file goes before what came first, so that a chain of jobs ends by it."""
        return STOP_FILE if self._stop_file is not None and self._stop_file.is_file() else self.reason

    @contextmanager
    def breaking_off(self, alone: bool) -> Iterator[None]:
        """A block in which there is nothing to save: on a rank that is alone a signal ends it at once, by Interrupted."""
        try:
            self._breaks_off = alone
            yield
        finally:
            self._breaks_off = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_closed_terminal()
        if not self.reason:
            self.ask(number)
            if self._breaks_off:
                raise Interrupted
        elif number == signal.SIGINT and time.monotonic() - self._first_at >= self._echo_seconds:
            if self._announce and os.isatty(2):
                with suppress(OSError):
                    os.write(2, b"\r\x1b[K")
            os._exit(INTERRUPTED)

    def ask(self, reason: int) -> None:
        """Stop for a reason, unless one is known already."""
        self.reason, self._first_at = reason, time.monotonic()
        if self._announce:  # past Python's streams: a signal may have come in the middle of a print
            with suppress(OSError):  # whoever read the messages may have left
                here = "\r\x1b[K" if os.isatty(2) else ""  # over the ^C and whatever line is being drawn
                end = "once more" if reason == signal.SIGINT else "SIGINT"
                name = reason_name(reason).removeprefix("signal:")
                os.write(2, f"{here}{name}: saving and stopping; {end} to end at once\n".encode())


def reason_name(reason: int) -> str:
    """A reason to stop as state.json and result.json tell it."""
    return {WALLTIME: "walltime", STOP_FILE: "stop_file"}.get(reason) or f"signal:{signal.Signals(reason).name}"


def is_near_end(elapsed: float, shutdown: Shutdown, budget: BudgetSection, durations: Collection[float]) -> bool:
    """Whether a step after one that the device may still be at could end after the budget or leave too little walltime."""
    in_budget = fits(elapsed, 2 * longest_but_one(durations), budget.seconds)
    return not (in_budget and shutdown.has_time(2 * max(durations, default=0.0)))


def sync_clock_and_stop(
    group: Group, clock: Clock, shutdown: Shutdown, budget: BudgetSection, durations: Collection[float]
) -> tuple[float, int, bool]:
    """The seconds trained, why to stop (0: nobody was asked to), and whether the budget is spent: the same on every rank.

    The last steps tell how long the next one takes. The end of a walltime kills, so there the longest of them counts.
    """
    # One rank's clock decides for all: with a clock per rank the learning rates differ and the replicas drift apart.
    elapsed = spent = -1.0
    if group.ranks.first:
        elapsed = clock.elapsed
        spent = float(not fits(elapsed, longest_but_one(durations), budget.seconds, budget.overshoot))
    elapsed, reason, spent = group.maximum([elapsed, shutdown.reason_before(max(durations, default=0.0)), spent])
    return elapsed, int(reason), spent > 0
