"""When this session's time on the machine is over, and how long before that it saves and stops.

It is the time of the wall, from the start of the program on: imports, compiling and evaluations count, unlike for budget.seconds,
which counts the training of all sessions.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ingot.config.schema import TrainingSection
from ingot.errors import ConfigError, Setting

SETTING, RESERVE = "training.max_runtime_seconds", "training.walltime_reserve_seconds"
JOB_END = "SLURM_JOB_END_TIME"  # unix seconds
VARIABLES = ("INGOT_MAX_RUNTIME", "GPT_SIMPLE_MAX_RUNTIME")  # seconds
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


def find_walltime(training: TrainingSection, began: float, environment: Mapping[str, str] | None = None) -> Walltime | None:
    """The end of a session that began at a unix time: the setting's, else the scheduler's, else a variable's; None: no end."""
    variables = os.environ if environment is None else environment
    variable = next((name for name in VARIABLES if variables.get(name)), "")
    if training.max_runtime_seconds is not None:
        ends_at, source = began + training.max_runtime_seconds, SETTING
    elif variables.get(JOB_END):
        ends_at, source = _number(variables, JOB_END, "unix seconds"), JOB_END
        if ends_at <= time.time():
            raise _refused(JOB_END, variables, f"lies {time.time() - ends_at:,.0f} s in the past")
    elif variable:
        ends_at, source = began + _number(variables, variable, "seconds above 0"), variable
    else:
        return None
    found = Walltime(ends_at, ends_at - began, source, training.walltime_reserve_seconds)
    if found.reserve is not None and found.reserve >= found.seconds:
        raise ConfigError(
            f"{{0}} leaves nothing of the {found.seconds:,.0f} s that {{1}} gives this session",
            Setting(RESERVE, f"{found.reserve:g}"),
            Setting(source),
            advice="lower the first or give it more time",
        )
    return found


def _number(variables: Mapping[str, str], name: str, unit: str) -> float:
    try:
        value = float(variables[name])
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise _refused(name, variables, f"is not a number of {unit}")
    return value


def _refused(name: str, variables: Mapping[str, str], why: str) -> ConfigError:
    advice = f"correct or unset {name}, or set {{0}}, which goes before it"
    return ConfigError(f"{name}={variables[name]} in the environment {why}", Setting(SETTING), advice=advice)
