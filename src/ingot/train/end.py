"""The end of a run: final evaluation, model export, and result.json."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from ingot.artifact.container import artifact_name, write_artifact
from ingot.artifact.fresh_process import SCORING, score_in_fresh_process
from ingot.errors import IngotError, Interrupted, RunError
from ingot.runs.folder import saved_steps
from ingot.runs.state import Status, TrainingResult
from ingot.runtime.files import writing
from ingot.train.fit_artifact import find_codes
from ingot.train.stop import Shutdown, reason_name
from ingot.train.trainer import Trainer


@dataclass(frozen=True)
class Exported:
    """An exported model file with its size and its score; `path` is None if nothing was exported."""

    path: Path | None = None
    bytes: int | None = None
    bpb: float | None = None
    rows: int | None = None  # number of validation rows that `bpb` was measured on; None: all rows
    facts: dict[str, Any] = field(default_factory=dict)  # additional entries for result.json


Exporter = Callable[[Trainer, Shutdown], Exported | None]  # called on every rank of a completed run


def finish(trainer: Trainer, status: Status, shutdown: Shutdown, exporter: Exporter) -> TrainingResult:
    """Evaluate and export the model if the run has completed; in any case write result.json and return the result."""
    config, progress, outputs, evaluation = trainer.config, trainer.progress, trainer.outputs, trainer.evaluation
    exported, unsaved = Exported(), outputs.saver.error if outputs is not None else None
    if status == "completed":
        try:
            if config.evaluation.at_end and not evaluation.is_final() and trainer.dataset.split("val").tokens > 1:
                evaluation.evaluate(final=True)
                trainer.update_checkpoint()
            if config.artifact.write:
                exported = exporter(trainer, shutdown) or exported
        except Interrupted:
            status = "stopped"  # the next session finishes the evaluation and export
        except IngotError:  # if the last save failed (disk full), the export may fail too; the save's error is raised below
            if unsaved is None:
                raise
    if unsaved is not None:
        raise unsaved  # raised only now, so that the score and the artifact are written even though the last save failed
    # Synchronise the stop reason: after an interrupted evaluation, ranks know only that one of them received a stop request.
    reason = int(trainer.backend.maximum([shutdown.last_reason()])[0]) if status == "stopped" else 0
    checkpoints = saved_steps(outputs.folder.checkpoints) if outputs is not None else {}
    result = TrainingResult(
        status=status,
        final_loss=progress.loss,
        **{field.name: getattr(progress, field.name) for field in fields(TrainingResult) if field.name.startswith("val_")},
        total_tokens=progress.tokens,
        total_steps=progress.step,
        training_seconds=progress.elapsed_seconds,
        tokens_per_second=progress.tokens / progress.elapsed_seconds if progress.elapsed_seconds else 0.0,
        checkpoint_path=checkpoints.get(progress.step),
        **{f"artifact_{name}": getattr(exported, name) for name in ("path", "bytes", "bpb", "rows")},
        sample=evaluation.last_sample,
        run_dir=outputs.folder.path if outputs is not None else Path(config.training.output_dir or "."),
        stop_reason=reason_name(reason) if reason else trainer.end_reason,
        data_fingerprint=trainer.dataset.fingerprint,
        peak_memory_bytes=trainer.backend.peak_memory()[0],
    )
    if outputs is not None:
        outputs.heartbeat.check()
        outputs.folder.write_result(result, exported.facts)
        outputs.folder.remove(outputs.folder.stop_path)
        outputs.heartbeat.update(status=status, stop_reason=result.stop_reason)
    return result


def export_artifact(trainer: Trainer, shutdown: Shutdown, score: Callable[..., Any] = score_in_fresh_process) -> Exported | None:
    """Write the artifact into the run folder, warn if it exceeds budget.artifact_bytes, and score it in a fresh process."""
    config, progress, outputs = trainer.config, trainer.progress, trainer.outputs
    a, limit = config.artifact, config.budget.artifact_bytes
    scored = a.score and trainer.dataset.split("val").tokens > 1
    rows = trainer.evaluation.artifact_rows() if scored else None
    weights, report, bpb, cut_short = trainer.backend.weights(), None, None, False
    if outputs is not None:
        whole = progress.val_whole and progress.val_step == progress.step  # the score covers these weights and the whole split
        facts = {**trainer.facts, "step": progress.step, "val_bpb": progress.val_bpb if whole else None}
        if not a.tokenizer:
            facts["tokenizer"] = None
        path = outputs.folder.artifact / artifact_name(a.codec)
        trainer.reporter.waiting("exporting")
        codes = find_codes(config, weights, facts, trainer.dataset, limit, trainer.reporter.message, lambda: shutdown.requested)
        cut_short = shutdown.requested
        if not cut_short:  # after an interrupted search, the quantised weights may exceed the size limit
            with writing(path):
                report = write_artifact(path, weights, facts, a.quantiser, a.codec, a.dtype, codes=codes)
            if limit is not None and report.bytes > limit:
                over = f"{report.bytes:,} bytes, {report.bytes - limit:,} more than budget.artifact_bytes={limit:,}"
                fitting = f"ingot export {shlex.quote(str(outputs.folder.path))}"
                trainer.reporter.message(f"{path} has {over}; to find options that fit, run: {fitting}")
    if trainer.backend.maximum([cut_short])[0]:
        raise Interrupted
    if report is None:
        return None
    if scored:
        trainer.backend.release()
        trainer.reporter.message(f"scoring {path}")
        try:
            waiting = partial(trainer.reporter.waiting, SCORING)
            bpb = float(score(path, None, config.training.device, rows, waiting, lambda: shutdown.requested)["val_bpb"])
        except RunError as error:  # training has completed, so a failed evaluation does not fail the run
            reason = "interrupted" if shutdown.requested else error
            again = f"ingot eval --artifact {shlex.quote(str(path))}"
            trainer.reporter.message(f"{path} was not scored: {reason}; score it with: {again}")
    return Exported(path, report.bytes, bpb, rows)
