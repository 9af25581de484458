"""The end of a run: the last evaluation, the artifact, its score by another process, and what it all came to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ingot.artifact.container import ArtifactReport, artifact_name, write_artifact
from ingot.artifact.fresh_process import SCORING, score_in_fresh_process
from ingot.errors import RunError
from ingot.runs.folder import RunFolder
from ingot.runs.result import TrainingResult
from ingot.runs.state import Status
from ingot.runs.steps import saved_steps
from ingot.runtime.files import writing
from ingot.runtime.tensors import TensorRecord
from ingot.train.progress import Interrupted
from ingot.train.stopping import Shutdown, reason_name
from ingot.train.trainer import Trainer


@dataclass(frozen=True)
class Exported:
    """What was written for others, and the bits per byte of the file, read again."""

    path: Path
    bytes: int
    bpb: float | None
    rows: int | None = None  # by which it was found; None: by all
    facts: dict[str, Any] = field(default_factory=dict)  # what else result.json tells of it


Exporter = Callable[[Trainer, Shutdown], Exported | None]  # called on every rank of a run that is complete


def finish(trainer: Trainer, status: Status, shutdown: Shutdown, exporter: Exporter) -> TrainingResult:
    """Judge and export a completed run, and say how it went."""
    config, progress, outputs = trainer.config, trainer.progress, trainer.outputs
    exported = None
    if status == "completed":
        try:
            if config.evaluation.at_end and not trainer.is_judged() and trainer.dataset.split("val").tokens > 1:
                trainer.evaluate(trainer.bounds.final_limit, final=True)
                trainer.note()
            if config.artifact.write:
                exported = exporter(trainer, shutdown)
        except Interrupted:
            status = "stopped"  # what is left can be done by the next session
    # Agreed upon once more: the end of an evaluation knows only that somebody was asked to stop.
    reason = int(trainer.backend.maximum([shutdown.reason])[0]) if status == "stopped" else 0
    steps = saved_steps(outputs.folder.checkpoints) if outputs is not None else {}
    result = TrainingResult(
        status=status,
        final_loss=progress.loss,
        val_loss=progress.val_loss,
        val_bpb=progress.val_bpb,
        val_other=progress.val_other,
        val_rows=progress.val_rows,
        val_rows_of=progress.val_rows_of,
        total_tokens=progress.tokens,
        total_steps=progress.step,
        training_seconds=progress.elapsed_seconds,
        tokens_per_second=progress.tokens / progress.elapsed_seconds if progress.elapsed_seconds else 0.0,
        checkpoint_path=steps.get(progress.step),
        artifact_path=exported.path if exported is not None else None,
        artifact_bytes=exported.bytes if exported is not None else None,
        artifact_bpb=exported.bpb if exported is not None else None,
        artifact_rows=exported.rows if exported is not None else None,
        sample=trainer.last_sample,
        run_dir=outputs.folder.path if outputs is not None else Path(config.training.output_dir or "."),
        stop_reason=reason_name(reason) if reason else trainer.end_reason,
    )
    if outputs is not None:
        outputs.folder.write_result(result, exported.facts if exported is not None else {})
        outputs.folder.forget_stop()
        outputs.heartbeat.update(status=status, stop_reason=result.stop_reason)
    return result


def export_artifact(trainer: Trainer, shutdown: Shutdown) -> Exported | None:
    """Write the artifact into the run folder and let another process score it."""
    scored = trainer.config.artifact.score and trainer.dataset.split("val").tokens > 1
    rows = trainer.artifact_rows() if scored else None
    weights = trainer.backend.weights()
    if trainer.outputs is None:
        return None
    report = _export(trainer, trainer.outputs.folder, weights)
    return Exported(report.path, report.bytes, _score(trainer, report.path, rows, shutdown) if scored else None, rows)


def _export(trainer: Trainer, folder: RunFolder, weights: list[TensorRecord]) -> ArtifactReport:
    """Write the artifact and hold it against the budget."""
    config, progress = trainer.config, trainer.progress
    a, limit = config.artifact, config.budget.artifact_bytes
    facts = {**trainer.facts, "step": progress.step, "val_bpb": progress.val_bpb if progress.val_whole else None}
    if not a.tokenizer:
        facts["tokenizer"] = None
    path = folder.artifact / artifact_name(a.codec)
    trainer.reporter.waiting("exporting")
    with writing(path):
        report = write_artifact(path, weights, facts, a.quantiser, a.codec, a.dtype)
    if limit is not None and report.bytes > limit:
        over = f"{report.bytes - limit:,} more than budget.artifact_bytes={limit:,}"
        trainer.reporter.message(f"{path} has {report.bytes:,} bytes, {over}; what would fit: ingot export {folder.path}")
    return report


def _score(trainer: Trainer, path: Path, rows: int | None, shutdown: Shutdown) -> float | None:
    """The bits per byte of the file that was written, by a process that knows nothing but the file."""
    trainer.backend.release()
    trainer.reporter.message(f"scoring {path}")
    try:
        progress, stop = partial(trainer.reporter.waiting, SCORING), lambda: shutdown.requested
        return float(score_in_fresh_process(path, None, trainer.config.training.device, rows, progress, stop)["val_bpb"])
    except RunError:
        if not shutdown.requested:
            raise
    trainer.reporter.message(f"{path} was not scored: interrupted; score it with: ingot eval --artifact {path}")
    return None
