"""The arms of a sweep and their trials: which settings are varied, with which seeds, and in which order the runs come.

Arms take turns, seed by seed, so that whatever changes on the machine meanwhile meets all of them, and a sweep that is broken off
has as many seeds of one arm as of another.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from ingot.config.loading import ResolvedConfig
from ingot.config.schema import Config
from ingot.config.text import Plain, format_value, parse_yaml
from ingot.data.loading.open import open_dataset
from ingot.errors import ConfigError, IngotError
from ingot.experiments.comparing import BYTES, SEEDS, ScoreName
from ingot.runs.run import Run
from ingot.train.finished import compared

NOT_SET = {
    **dict.fromkeys(SEEDS, "give --seeds instead"),
    "training.output_dir": "give --output instead",
    "training.resume": "a sweep goes on where it stood",
}
_NAME = re.compile(r"(?!\.+$)[\w.=,+-]+")  # of a folder in the output, which .. is not


@dataclass(frozen=True)
class Arm:
    """What one arm sets, by the names or sections of settings."""

    name: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """One run of an arm."""

    arm: str
    seed: int
    resolved: ResolvedConfig

    @property
    def config(self) -> Config:
        return self.resolved.config

    @property
    def folder(self) -> Path:
        return Path(str(self.config.training.output_dir))


def make_arms(vary: Sequence[str], file: Path | None = None) -> list[Arm]:
    """The arms that words such as optimizer.learning_rate=0.01,0.02 and a YAML file of arms describe, each with each."""
    if not vary and file is None:
        raise ConfigError("there is nothing to sweep: give --vary SETTING=VALUE,VALUE or --arms FILE")
    varied = [_values(word) for word in vary]
    if twice := [name for name, count in Counter(name for name, _ in varied).items() if count > 1]:
        raise ConfigError(f"--vary {twice[0]} is given twice; give all its values at once")
    short = Counter(name.rpartition(".")[2] for name, _ in varied)
    named = _read_arms(file) if file is not None else [Arm("", {})]
    arms = []
    for base, *values in product(named, *([(name, value) for value in values] for name, values in varied)):
        parts = [base.name] if base.name else []
        for name, value in values:
            last = name.rpartition(".")[2]
            parts.append(f"{last if short[last] == 1 else name}={_shown(value)}")
        arms.append(Arm(re.sub(r"[^\w.=,+-]+", "-", ",".join(parts)), {**base.settings, **dict(values)}))
    for name, count in Counter(arm.name for arm in arms).items():
        if count > 1:
            one, other, *_ = (arm.settings for arm in arms if arm.name == name)
            advice = "leave one of the equal values out" if one == other else "give them names of their own with --arms FILE"
            raise ConfigError(f"two arms have the name {name}; {advice}")
    return arms


def read_seeds(text: str) -> list[int]:
    """The seeds of a text such as 1,2,3."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ConfigError(f"--seeds {text} is not a list of numbers such as 1,2,3")
    seeds = [int(word) for word in words]
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {text} has a seed twice; the second run would be the first once more")
    return seeds


def plan_trials(
    arms: Sequence[Arm],
    seeds: Sequence[int],
    output: Path,
    resolve: Callable[[Mapping[str, Any]], ResolvedConfig],
    score: ScoreName = "val_bpb",
) -> list[Trial]:
    """The runs of a sweep in their order, checked before one starts; `resolve` makes a config of an arm's settings."""
    trials = []
    for seed, arm in product(seeds, arms):
        own: dict[str, Any] = dict.fromkeys(SEEDS, seed)
        own["training.output_dir"] = str(output / arm.name / f"seed-{seed}")
        try:
            trials.append(Trial(arm.name, seed, resolve({**arm.settings, **own})))
        except ConfigError as error:
            raise error.within(f"arm {arm.name}") from None
    for trial in trials:
        check_scored(trial, score)
    check_one_text(trials, score)
    for trial in trials:
        check_folder(trial)
    return trials


def check_scored(trial: Trial, score: ScoreName) -> None:
    """Refuse an arm that would end without the score that is asked for."""
    artifact, needed = trial.config.artifact, {"evaluation.at_end": trial.config.evaluation.at_end}
    if score == "artifact_bpb":
        needed = {"artifact.write": artifact.write, "artifact.score": artifact.score}
    if lacking := [name for name, value in needed.items() if not value]:
        raise ConfigError(
            f"arm {trial.arm}: it would have no {score} of its last step, because {lacking[0]} is false; set it to true"
        )


