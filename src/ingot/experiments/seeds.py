"""Runs sorted by what they have in common: which settings tell them apart, and which are one arm with several seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from ingot.config.fields import settings as fields
from ingot.config.text import format_value
from ingot.errors import IngotError
from ingot.experiments.comparing import SEEDS, Reader, Scored, ScoreName, compare, read_scored, verdict


@dataclass(frozen=True)
class Known:
    """A run, finished or not, by its name, its folder, the settings that decide what it comes to, and its last score."""

    name: str
    path: Path
    settings: Mapping[str, Any]
    val_bpb: float | None


@dataclass(frozen=True)
class Arm:
    """Runs that differ in nothing but their seeds; numbers are None where too few have a score."""

    runs: tuple[Known, ...]
    n: int  # runs with a score
    mean: float | None
    std: float | None

    @property
    def name(self) -> str:
        return ", ".join(run.name for run in self.runs)


@dataclass(frozen=True)
class Tested:
    """Two arms, and what the test between their scores says, or why there is none."""

    a: Arm
    b: Arm
    said: str


def arm_key(settings: Mapping[str, Any]) -> str:
    """The same for runs that differ in nothing but their seeds."""
    return repr(sorted((name, value) for name, value in settings.items() if name not in SEEDS))


def unlike(several: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the settings that are not the same in all."""
    names = sorted({name for settings in several for name in settings})
    return [name for name in names if len({repr(settings.get(name)) for settings in several}) > 1]


def settings_table(several: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row for each setting that tells runs apart, with a value per run; of one alone, those that are not the default."""
    if len(several) > 1:
        named = unlike(several)
    else:
        known = fields(str(several[0].get("model.family")))
        named = sorted(name for name, value in several[0].items() if name not in known or value != known[name].default)
    return [[name, *(format_value(settings.get(name)) for settings in several)] for name in named]


def over_seeds(runs: Sequence[Known]) -> list[Arm]:
    """The arms of which there are several runs."""
    found: dict[str, list[Known]] = {}
    for run in runs:
        found.setdefault(arm_key(run.settings), []).append(run)
    return [_arm(arm) for arm in found.values() if len(arm) > 1]


def tested(arms: Sequence[Arm]) -> list[Tested]:
    """What the tests between pairs of arms say; each run is read once, in however many pairs it stands."""
    found, read = [], _reading_once()
    for a, b in combinations(arms, 2):
        try:
            said = verdict(compare([run.path for run in a.runs], [run.path for run in b.runs], read=read))
        except IngotError as error:
            said = str(error)
        found.append(Tested(a, b, said))
    return found


def _reading_once() -> Reader:
    known: dict[tuple[Path, ScoreName], Scored | IngotError] = {}

    def read(path: Path, score: ScoreName) -> Scored:
        if (path, score) not in known:
            try:
                known[path, score] = read_scored(path, score)
            except IngotError as error:
                known[path, score] = error
        found = known[path, score]
        if isinstance(found, IngotError):
            raise found
        return found

    return read


def _arm(runs: Sequence[Known]) -> Arm:
    scores = [run.val_bpb for run in runs if run.val_bpb is not None]
    mean, std = statistics.fmean(scores) if scores else None, statistics.stdev(scores) if len(scores) > 1 else None
    return Arm(tuple(runs), len(scores), mean, std)
