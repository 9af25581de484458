"""Sweeps: train several arms (sets of settings), each with several seeds.

Arms are interleaved seed by seed, so that changes in the machine's speed affect all arms alike and an interrupted sweep has run
about equally many seeds of each arm.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import statistics
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from ingot.backends.open import preloadable
from ingot.config.loading import ResolvedConfig
from ingot.config.schema import Config
from ingot.config.text import Plain, format_value, parse_yaml
from ingot.data.loading.data_path import open_dataset
from ingot.errors import ConfigError, IngotError
from ingot.experiments.compare import BYTES, SEEDS, ScoreName, valid_score
from ingot.experiments.statistics import welch
from ingot.runs.view import Run
from ingot.runtime.files import readable, writing_output
from ingot.train.resume import completed_result, decisive_settings

NOT_SET = {
    **dict.fromkeys(SEEDS, "give --seeds instead"),
    "training.output_dir": "give --output instead",
    "training.resume": "a sweep always resumes its runs",
}
_NAME = re.compile(r"(?!\.+$)[\w.=,+-]+")  # valid names of arms, which are also folder names; not . or ..


Arms = dict[str, dict[str, Any]]  # maps the name of each arm to the settings that it changes


@dataclass(frozen=True)
class Trial:
    """One run of an arm, with one seed."""

    arm: str
    seed: int
    resolved: ResolvedConfig

    @property
    def config(self) -> Config:
        return self.resolved.config

    @property
    def folder(self) -> Path:
        return Path(str(self.config.training.output_dir))


def make_arms(vary: Sequence[str], file: Path | None = None) -> Arms:
    """Combine the arms of a YAML file, if given, with all combinations of values in --vary SETTING=VALUE,VALUE arguments."""
    if not vary and file is None:
        raise ConfigError("there is nothing to sweep: give --vary SETTING=VALUE,VALUE or --arms FILE")
    varied: dict[str, list[Any]] = {}
    for word in vary:
        name, _, text = word.partition("=")
        if name in varied:
            raise ConfigError(f"--vary {name} is given twice; give all its values at once")
        refuse_fixed([name], f"--vary {name}")
        is_list = text.strip().startswith("[")
        varied[name] = parse_yaml(text, f"--vary {name}") if is_list else [Plain(value.strip()) for value in text.split(",")]
        if not text.strip() or not varied[name]:
            raise ConfigError(f"--vary {word} has no values; give them as in --vary optimizer.learning_rate=0.01,0.02")
    short = Counter(name.rpartition(".")[2] for name in varied)
    named = _read_arms(file) if file is not None else {"": {}}
    arms: Arms = {}
    for (base, settings), *values in product(named.items(), *([(name, value) for value in varied[name]] for name in varied)):
        parts = [base] if base else []
        for name, value in values:
            last = name.rpartition(".")[2]
            parts.append(f"{last if short[last] == 1 else name}={_shown(value)}")
        arm = re.sub(r"[^\w.=,+-]+", "-", ",".join(parts))
        if arm in arms:
            raise ConfigError(f"two arms have the name {arm}; remove the duplicate value, or name the arms in --arms FILE")
        arms[arm] = {**settings, **dict(values)}
    return arms


def read_seeds(text: str) -> list[int]:
    """Parse a comma-separated list of seeds, such as 1,2,3."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ConfigError(f"--seeds {text} is not a list of numbers such as 1,2,3")
    seeds = [int(word) for word in words]
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {text} contains a seed twice; the two runs would be identical")
    return seeds


