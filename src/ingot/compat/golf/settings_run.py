"""A finished run of `ingot train` with the frontier family, as a submission has it: its settings, scores, sizes and code.

The code is made here: `train_gpt.py` with that family inside and these settings as its own (bundle.py, BY_SETTINGS).
"""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ingot
from ingot.artifact.container import read_artifact
from ingot.compat.golf.bundle import BY_SETTINGS, bundle
from ingot.compat.golf.variables import LIMIT_BYTES
from ingot.config.fields import settings, value_of
from ingot.config.schema import Config
from ingot.errors import CheckpointError, ConfigError
from ingot.runs.checkpoints import read_index
from ingot.runtime.machine import NOT_INSTALLED, made_by
from ingot.train.resume import NOT_DECISIVE as NOT_COMPARED

FAMILY = "frontier"
SEED = "training.seed"
SOURCES = Path(ingot.__file__).parent
# What a submission leaves to whoever runs it.
OF_ONE_RUN = (*NOT_COMPARED, "data.path", "data.tokenizer", "data.seed", SEED, "training.device", "training.threads")


def packed_code(config: Config) -> bytes:
    """The `train_gpt.py` that trains and scores as a config says."""
    told = {name: here for name, (_, here) in changed(config).items() if name not in OF_ONE_RUN}
    return bundle(told, entry=BY_SETTINGS)


def changed(config: Config) -> dict[str, tuple[str, str]]:
    """The settings that are not the defaults, by name: the default and what a config has, as JSON."""
    found = {}
    for name, setting in settings(config.model.family).items():
        value = value_of(config, setting)
        if (value != setting.default or name == "model.family") and not name.startswith("tracking."):
            found[name] = (json.dumps(setting.default), json.dumps(value))
    return found


def facts_of(folder: Path, result: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    """What a submission says of a run and what is peculiar to this kind; whatever Python makes of other types is raised."""
    if result["checkpoint_path"] is None:
        raise CheckpointError(f"{folder} has no checkpoint of its last step, which says what was run; run it again and keep it")
    known = read_index(folder / result["checkpoint_path"])["progress"]
    config = Config.model_validate(known["config"])
    _check(folder, config, known, result)
    ran = [ran_these_sources(folder, session) for session in (environment, *environment.get("earlier", []))]
    artifact = folder / result["artifact_path"]
    differ = changed(config)
    rows = f"{result['val_rows']:,} rows of {config.data.seq_len:,} tokens"
    return {
        "maker": made_by(),
        "values": {name: here for name, (_, here) in differ.items()} | {SEED: str(config.training.seed)},
        "changed": {name: both for name, both in differ.items() if name not in OF_ONE_RUN},
        "places": (Path(config.data.path).name, Path(config.data.tokenizer).name if config.data.tokenizer else None),
        "seed": config.training.seed,
        "limit": LIMIT_BYTES,
        "file": artifact.name,
        "artifact": artifact.read_bytes(),
        "code": packed_code(config),
        "code_ran": all(ran),
        # Both are sums over the same targets, so they are as far apart for the artifact as for the run.
        "val_loss": result["artifact_bpb"] * result["val_loss"] / result["val_bpb"],
        "parameters": sum(math.prod(one.shape) for one in read_artifact(artifact).tensors.values()),
        "ranks": known["choices"]["world_size"],
        "device": known["choices"]["device"],
        "data": (Path(config.data.path).name, f"fingerprint {known['data_fingerprint'][:12]}", rows, f"validation: {rows}"),
    }


def _check(folder: Path, config: Config, known: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """Refuse runs that cannot be packed, or whose score is not one."""
    if config.model.family != FAMILY:
        raise CheckpointError(
            f"{folder} is not a run of train_gpt.py, nor one of ingot train with model.family={FAMILY}; give folders of such runs"
        )
    if (known["tokenizer"] or {}).get("kind") != "sentencepiece":
        raise ConfigError(f"{folder} was trained with another tokenizer than a SentencePiece model, which golf asks for")
    if result["artifact_bpb"] is None:
        raise CheckpointError(f"{folder} has no score of its artifact; run it with artifact.score=true")
    if result["artifact_rows"] is not None or result["val_rows"] != result["val_rows_of"]:
        raise CheckpointError(f"{folder} was scored by a part of the validation split; run it with evaluation.final_rows=null")
    if config.stride != config.data.seq_len:
        raise CheckpointError(f"{folder} was scored by sliding windows; run it with evaluation.stride=null")


def ran_these_sources(folder: Path, session: Mapping[str, Any], sources: Path = SOURCES) -> bool:
    """Whether a session of a run is known to have had the sources that are packed; CheckpointError where it had others.

    Its commit is that of the folder it was started in, so it says something only where the sources' repository knows it.
    """
    here, commit = made_by(), session.get("git_commit") or ""
    version = session.get("made_by", NOT_INSTALLED).partition(",")[0]  # a submission's own file adds ", one file"
    versions_known = NOT_INSTALLED not in (version, here)
    if versions_known and version != here:
        raise CheckpointError(f"{folder} was run by {version} and this is {here}, whose code did not run; pack it with {version}")
    if not re.fullmatch("[0-9a-f]{40,64}", commit):
        return versions_known
    differ, _ = _git(sources, "diff", "--quiet", commit, "HEAD", "--", ".")
    if differ == 1:
        _, now = _git(sources, "rev-parse", "HEAD")
        raise CheckpointError(
            f"{folder} was run by the sources of commit {commit[:12]} and those of commit {now[:12]} are here, which differ; "
            f"check out {commit[:12]} to pack it"
        )
    return versions_known or differ == 0


def _git(folder: Path, *command: str) -> tuple[int | None, str]:
    """The exit code of a command and what it printed; None where there is no git."""
    try:
        ended = subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True, timeout=9, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None, ""
    return ended.returncode, ended.stdout.strip()
