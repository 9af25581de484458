"""What a sweep has come to so far: the scores of every arm against those of the first, by the folders of its runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.eval.statistics import welch
from ingot.experiments.arms import Trial
from ingot.experiments.comparing import ScoreName
from ingot.runs.result import read_result
from ingot.runs.run import Run
from ingot.runs.state import read_state


@dataclass(frozen=True)
class TrialSummary:
    """One run; numbers are None where there are none yet."""

    run: str
    seed: int
    status: str  # waiting: it has not begun
    score: float | None
    tokens_per_second: float | None
    training_seconds: float
    error: str | None = None


@dataclass(frozen=True)
class ArmSummary:
    """One arm; `difference` and `p` are against the first arm."""

    arm: str
    trials: tuple[TrialSummary, ...]
    n: int  # complete runs with a score
    mean: float | None
    std: float | None
    difference: float | None
    p: float | None
    best: bool = False


def summarise(trials: Sequence[Trial], score: ScoreName, errors: Mapping[Path, str] | None = None) -> list[ArmSummary]:
    """The arms in their order."""
    arms: dict[str, list[TrialSummary]] = {}
    for trial in trials:
        arms.setdefault(trial.arm, []).append(_look(trial, score, errors or {}))
    scores = {arm: [one.score for one in found if one.score is not None] for arm, found in arms.items()}
    first = next(iter(scores.values()))
    means = {arm: statistics.fmean(found) for arm, found in scores.items() if found}
    lowest = min(means, key=means.__getitem__) if len(means) > 1 else None
    return [
        ArmSummary(
            arm,
            tuple(found),
            n=len(own := scores[arm]),
            mean=means.get(arm),
            std=statistics.stdev(own) if len(own) > 1 else None,
            difference=means[arm] - statistics.fmean(first) if own and first and own is not first else None,
            p=welch(first, own).p if min(len(own), len(first)) > 1 and own is not first else None,
            best=arm == lowest,
        )
        for arm, found in arms.items()
    ]


def _look(trial: Trial, score: ScoreName, errors: Mapping[Path, str]) -> TrialSummary:
    state = read_state(trial.folder)
    if state is None:
        status = "failed" if trial.folder in errors else "waiting"
        return TrialSummary(str(trial.folder), trial.seed, status, None, None, 0.0, errors.get(trial.folder))
    status = Run(trial.folder).status().status
    result: dict[str, Any] = (read_result(trial.folder) or {}) if status == "completed" else {}
    value, speed = result.get(score), result.get("tokens_per_second") or state.tokens_per_second
    seconds, error = state.elapsed_seconds, errors.get(trial.folder) or state.error
    return TrialSummary(str(trial.folder), trial.seed, status, value, speed, seconds, error)
