"""Compare the scores of two groups of finished runs, read from their folders.

The runs of a group (an arm) differ only in their seeds. Scores are comparable if the validation text is the same, even with
different tokenizers.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, get_args

from ingot.config.fields import settings as fields
from ingot.config.text import format_value
from ingot.errors import CheckpointError, ConfigError, IngotError
from ingot.experiments.statistics import Welch, seeds_needed, welch
from ingot.runs.metrics import is_number
from ingot.runs.reporter import by_rows
from ingot.runs.view import Run
from ingot.train.resume import decisive_settings

ScoreName = Literal["val_bpb", "artifact_bpb", "val_loss"]
SEEDS = ("training.seed", "data.seed")
BYTES = "evaluation.bytes"
MAX_SCORE = 1e6  # in nats or bits per byte; a larger score is treated as invalid
LEVEL = 0.01  # significance level: a difference is significant if its p-value is smaller


@dataclass(frozen=True)
class Scored:
    """A completed run with its score."""

    path: Path
    score: float
    seeds: tuple[int, ...]
    data: str  # fingerprint (hash) of the prepared data
    text_bytes: int | None  # size of the validation text in bytes; None if only part of it was scored
    part: str  # describes which part of the text was scored; empty if the whole text was scored
    sliding: str  # describes how far rows overlap; empty if they do not overlap
    settings: dict[str, Any]  # all settings that affect the result, except the seeds


Reader = Callable[[Path, ScoreName], Scored]


@dataclass(frozen=True)
class Side:
    """One of the two groups of runs that are compared, with the mean and standard deviation of its scores."""

    runs: list[Scored]
    scores: list[float]
    mean: float
    std: float


@dataclass(frozen=True)
class Comparison:
    """The result of comparing the scores of two groups of runs."""

    a: Side
    b: Side
    test: Welch
    more: tuple[int, int] | None  # additional seeds needed per side for p < LEVEL; None: too many to be worthwhile
    differing: dict[str, tuple[Any, Any]]  # settings that differ between the two sides, with both values
    notes: tuple[str, ...]
    difference: float  # mean of b minus mean of a


def compare(a: Sequence[Path], b: Sequence[Path], score: ScoreName = "val_bpb", read: Reader | None = None) -> Comparison:
    """Compare the scores of two groups of runs; raise ConfigError if they are not comparable. `read` reads the score of a run."""
    sides = (_side(a, score, read or read_scored), _side(b, score, read or read_scored))
    runs = sides[0].runs + sides[1].runs
    if both := {path.resolve() for path in a} & {path.resolve() for path in b}:
        raise ConfigError(f"{min(both)} is given on both sides, but the sides must be independent; remove it from one of them")
    for run in runs[1:]:  # scores on different texts, tokens (val_loss) or byte counts are not comparable
        same_text = run.text_bytes is not None and run.text_bytes == runs[0].text_bytes and score != "val_loss"
        counted = [side.settings.get(BYTES) for side in (runs[0], run)]
        if not same_text and score != "val_loss" and counted[0] != counted[1]:
            raise ConfigError(
                f"{runs[0].path} and {run.path} count bytes differently ({BYTES}={counted[0]} and {counted[1]}), so their "
                f"{score} is not comparable; train one of them with the other's setting"
            )
        if not same_text and run.data != runs[0].data:
            paths = [side.settings.get("data.path") for side in (runs[0], run)]
            raise ConfigError(
                f"{runs[0].path} and {run.path} are scored on different data, {paths[0]} (fingerprint {runs[0].data[:12]}) and "
                f"{paths[1]} ({run.data[:12]}): {score} on different texts is not comparable; give runs with the same data"
            )
    scores = sides[0].scores, sides[1].scores
    test, needed, more = welch(*scores), seeds_needed(*scores, LEVEL), None
    if needed is not None:
        more = (0, 0) if test.p < LEVEL else (max(0, needed - len(a)), max(0, needed - len(b)))
    first, second = (side.runs[0].settings for side in sides)
    differing = {name: (first.get(name), second.get(name)) for name in unlike([first, second])}
    parts = " and ".join(dict.fromkeys(run.part or "by all rows" for run in runs)) if any(run.part for run in runs) else ""
    kinds = list(dict.fromkeys(run.sliding or "no overlap" for run in runs))
    notes = [f"scores do not cover all validation text ({parts}); evaluation.final_rows=null scores all of it"] * bool(parts)
    if len(kinds) > 1:
        notes.append(f"rows overlap differently ({' and '.join(kinds)}), so one side has more context; use one evaluation.stride")
    elif runs[0].sliding:
        notes.append(f"rows overlap ({kinds[0]}), so scores are lower than they would be without overlap")
    return Comparison(*sides, test, more, differing, tuple(notes), sides[1].mean - sides[0].mean)


def read_scored(path: Path, score: ScoreName = "val_bpb") -> Scored:
    """Read a completed run and its score from its folder."""
    run = Run.open(path)
    result, state = run.result() or {}, run.status()
    if state.status != "completed" or result.get("status") != "completed":
        raise CheckpointError(
            f"{path} is not complete: its status is {state.status}; finish it with: ingot train {shlex.quote(str(path))}"
        )
    value = valid_score(result.get(score))
    if value is None:
        scores = [name for name in get_args(ScoreName) if valid_score(result.get(name)) is not None]
        raise CheckpointError(f"{path} has no {score}; it has {' and '.join(scores) or 'no score'}")
    steps, at = result.get("total_steps"), result.get("val_step")
    if score != "artifact_bpb" and at not in (None, steps):  # result.json of older versions has no val_step
        raise CheckpointError(
            f"{path} has the {score} of step {at}, not of its last step {steps}; train it with evaluation.at_end=true"
        )
    settings = decisive_settings(run.config)
    seeds = tuple(int(settings.pop(name)) for name in SEEDS)
    rows, rows_of = result.get("val_rows") or 0, result.get("val_rows_of") or 0
    part, text_bytes = by_rows(rows, rows_of).strip(), None
    sliding = by_rows(None, None, result.get("val_stride")).strip()
    if not part:
        text_bytes = evaluations[-1].get("bytes") if (evaluations := run.series.read().evaluations) else None
    data = result.get("data_fingerprint") or settings.get("data.path")  # older versions did not record a fingerprint
    return Scored(path, value, seeds, str(data), text_bytes, part, sliding, settings)


def valid_score(value: object) -> float | None:
    """Return a score read from a run's files, or None if it is missing or invalid."""
    return float(value) if is_number(value) and abs(value) <= MAX_SCORE else None


