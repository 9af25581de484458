"""When this session's time on the machine is over, and how long before that it saves and stops.

It is the time of the wall, from the start of the program on: imports, compiling and evaluations count, unlike for budget.seconds,
which counts the training of all sessions.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from ingot.config.schema import TrainingSection
from ingot.errors import ConfigError, Setting

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
