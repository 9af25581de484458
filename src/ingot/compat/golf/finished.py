"""A finished run as a submission needs it: settings, scores, sizes, its log, its code and its artifact.

A run of train_gpt.py has all of it in its folder. For a run of `ingot train` with the frontier family, the code is made here:
`train_gpt.py` with these settings as its own (bundle.py, BY_SETTINGS).
"""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

import ingot
from ingot.artifact.container import read_artifact
from ingot.compat.golf.bundle import BY_SETTINGS, bundle
from ingot.compat.golf.variables import CODE, LIMIT_BYTES, LOCAL, LOG, PACKED, as_text, differing, read_variables
from ingot.config.fields import settings, value_of
from ingot.config.schema import Config
from ingot.errors import CheckpointError, ConfigError
from ingot.runs.checkpoints import read_index
from ingot.runs.state import RESULT
from ingot.runs.view import Run
from ingot.runtime.files import readable
from ingot.runtime.machine import NOT_INSTALLED, made_by
from ingot.train.resume import NOT_DECISIVE

FAMILY = "frontier"
SEED = "training.seed"
SOURCES = Path(ingot.__file__).parent
# Variables and settings that a submission leaves to whoever runs it.
LOCAL_SETTINGS = (*NOT_DECISIVE, "data.path", "data.tokenizer", "data.seed", SEED, "training.device", "training.threads")
OF_ONE_RUN = {*LOCAL, *LOCAL_SETTINGS}


@dataclass(frozen=True)
class FinishedRun:
    """A run that reached its end."""

    path: Path  # the run folder
    log: str
    ended: float  # unix time
    maker: str
    values: dict[str, Any]  # of every variable, or of every setting that is not the default
    changed: dict[str, tuple[str, str]]  # differences from the baseline: the baseline's value and this run's
    places: tuple[str, str | None]  # names of its data folder and its tokenizer
    seed: int  # in which the runs of a submission differ
    limit: int  # bytes of artifact and code; 0: none
    file: str  # name of the artifact
    artifact: bytes
    code: bytes
    code_ran: bool  # whether the code is known to be of the version that ran
    val_loss: float
    val_bpb: float
    steps: int
    train_ms: int
    step_ms: float
    parameters: int
    ranks: int
    data: tuple[str, ...]
    device: str
    torch: str
    python: str

    @property
    def by_settings(self) -> bool:
        """Whether `ingot train` made it, and not train_gpt.py."""
        return self.file != PACKED.name

    @property
    def total_bytes(self) -> int:
        """The size that the limit is about: artifact and code."""
        return len(self.artifact) + len(self.code)


def read_run(path: Path) -> FinishedRun:
    """Return the finished run of a run folder, logs/RUN_ID, or the last one of a log, logs/RUN_ID.txt."""
    folder = _folder_of(path)
    try:
        run = _read_finished(folder, _result(Run.open(folder)))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        what = f"{folder / RESULT} or environment.json is not as train_gpt.py writes it ({type(error).__name__}: {error})"
        raise CheckpointError(f"{what}; copy the run again or run it again with another RUN_ID") from None
    if not math.isfinite(run.val_bpb):
        raise CheckpointError(f"{folder} scored {run.val_bpb} bits per byte, which is not a score")
    return run


def _folder_of(path: Path) -> Path:
    """Return the run folder of an argument; a log may hold several runs, of which the last has the highest number."""
    if path.is_dir():
        return path
    if not path.is_file():
        raise CheckpointError(f"there is no run {path}; give run folders, logs/RUN_ID, or logs, logs/RUN_ID.txt")
    name = re.compile(rf"{re.escape(path.stem)}(?:-(\d+))?")
    folders = {int(match[1] or 1): one for one in path.parent.iterdir() if one.is_dir() and (match := name.fullmatch(one.name))}
    if not folders:
        raise CheckpointError(
            f"{path} is not a log of train_gpt.py with its run folder {path.stem} beside it; give the run folder"
        )
    return folders[max(folders)]


def _result(run: Run) -> dict[str, Any]:
    result, status = run.result(), run.status().status
    if result is None and status == "completed":
        raise CheckpointError(
            f"{run.path} has no result.json: an earlier Ingot made it; pack it with that one, or run it again with another RUN_ID"
        )
    if result is None or result["status"] != "completed" or status != "completed":
        raise CheckpointError(
            f"{run.path} is not finished: it is {status}; the command that started it resumes it, with RUN_ID={run.path.name}"
        )
    return result


def _read_finished(folder: Path, result: dict[str, Any]) -> FinishedRun:
    """Read a folder and its result.json; whatever Python raises for other types is an error of the file."""
    environment, export = json.loads(_read(folder / "environment.json")), result["export"]
    by_script = "variables" in export
    facts = _script_facts(folder, export) if by_script else _settings_facts(folder, result, environment)
    milliseconds = 1000 * result["training_seconds"]
    bpb = result["artifact_bpb"]
    everything = {
        **facts,
        "path": folder,
        "log": _read(folder / (LOG if by_script else "log.txt")).decode("utf-8", "replace"),
        "ended": datetime.fromisoformat(result["ended_at"]).timestamp(),
        "val_loss": round(facts["val_loss"], 8) if facts["val_loss"] is not None else math.nan,  # the digits of the log
        "val_bpb": round(bpb, 8) if bpb is not None else math.nan,  # JSON has no numbers that are not finite
        "steps": result["total_steps"],
        "train_ms": round(milliseconds),
        "step_ms": round(milliseconds / max(result["total_steps"], 1), 2),
        "torch": environment["packages"]["torch"],
        "python": environment["python"],
    }
    run = TypeAdapter(FinishedRun).validate_python(everything)
    code_bytes = export.get("code_bytes", len(run.code))
    for what, content, expected in (("artifact", run.artifact, result["artifact_bytes"]), ("code", run.code, code_bytes)):
        if len(content) != expected:
            raise CheckpointError(
                f"the {what} in {folder} has {len(content):,} bytes and its result.json says {expected:,}; it is not the run's"
            )
    return run


