"""`python train_gpt.py` of a submission whose runs `ingot train` made: the frontier family, driven by environment variables.

Every setting is a variable of its own name (`env model.layers=9 python train_gpt.py`) whose value is JSON or plain text. Of the
challenge's variables it has those that are not about the model: data, seed, seconds, and the file to score.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ingot.artifact.container import read_artifact
from ingot.backends.open import open_inference
from ingot.compat.golf.variables import CODE, LIMIT_BYTES, run_folder
from ingot.config.loading import load_config
from ingot.config.schema import Config
from ingot.console.entry import explained, process_start, say
from ingot.data.formats.shard_folder import shard_files
from ingot.data.loading.data_path import open_dataset
from ingot.data.store.dataset import MANIFEST
from ingot.errors import CheckpointError, ConfigError, DataError, RunError, Setting
from ingot.eval.evaluator import Score, evaluator_of
from ingot.runs.reporter import LineReporter
from ingot.runtime.files import user_path
from ingot.runtime.ranks import ranks_from_environment, without_ranks
from ingot.runtime.signals import listening_early
from ingot.train.end import export_artifact
from ingot.train.start import run

SCORED = "EVAL_ONLY_PATH"
ROUND_TRIP = "final_roundtrip"  # what the log calls the score of the artifact
POLL_SECONDS = 0.25  # between two checks whether scoring must stop
VARIABLES = {
    "DATA_PATH": ("data.path",),
    "TOKENIZER_PATH": ("data.tokenizer",),
    "SEED": ("training.seed", "data.seed"),
    "MAX_WALLCLOCK_SECONDS": ("budget.seconds",),
}
VARIABLE_OF = {setting: name for name, settings in VARIABLES.items() for setting in settings} | {"training.output_dir": "RUN_ID"}


def main(arguments: Sequence[str] = ()) -> int:
    """Train, or score the file of EVAL_ONLY_PATH, as the environment says."""
    with explained(CODE, _variable) as outcome, listening_early():
        if arguments:
            names = ", ".join([*VARIABLES, "RUN_ID", SCORED])
            raise ConfigError(
                f"{CODE} takes no arguments; settings are variables before the command: {names}, and every setting of ingot by "
                f"its name, as in env training.max_steps=100 python {CODE}"
            )
        outcome.code = _score(os.environ) if os.environ.get(SCORED) else _train(os.environ)
    return outcome.code


def settings_in(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that an environment sets, by their dotted names."""
    settings: dict[str, Any] = {}
    for name, text in environment.items():
        section, dot, _ = name.partition(".")
        if dot and section in Config.model_fields:
            try:
                settings[name] = json.loads(text)
            except ValueError:
                settings[name] = text
    for variable, names in VARIABLES.items():
        if variable in environment:
            settings |= dict.fromkeys(names, environment[variable])
    with suppress(KeyError, ValueError):  # text that is not a number is refused by load_config
        if float(environment["MAX_WALLCLOCK_SECONDS"]) <= 0:
            settings["budget.seconds"] = None
    return settings


def _variable(setting: str) -> str:
    """Return the variable that sets a setting here, unless the setting itself is in the environment."""
    variable = VARIABLE_OF.get(setting, setting)
    return setting if setting in os.environ and variable not in os.environ else variable


def _train(environment: Mapping[str, str]) -> int:
    """Train and print the size of artifact and code; return 1 if they exceed the limit."""
    settings, ranks = settings_in(environment), ranks_from_environment(environment)
    if environment.get("RUN_ID"):
        settings["training.output_dir"] = str(run_folder(Path("logs"), environment["RUN_ID"], ranks.first))
    if settings.get("budget.seconds", 1) is None and settings.get("training.max_steps") is None:
        raise ConfigError("MAX_WALLCLOCK_SECONDS=0 is no cap, and nothing else ends this run; set training.max_steps too")
    resolved = load_config(python=settings, environment={})
    _check_data(resolved.config)
    exporter = partial(export_artifact, score=_score_by_this_file)
    result = run(resolved, LineReporter(say), exporter, began=process_start())
    if result.status != "completed" or result.artifact_bytes is None or not ranks.first:
        return 0
    code = Path(sys.argv[0]).stat().st_size
    total = result.artifact_bytes + code
    say(f"Code size: {code} bytes")
    say(f"Total submission size: {total} bytes, {result.artifact_path}")
    if result.artifact_bpb is not None:
        say(f"{ROUND_TRIP}_bpb val_bpb:{result.artifact_bpb:.8f}")
    if total > LIMIT_BYTES:
        say(f"error: {total} bytes are {total - LIMIT_BYTES} more than {LIMIT_BYTES}; lower budget.artifact_bytes")
    return int(total > LIMIT_BYTES)


def _score(environment: Mapping[str, str]) -> int:
    score = score_artifact(Path(environment[SCORED]), settings_in(environment))
    say(f"{ROUND_TRIP} val_loss:{score.loss:.4f} val_bpb:{score.bits_per_byte:.4f}")
    say(f"{ROUND_TRIP}_exact val_loss:{score.loss:.8f} val_bpb:{score.bits_per_byte:.8f}")
    if not math.isfinite(score.loss):
        raise RunError(f"the loss is {score.loss}: the weights are not finite, so this is not a score")
    return 0


def score_artifact(path: Path, settings: Mapping[str, Any]) -> Score:
    """Return the score of a file, which says how its model is built and scored; the settings say where the data is."""
    artifact = read_artifact(path)
    tree = artifact.facts.get("config")
    if not isinstance(tree, dict) or not all(isinstance(section, dict) for section in tree.values()):
        raise CheckpointError(f"{path} does not say how to build its model")
    known = {f"{section}.{name}": value for section, values in tree.items() for name, value in values.items()}
    local = ("data.path", "data.tokenizer", "data.trust_tokens", "training.device")
    config = load_config(python=known | {name: settings[name] for name in local if name in settings}, environment={}).config
    _check_data(config)
    dataset = open_dataset(config.data.path, config.data.tokenizer, config.data.trust_tokens)
    backend = open_inference(config, dataset.tokenizer.vocab_size)
    backend.load_weights(artifact.tensors, str(path))
    evaluator, rows = evaluator_of(config, dataset, "val"), config.evaluation.final_rows
    return evaluator.score(evaluator.rows(rows if isinstance(rows, int) else None), backend.score)


def _check_data(config: Config) -> None:
    """Refuse a folder that holds neither prepared data nor validation shards."""
    folder = user_path(config.data.path)
    if not (folder / MANIFEST).is_file() and not shard_files(folder, "val"):
        raise DataError(f"no files found for {folder / 'fineweb_val_*.bin'}; set {{0}}", Setting("data.path"))


def _score_by_this_file(
    path: Path, data: None, device: str, rows: None, progress: Any, stop: Callable[[], bool]
) -> dict[str, float]:
    """Return the score of an artifact that another process of this file reads: there is no `ingot eval` without Ingot."""
    environment = {**without_ranks(os.environ), SCORED: str(path), "training.device": device}
    with subprocess.Popen([sys.executable, sys.argv[0]], env=environment, stdout=subprocess.PIPE, text=True) as child:
        while child.poll() is None:
            if stop():
                child.kill()
            with suppress(subprocess.TimeoutExpired):
                child.wait(POLL_SECONDS)
        assert child.stdout is not None
        scores = re.search(r"_exact val_loss:(\S+) val_bpb:(\S+)", child.stdout.read())
    if scores is None or child.returncode:
        raise RunError(f"{path} was written but not scored: the process that read it ended with code {child.returncode}")
    return {"val_loss": float(scores[1]), "val_bpb": float(scores[2])}
