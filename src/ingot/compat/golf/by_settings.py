"""The `train_gpt.py` of a submission made from `ingot train` runs: it trains or scores a model of the frontier family.

It reads the challenge's environment variables for data, seed, time limit and the file to score. Everything else is an Ingot
setting, given by the same environment variable as for `ingot train`, such as INGOT_MODEL__LAYERS=9.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ingot.compat.golf.variables import CODE, run_folder
from ingot.config.loading import load_config
from ingot.console.entry import explained, process_start, say
from ingot.errors import CheckpointError, ConfigError, DataError, RunError, Setting
from ingot.inference.model import find_tokenizer, open_model, open_weights
from ingot.runs.reporter import LineReporter
from ingot.runtime.files import user_path
from ingot.runtime.ranks import ranks_from_environment
from ingot.runtime.signals import listening_early
from ingot.train.end import export_artifact
from ingot.train.start import run

SCORED = "EVAL_ONLY_PATH"
VARIABLES = {
    "DATA_PATH": ("data.path",),
    "TOKENIZER_PATH": ("data.tokenizer",),
    "SEED": ("training.seed", "data.seed"),
    "MAX_WALLCLOCK_SECONDS": ("budget.seconds",),
}
VARIABLE_OF = {setting: name for name, settings in VARIABLES.items() for setting in settings} | {"training.output_dir": "RUN_ID"}


def main(arguments: Sequence[str] = ()) -> int:
    """Train as environment variables specify or, if EVAL_ONLY_PATH names a file, only score that file; return the exit code."""
    with explained(CODE, lambda setting: VARIABLE_OF.get(setting, setting)) as outcome, listening_early():
        if arguments:
            names = ", ".join([*VARIABLES, "RUN_ID", SCORED])
            raise ConfigError(
                f"{CODE} takes no arguments; set variables before the command: {names}, or any Ingot setting, as in "
                f"INGOT_TRAINING__MAX_STEPS=100 python {CODE}"
            )
        settings, artifact, run_id = settings_in(os.environ), os.environ.get(SCORED), os.environ.get("RUN_ID")
        if run_id and not artifact:
            settings["training.output_dir"] = str(run_folder(Path("logs"), run_id, ranks_from_environment().first))
        resolved = load_config(python=settings, environment={})

        def score(path: Path, *_: object) -> dict[str, float]:
            """Score an artifact and print the result; data and device come from the environment, all else from the artifact.

            Scoring runs in this process, not in a new one as in `ingot train`, because that needs Ingot to be installed.
            """
            here = resolved.config
            if not path.is_file():
                raise CheckpointError(f"there is no artifact {path}")
            weights = open_weights(path)
            own = {name: getattr(here.data, name) for name in ("path", "tokenizer", "trust_tokens")}
            data = weights.config.data.model_copy(update=own)
            weights = replace(weights, config=weights.config.model_copy(update={"data": data}))
            scored = open_model(weights, find_tokenizer(weights, here.data.tokenizer), here.training.device).evaluate()
            say(f"final_roundtrip val_loss:{scored.loss:.4f} val_bpb:{scored.bits_per_byte:.4f}")
            say(f"final_roundtrip_exact val_loss:{scored.loss:.8f} val_bpb:{scored.bits_per_byte:.8f}")
            if not math.isfinite(scored.loss):
                raise RunError(f"the loss is {scored.loss}: the weights are not finite, so the score is invalid")
            return {"val_bpb": scored.bits_per_byte}

        if artifact:
            score(Path(artifact))
        else:
            run(resolved, LineReporter(say), partial(export_artifact, score=score), began=process_start())
    return outcome.code


def settings_in(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings given in environment variables, by dotted path; values are JSON, since parsing YAML needs PyYAML."""
    settings: dict[str, Any] = {}
    for name, text in environment.items():
        if name.startswith("INGOT_") and "__" in name:
            path = name.removeprefix("INGOT_").lower().replace("__", ".")
            try:
                settings[path] = json.loads(text)
            except ValueError:
                settings[path] = text
    for variable, names in VARIABLES.items():
        if variable in environment:
            settings |= dict.fromkeys(names, environment[variable])
    with suppress(KeyError, ValueError):  # load_config will reject text that is not a number
        if float(environment["MAX_WALLCLOCK_SECONDS"]) <= 0:
            settings["budget.seconds"] = None
    if not user_path(folder := settings.get("data.path", "")).exists():
        raise DataError(f"there is no folder {folder}; set {{0}}", Setting("data.path"))
    return settings