def check_one_text(trials: Sequence[Trial], score: ScoreName) -> None:
    """Refuse arms whose scores would be of different texts or in different units; the same text may be in other tokens."""
    found: dict[tuple[Any, ...], _Judged] = {}
    for trial in trials:
        data, counted = trial.config.data, trial.config.evaluation.bytes
        key = (data.path, data.tokenizer, data.trust_tokens, counted, trial.config.evaluation.final_rows)
        if key not in found:
            try:
                dataset = open_dataset(data.path, data.tokenizer, data.trust_tokens, trial.config.fitting_tokenizer)
            except IngotError as error:
                raise error.within(f"arm {trial.arm}") from None
            val = dataset.split("val")
            text = (val.documents, val.bytes) if val.bytes else dataset.fingerprint
            size = val.piece_bytes if counted == "pieces" else val.bytes
            rows = trial.config.evaluation.final_rows
            found[key] = _Judged(trial.arm, text, dataset.fingerprint, size, isinstance(rows, int))
    first, *others = found.values()
    for other in others:
        if why := _unlike(first, other, score):
            raise ConfigError(f"the arms {first.arm} and {other.arm} {why}; sweep each by itself")


@dataclass(frozen=True)
class _Judged:
    """What an arm's score is of."""

    arm: str
    text: object
    tokens: str  # fingerprint
    size: int | None  # bytes that it divides by
    in_part: bool


def _unlike(one: _Judged, other: _Judged, score: ScoreName) -> str:
    if one.text != other.text:
        return "are on different data, and scores of different validation texts do not compare"
    if score == "val_loss" and one.tokens != other.tokens:
        return "have different tokens: their val_loss does not compare, their val_bpb does"
    if score != "val_loss" and one.size != other.size:
        return f"count bytes in different ways ({BYTES}), so that their {score} does not compare"
    if (one.in_part or other.in_part) and one.tokens != other.tokens:
        return "have rows of different tokens, so that some rows (evaluation.final_rows) are of different texts"
    return ""


def check_folder(trial: Trial) -> None:
    """Refuse a folder with a run of other settings: going on with it would be neither the one nor the other."""
    if not (trial.folder / "config.yaml").is_file():
        return
    was, now = compared(Run.open(trial.folder).config), compared(trial.config)
    unlike = [name for name in now if was.get(name) != now[name]]
    if unlike:
        name = unlike[0]
        raise ConfigError(
            f"{trial.folder} holds a run with other settings: {name} was {_shown(was.get(name))} and is {_shown(now[name])}; "
            "choose another --output"
        )


def _values(word: str) -> tuple[str, list[Any]]:
    name, equals, text = word.partition("=")
    values: list[Any] = []
    if text.strip().startswith("["):
        values = parse_yaml(text, f"--vary {name}")
    elif text.strip():
        values = [Plain(value.strip()) for value in text.split(",")]
    if not equals or not values:
        raise ConfigError(f"--vary {word} has no values; write it as --vary optimizer.learning_rate=0.01,0.02")
    refuse_fixed([name], f"--vary {name}")
    return name, values


def _read_arms(file: Path) -> list[Arm]:
    try:
        tree = parse_yaml(file.read_text(encoding="utf-8-sig"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--arms {file} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8'}") from None
    if not isinstance(tree, dict) or not tree:
        raise ConfigError(f"--arms {file} holds no arms; write each as its name with its settings below, `plain: {{}}` for none")
    arms = []
    for name, settings in tree.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"--arms {file}: {name!r} is not a name for an arm; use letters, digits and . = , + -, not dots alone"
            )
        if not isinstance(settings, dict | None):
            raise ConfigError(f"--arms {file}: the arm {name} needs settings below it, such as `data.sampling: redraw`")
        refuse_fixed(_names(settings or {}), f"--arms {file}: {name}")
        arms.append(Arm(name, dict(settings or {})))
    return arms


def _names(tree: Mapping[str, Any]) -> Iterator[str]:
    for key, value in tree.items():
        yield from [f"{key}.{name}" for name in value] if isinstance(value, Mapping) and "." not in key else [key]


def refuse_fixed(names: Iterable[str], where: str) -> None:
    """Refuse settings that a sweep gives every run itself."""
    for name in names:
        if name in NOT_SET:
            raise ConfigError(f"{where}: {name} cannot be set here; {NOT_SET[name]}")


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, str) else format_value(value)
