"""A finished golf run as its folder tells it: settings, scores, sizes, its log, its code and its artifact."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ingot.compat.golf import settings_run
from ingot.compat.golf.variables import CODE, LOG, PACKED, as_text, differing, read_variables
from ingot.errors import CheckpointError
from ingot.runs.state import RESULT
from ingot.runs.view import Run
from ingot.runtime.files import readable


@dataclass(frozen=True)
class FinishedRun:
    """What is known of a run that reached its end."""

    path: Path  # the run folder
    log: str
    ended: float  # seconds since the epoch
    maker: str
    values: dict[str, Any]  # of every variable, or of every setting that is not the default
    changed: dict[str, tuple[str, str]]  # what makes it another than the baseline: the baseline's value and its own
    places: tuple[str, str | None]  # what its data and its tokenizer are called
    seed: int  # what the runs of a submission differ by
    limit: int  # of artifact and code in bytes; 0: none
    file: str  # what the artifact is called
    artifact: bytes
    code: bytes
    code_ran: bool  # whether it is known to be what ran, and not of another version
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
        """What the limit is about: the artifact and the code."""
        return len(self.artifact) + len(self.code)


def read_run(path: Path) -> FinishedRun:
    """The finished run of a run folder, logs/RUN_ID, or of a log, logs/RUN_ID.txt, whose last run it is."""
    folder = _folder_of(path)
    try:
        run = _finished(folder, _result(Run.open(folder)))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        what = f"{folder / RESULT} or environment.json is not as train_gpt.py writes it ({type(error).__name__}: {error})"
        raise CheckpointError(f"{what}; copy the run again or run it again with another RUN_ID") from None
    if not math.isfinite(run.val_bpb):
        raise CheckpointError(f"{folder} scored {run.val_bpb} bits per byte, which is not a score")
    return run


def _finished(folder: Path, result: dict[str, Any]) -> FinishedRun:
    """What a folder and its result.json say; whatever Python makes of other types is raised."""
    from pydantic import TypeAdapter

    environment, export = json.loads(_read(folder / "environment.json")), result["export"]
    by_script = "variables" in export
    facts = _script_facts(folder, export) if by_script else settings_run.facts_of(folder, result, environment)
    milliseconds = 1000 * result["training_seconds"]
    known = {
        **facts,
        "path": folder,
        "log": _read(folder / (LOG if by_script else "log.txt")).decode("utf-8", "replace"),
        "ended": datetime.fromisoformat(result["ended_at"]).timestamp(),
        "val_loss": _score(facts["val_loss"]),
        "val_bpb": _score(result["artifact_bpb"]),
        "steps": result["total_steps"],
        "train_ms": round(milliseconds),
        "step_ms": round(milliseconds / max(result["total_steps"], 1), 2),
        "torch": environment["packages"]["torch"],
        "python": environment["python"],
    }
    run = TypeAdapter(FinishedRun).validate_python(known)
    code_bytes = export.get("code_bytes", len(run.code))
    for what, content, told in (("artifact", run.artifact, result["artifact_bytes"]), ("code", run.code, code_bytes)):
        if len(content) != told:
            raise CheckpointError(
                f"the {what} in {folder} has {len(content):,} bytes and its result.json says {told:,}; it is not the run's"
            )
    return run


def _script_facts(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """What a submission says of a run of train_gpt.py and what is peculiar to it."""
    values, baseline = read_variables(facts["variables"]), read_variables({})
    return {
        "maker": facts["made_by"],
        "values": values,
        "changed": {name: (as_text(baseline[name]), here) for name, here in differing(values).items()},
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


def _folder_of(path: Path) -> Path:
    """The run folder of what was given; a log may tell of several runs, of which the last has the highest number."""
    if path.is_dir():
        return path
    if not path.is_file():
        raise CheckpointError(f"there is no run {path}; give run folders, logs/RUN_ID, or logs, logs/RUN_ID.txt")
    name = re.compile(rf"{re.escape(path.stem)}(?:-(\d+))?")
    found = {int(match[1] or 1): one for one in path.parent.iterdir() if one.is_dir() and (match := name.fullmatch(one.name))}
    if not found:
        raise CheckpointError(
            f"{path} is not a log of train_gpt.py with its run folder {path.stem} beside it; give the run folder"
        )
    return found[max(found)]


def _result(run: Run) -> dict[str, Any]:
    result, status = run.result(), run.status().status
    if result is None and status == "completed":
        raise CheckpointError(
            f"{run.path} has no result.json: an earlier Ingot made it; pack it with that one, or run it again with another RUN_ID"
        )
    if result is None or result["status"] != "completed" or status != "completed":
        raise CheckpointError(
            f"{run.path} is not finished: it is {status}; the command it was started with goes on, with RUN_ID={run.path.name}"
        )
    return result


def _score(value: float | None) -> float:
    """A score with the digits that the log has; one that was not finite is none in JSON."""
    return math.nan if value is None else round(value, 8)


def _read(path: Path) -> bytes:
    with readable(path, CheckpointError):
        if not path.exists():
            raise CheckpointError(f"{path} is missing; a run that train_gpt.py finished has it")
        return path.read_bytes()