def verdict(comparison: Comparison) -> str:
    """Describe the test's result in words."""
    p, more = f"p = {comparison.test.p:.2g} (Welch, two-sided)", comparison.more
    if comparison.test.p < LEVEL:
        return f"{p}: {'B' if comparison.difference < 0 else 'A'} is lower"
    if more is None:
        return f"{p}: no practical number of seeds would separate A and B"
    seeds = f"{more[0]} more seeds of each" if more[0] == more[1] else f"{more[0]} more seeds of A and {more[1]} of B"
    return f"{p}: not significant, {seeds} are needed for p < {LEVEL:g}"


def _side(paths: Sequence[Path], score: ScoreName, read: Reader) -> Side:
    if len(paths) < 2:
        only = f"only {paths[0]}" if paths else "no run"
        raise ConfigError(f"one side of the comparison has {only}: give runs with at least two seeds on each side")
    runs = [read(path, score) for path in paths]
    for run, other in combinations(runs, 2):
        if run.seeds == other.seeds:
            seeds = ", ".join(f"{name}={seed}" for name, seed in zip(SEEDS, run.seeds, strict=True))
            raise ConfigError(f"{run.path} and {other.path} have the same seeds ({seeds}); runs on one side need different seeds")
    for run in runs[1:]:
        if names := unlike([runs[0].settings, run.settings]):
            values = [format_value(side.settings.get(names[0])) for side in (runs[0], run)]
            raise ConfigError(
                f"{runs[0].path} and {run.path} are on the same side but differ in a setting: {names[0]} is "
                f"{' and '.join(values)}; put them on different sides"
            )
    scores = [run.score for run in runs]
    return Side(runs, scores, statistics.fmean(scores), statistics.stdev(scores))


# Grouping runs by settings, for `ingot report` and the web page of `ingot ui`.


@dataclass(frozen=True)
class SeedRun:
    """A run, finished or not, with its last score; `settings` are the settings that affect the result."""

    name: str
    path: Path
    settings: Mapping[str, Any]
    val_bpb: float | None


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ only in their seeds; mean and std are None if too few runs have a score."""

    runs: tuple[SeedRun, ...]
    n: int  # number of runs with a score
    mean: float | None
    std: float | None

    @property
    def name(self) -> str:
        return ", ".join(run.name for run in self.runs)


def arm_key(settings: Mapping[str, Any]) -> str:
    """Return a key that is the same for all runs that differ only in their seeds."""
    return repr(sorted((name, value) for name, value in settings.items() if name not in SEEDS))


def unlike(several: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the settings whose values differ between the runs."""
    names = sorted({name for settings in several for name in settings})
    return [name for name in names if len({repr(settings.get(name)) for settings in several}) > 1]


def settings_table(several: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a table of the settings that differ between runs or, for a single run, of those that differ from the defaults."""
    if len(several) > 1:
        named = unlike(several)
    else:
        defaults = fields(str(several[0].get("model.family")))
        named = sorted(name for name, value in several[0].items() if name not in defaults or value != defaults[name].default)
    return [[name, *(format_value(settings.get(name)) for settings in several)] for name in named]


def over_seeds(runs: Sequence[SeedRun]) -> list[SeedGroup]:
    """Group runs that differ only in their seeds; return the groups with more than one run."""
    groups: dict[str, list[SeedRun]] = {}
    for run in runs:
        groups.setdefault(arm_key(run.settings), []).append(run)
    arms = []
    for group in (group for group in groups.values() if len(group) > 1):
        scores = [score for run in group if (score := valid_score(run.val_bpb)) is not None]
        mean, std = statistics.fmean(scores) if scores else None, statistics.stdev(scores) if len(scores) > 1 else None
        arms.append(SeedGroup(tuple(group), len(scores), mean, std))
    return arms


def tested(groups: Sequence[SeedGroup]) -> list[tuple[SeedGroup, SeedGroup, str]]:
    """Compare every pair of groups; return each pair with the verdict, or with the error message if it cannot be compared."""
    read, tests = cache(read_scored), []
    for a, b in combinations(groups, 2):
        try:
            said = verdict(compare([run.path for run in a.runs], [run.path for run in b.runs], read=read))
        except IngotError as error:
            said = str(error)
        tests.append((a, b, said))
    return tests
