"""result.json: what the last session of a run came to, written when it ends; a session that died leaves none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ingot.runs.state import Status, is_of, utc_now
from ingot.runtime.files import read_dict

NAME = "result.json"


@dataclass(frozen=True)
class TrainingResult:
    """What a session of a run came to."""

    status: Status
    final_loss: float | None  # nats per token, of the last step
    val_loss: float | None
    val_bpb: float | None  # bits per byte of the validation text
    val_other: dict[str, float]  # the same by the other count of bytes, where there are two
    val_rows: int  # by which these were found
    val_rows_of: int  # of the rows of the validation split
    total_tokens: int
    total_steps: int
    training_seconds: float
    tokens_per_second: float
    checkpoint_path: Path | None
    artifact_path: Path | None
    artifact_bytes: int | None
    artifact_bpb: float | None  # of the artifact, read again by another process
    artifact_rows: int | None  # by which that was found; None: by all
    sample: str | None
    run_dir: Path
    stop_reason: str | None = None  # signal:NAME, walltime, stop_file, data, bucket_exhausted:NAME; None: its steps are done
    data_fingerprint: str | None = None  # of what it was trained and scored on
    val_stride: int | None = None  # of a sliding score: tokens from one row to the next; None: rows did not overlap
    val_step: int | None = None  # at which the validation score was found; not the last one where evaluation.at_end is off
    peak_memory_bytes: int | None = None  # of the first rank: the GPU's, or of the process where there is none


def as_record(result: TrainingResult, session: int, export: Mapping[str, Any]) -> dict[str, Any]:
    """What result.json says: the result, with paths from the run folder on, and what the exporter found worth telling."""
    told = {name: _from(result.run_dir, value) for name, value in asdict(result).items() if name != "run_dir"}
    return {"session": session, "ended_at": utc_now(), **told, "export": dict(export)}


def read_result(folder: Path) -> dict[str, Any] | None:
    """What result.json says; None where there is none or a damaged one."""
    return read_dict(folder / NAME)


def result_of(folder: Path) -> TrainingResult | None:
    """The result that result.json tells, with its paths from here on; None where there is none or one of another version."""
    record = read_result(folder) or {}
    told = {one.name: record[one.name] for one in fields(TrainingResult) if one.name in record}
    if not all(is_of(told[one.name], str(one.type)) for one in fields(TrainingResult) if one.name in told):
        return None
    for name in ("checkpoint_path", "artifact_path"):
        told[name] = folder / told[name] if told.get(name) else None
    try:
        return TrainingResult(**told, run_dir=folder)
    except TypeError:
        return None


def _from(folder: Path, value: Any) -> Any:
    if not isinstance(value, Path):
        return value
    return str(value.relative_to(folder) if value.is_relative_to(folder) else value)