def plan_trials(
    arms: Arms,
    seeds: Sequence[int],
    output: Path,
    resolve: Callable[[Mapping[str, Any]], ResolvedConfig],
    score: ScoreName = "val_bpb",
) -> list[Trial]:
    """Return the runs of a sweep in training order, all validated; `resolve` builds a config from an arm's settings."""
    trials = []
    for seed, arm in product(seeds, arms):
        own: dict[str, Any] = dict.fromkeys(SEEDS, seed)
        own["training.output_dir"] = str(output / arm / f"seed-{seed}")
        try:
            trials.append(Trial(arm, seed, resolve({**arms[arm], **own})))
        except ConfigError as error:
            raise error.within(f"arm {arm}") from None
    for trial in trials:
        artifact, needed = trial.config.artifact, {"evaluation.at_end": trial.config.evaluation.at_end}
        if score == "artifact_bpb":
            needed = {"artifact.write": artifact.write, "artifact.score": artifact.score}
        if lacking := [name for name, value in needed.items() if not value]:
            raise ConfigError(
                f"arm {trial.arm} would have no {score} of its last step, because {lacking[0]} is false; set it to true"
            )
    check_one_text(trials[: len(arms)], score)
    for trial in trials:
        if (trial.folder / "config.yaml").is_file():  # a run with different settings must not be resumed
            was, now = decisive_settings(Run.open(trial.folder).config), decisive_settings(trial.config)
            for name in [name for name in now if was.get(name) != now[name]]:
                change = f"{name} was {_shown(was.get(name))} and is now {_shown(now[name])}"
                raise ConfigError(f"{trial.folder} holds a run with different settings: {change}; choose another --output")
    return trials


def check_one_text(trials: Sequence[Trial], score: ScoreName) -> None:
    """Raise an error if the scores of the arms would not be comparable; tokenizers may differ as long as the text is the same."""
    first: tuple[str, object, str, int | None, bool] | None = None
    for trial in trials:
        data, evaluation = trial.config.data, trial.config.evaluation
        try:
            dataset = open_dataset(data.path, data.tokenizer, data.trust_tokens, trial.config.suggested_tokenizer)
        except IngotError as error:
            raise error.within(f"arm {trial.arm}") from None
        val = dataset.split("val")
        text = (val.documents, val.bytes) if val.bytes else dataset.fingerprint
        size = val.piece_bytes if evaluation.bytes == "pieces" else val.bytes  # denominator of bits per byte
        judged = trial.arm, text, dataset.fingerprint, size, isinstance(evaluation.final_rows, int)
        arm, first_text, tokens, first_size, in_part = first = first or judged
        why = ""
        if text != first_text:
            why = "use different data, and scores on different validation texts are not comparable"
        elif score == "val_loss" and dataset.fingerprint != tokens:
            why = "have different tokens, so their val_loss is not comparable (their val_bpb is)"
        elif score != "val_loss" and size != first_size:
            why = f"count bytes in different ways ({BYTES}), so their {score} is not comparable"
        elif (judged[-1] or in_part) and dataset.fingerprint != tokens:
            why = "have different tokens, so the rows of evaluation.final_rows cover different texts"
        if why:
            raise ConfigError(f"the arms {arm} and {trial.arm} {why}; sweep them separately")


def _read_arms(file: Path) -> Arms:
    with readable(file, ConfigError):
        tree = parse_yaml(file.read_text(encoding="utf-8-sig"), str(file))
    if not isinstance(tree, dict) or not tree:
        raise ConfigError(f"--arms {file} defines no arms; write each as a name with settings below it, such as `plain: {{}}`")
    for name, settings in tree.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"--arms {file}: {name!r} is not a valid name of an arm; use letters, digits and . = , + - but not only dots"
            )
        if not isinstance(settings, dict | None):
            raise ConfigError(f"--arms {file}: the arm {name} needs settings below it, such as `data.sampling: redraw`")
        for key, value in (settings or {}).items():
            keys = [f"{key}.{part}" for part in value] if isinstance(value, Mapping) and "." not in key else [key]
            refuse_fixed(keys, f"--arms {file}: {name}")
    return {name: dict(settings or {}) for name, settings in tree.items()}


def refuse_fixed(names: Iterable[str], where: str) -> None:
    """Raise an error for settings that the sweep itself sets for every run."""
    for name in names:
        if name in NOT_SET:
            raise ConfigError(f"{where}: {name} cannot be set here; {NOT_SET[name]}")


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, str) else format_value(value)


# Running the trials sequentially, each in its own process that behaves like `ingot train`.

TICK_SECONDS = 1.0  # interval between calls of `tick`
PRELOADED = ("ingot.experiments.sweep", "ingot.preflight.validate", "ingot.train.start")
OUTPUT = "output-{}.txt"  # output file of a run's process; its name must not match seed-*, the names of run folders