def _read(path: Path) -> bytes:
    with readable(path, CheckpointError):
        if not path.exists():
            raise CheckpointError(f"{path} is missing; a run that train_gpt.py finished has it")
        return path.read_bytes()


def _script_facts(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Return what only a run of train_gpt.py has."""
    values, baseline = read_variables(facts["variables"]), read_variables({})
    return {
        "maker": facts["made_by"],
        "values": values,
        "changed": {name: (as_text(baseline[name]), value) for name, value in differing(values).items()},
        "places": (Path(values["DATA_PATH"]).name, Path(values["TOKENIZER_PATH"]).name),
        "seed": values["SEED"],
        "limit": values["ARTIFACT_LIMIT_BYTES"],
        "file": PACKED.name,
        "artifact": _read(folder / "artifact" / PACKED),
        "code": _read(folder / CODE),
        "code_ran": True,
        "val_loss": facts["val_loss"],
        "parameters": facts["parameters"],
        "ranks": facts["ranks"],
        "data": (
            facts["dataset"],
            f"{facts['train_shards']} training shards",
            f"{facts['scored_tokens']} tokens scored",
            facts["validation"],
        ),
        "device": facts["device"],
    }


# Runs of `ingot train`.


def packed_code(config: Config) -> bytes:
    """Return the `train_gpt.py` that trains and scores as a config says."""
    return bundle({name: value for name, (_, value) in changed(config).items() if name not in OF_ONE_RUN}, entry=BY_SETTINGS)


def changed(config: Config) -> dict[str, tuple[str, str]]:
    """Return the settings that are not the defaults: the default and the value of a config, as JSON."""
    values = {name: (setting.default, value_of(config, setting)) for name, setting in settings(config.model.family).items()}
    return {
        name: (json.dumps(default), json.dumps(value))
        for name, (default, value) in values.items()
        if (value != default or name == "model.family") and not name.startswith("tracking.")
    }


def _settings_facts(folder: Path, result: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return what only a run of `ingot train` has; refuse runs that cannot be packed, or whose score is not one."""
    if result["checkpoint_path"] is None:
        raise CheckpointError(f"{folder} has no checkpoint of its last step, which says what was run; run it again and keep it")
    progress = read_index(folder / result["checkpoint_path"])["progress"]
    config = Config.model_validate(progress["config"])
    if config.model.family != FAMILY:
        raise CheckpointError(
            f"{folder} is neither a run of train_gpt.py nor one of ingot train with model.family={FAMILY}; give such folders"
        )
    if (progress["tokenizer"] or {}).get("kind") != "sentencepiece":
        raise ConfigError(f"{folder} was not trained with a SentencePiece tokenizer, which golf requires")
    if result["artifact_bpb"] is None:
        raise CheckpointError(f"{folder} has no score of its artifact; run it with artifact.score=true")
    if result["artifact_rows"] is not None or result["val_rows"] != result["val_rows_of"]:
        raise CheckpointError(f"{folder} was scored on a part of the validation split; run it with evaluation.final_rows=null")
    if config.stride != config.data.seq_len:
        raise CheckpointError(f"{folder} was scored with sliding windows; run it with evaluation.stride=null")
    ran = [ran_these_sources(folder, session) for session in (environment, *environment.get("earlier", []))]
    artifact, differences = folder / result["artifact_path"], changed(config)
    rows = f"{result['val_rows']:,} rows of {config.data.seq_len:,} tokens"
    return {
        "maker": made_by(),
        "values": {name: value for name, (_, value) in differences.items()} | {SEED: str(config.training.seed)},
        "changed": {name: both for name, both in differences.items() if name not in OF_ONE_RUN},
        "places": (Path(config.data.path).name, Path(config.data.tokenizer).name if config.data.tokenizer else None),
        "seed": config.training.seed,
        "limit": LIMIT_BYTES,
        "file": artifact.name,
        "artifact": artifact.read_bytes(),
        "code": packed_code(config),
        "code_ran": all(ran),
        # Loss and bits per byte are sums over the same targets, so their ratio is the same for the artifact and for the run.
        "val_loss": result["artifact_bpb"] * result["val_loss"] / result["val_bpb"],
        "parameters": sum(math.prod(one.shape) for one in read_artifact(artifact).tensors.values()),
        "ranks": progress["choices"]["world_size"],
        "device": progress["choices"]["device"],
        "data": (Path(config.data.path).name, f"fingerprint {progress['data_fingerprint'][:12]}", rows, f"validation: {rows}"),
    }


def ran_these_sources(folder: Path, session: Mapping[str, Any], sources: Path = SOURCES) -> bool:
    """Return True if a session of a run is known to have run the sources that are packed; refuse if it ran others.

    Its commit is that of the folder it was started in, so it says something only if the sources' repository knows it.
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
            f"{folder} was run by the sources of commit {commit[:12]}, which differ from those here, of commit {now[:12]}; "
            f"check out {commit[:12]} to pack it"
        )
    return versions_known or differ == 0


def _git(folder: Path, *command: str) -> tuple[int | None, str]:
    """Return the exit code and the output of a git command; None where there is no git."""
    try:
        ended = subprocess.run(["git", *command], cwd=folder, capture_output=True, text=True, timeout=9, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None, ""
    return ended.returncode, ended.stdout.strip()
