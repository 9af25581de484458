"""The seconds a run has trained, over all its sessions, and when they are spent."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager


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