EndTrial = Callable[[Trial, str | None], None]  # called with a finished trial and its error, if it failed


def run_trials(trials: Sequence[Trial], tick: Callable[[Trial], None], end_trial: EndTrial) -> dict[Path, str]:
    """Run all incomplete trials; return errors by run folder. `tick` is called every second while a trial runs."""
    errors = {}
    for trial in trials:
        if completed_result(trial.config, require_files=False) is not None:  # other files of the run may be missing
            continue
        tick(trial)
        if (error := train_apart(trial, tick)) is not None:
            errors[trial.folder] = error
        end_trial(trial, error)
    return errors


def train_apart(trial: Trial, tick: Callable[[Trial], None] = lambda trial: None) -> str | None:
    """Train in a separate process; return None or, if it failed, the reason, usually the last line that the process printed."""
    output = trial.folder.with_name(OUTPUT.format(trial.folder.name))
    with writing_output(output.parent):
        output.parent.mkdir(parents=True, exist_ok=True)
    process = _processes(trial.config.training.device).Process(
        target=_train, args=(trial.resolved, output), name=str(trial.folder)
    )
    process.start()
    try:
        while process.is_alive():
            wait([process.sentinel], timeout=TICK_SECONDS)
            tick(trial)
    except BaseException:
        process.terminate()  # SIGTERM: the run saves and stops
        process.join()
        raise
    process.join()
    if not process.exitcode:
        return None
    why = f"its process was killed by signal {-process.exitcode}"
    if process.exitcode > 0:
        words = output.read_text(errors="replace").strip() if output.exists() else ""
        why = words.rpartition("\n")[2].strip() or f"exit code {process.exitcode}"
    return f"{why}; its output is in {output}"


@cache
def _processes(device: str) -> Any:
    """Return the multiprocessing context; on Linux, it forks each run from a server process that has imported the framework."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([*PRELOADED, *preloadable(device)])
    return forks


def _train(resolved: ResolvedConfig, output: Path) -> None:
    """Train a run in this process; everything that the process and its children print is written to the file `output`."""
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        """Wait until the sweep's process ends, then make the run save and stop."""
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="sweep", daemon=True).start()
    from ingot.preflight.validate import check_before_training
    from ingot.runs.reporter import LineReporter
    from ingot.train.start import run

    say = partial(print, flush=True)
    try:
        run(resolved, LineReporter(say), dataset=check_before_training(resolved.config, 1, say))
    except IngotError as error:
        say(error)
        sys.exit(error.exit_code)


# Comparing the scores of every arm with those of the first arm; scores are read from the run folders.


@dataclass(frozen=True)
class TrialSummary:
    """The summary of a run; values that are not available yet are None."""

    run: str
    seed: int
    status: str  # status of the run, or "waiting" if it has not started
    score: float | None
    tokens_per_second: float | None
    training_seconds: float
    error: str | None = None


@dataclass(frozen=True)
class ArmSummary:
    """The summary of an arm; `difference` and `p` compare it with the first arm."""

    arm: str
    trials: tuple[TrialSummary, ...]
    n: int  # number of completed runs with a score
    mean: float | None
    std: float | None
    difference: float | None
    p: float | None
    best: bool = False


def summarise(trials: Sequence[Trial], score: ScoreName, errors: Mapping[Path, str] | None = None) -> list[ArmSummary]:
    """Return a summary of each arm, in the order of `trials`."""
    arms: dict[str, list[TrialSummary]] = {}
    for trial in trials:
        run, error = Run(trial.folder), (errors or {}).get(trial.folder)
        record = run.record()
        status, speed, seconds = record["status"], record["tokens_per_second"], record["elapsed_seconds"] or 0.0
        if status == "unreadable":  # no readable state.json yet
            status = "failed" if error else "waiting"
        else:
            error = error or record["error"]
        result = (run.result() or {}) if status == "completed" else {}
        speed = result.get("tokens_per_second") or speed
        row = TrialSummary(record["run"], trial.seed, status, valid_score(result.get(score)), speed, seconds, error)
        arms.setdefault(trial.arm, []).append(row)
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
