"""The end of a run: the last evaluation, what is exported for others, and what it all came to."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ingot.artifact.container import ArtifactReport, artifact_name, write_artifact
from ingot.artifact.fresh_process import SCORING, score_in_fresh_process
from ingot.config.schema import Config
from ingot.errors import IngotError, Interrupted, RunError
from ingot.runs.folder import RunFolder, saved_steps
from ingot.runs.state import Status, TrainingResult
from ingot.runtime.files import writing
from ingot.runtime.tensors import TensorRecord
from ingot.train.fit_artifact import find_codes
from ingot.train.saver import Progress, RunOutputs
from ingot.train.stop import Shutdown, reason_name
from ingot.train.trainer import Trainer


@dataclass(frozen=True)
class Exported:
    """What was written for others, and the bits per byte of the file, read again; without a path, that nothing was."""

    path: Path | None = None
    bytes: int | None = None
    bpb: float | None = None
    rows: int | None = None  # by which it was found; None: by all
    facts: dict[str, Any] = field(default_factory=dict)  # what else result.json tells of it


Exporter = Callable[[Trainer, Shutdown], Exported | None]  # called on every rank of a run that is complete


def finish(trainer: Trainer, status: Status, shutdown: Shutdown, exporter: Exporter) -> TrainingResult:
    """Score and export a completed run, and say how it went."""
    config, progress, outputs = trainer.config, trainer.progress, trainer.outputs
    exported, unsaved = Exported(), outputs.saver.error if outputs is not None else None
    if status == "completed":
        try:
            if config.evaluation.at_end and not trainer.is_evaluated() and trainer.dataset.split("val").tokens > 1:
                trainer.evaluate(trainer.bounds.final_limit, final=True)
                trainer.note()
            if config.artifact.write:
                exported = exporter(trainer, shutdown) or exported
        except Interrupted:
            status = "stopped"  # what is left can be done by the next session
        except IngotError:  # where a checkpoint has no room the artifact may have none either
            if unsaved is None:
                raise
    if unsaved is not None:
        raise unsaved  # only now: the score and the files are there, though the last step is not saved
    # Agreed upon once more: the end of an evaluation knows only that somebody was asked to stop.
    reason = int(trainer.backend.maximum([shutdown.last_reason()])[0]) if status == "stopped" else 0
    told = reason_name(reason) if reason else trainer.end_reason
    found = _result(config, progress, status, told, exported, outputs, trainer.last_sample)
    memory = trainer.backend.peak_memory()[0]
    result = replace(found, data_fingerprint=trainer.dataset.fingerprint, peak_memory_bytes=memory)
    if outputs is not None:
        outputs.heartbeat.check()
        outputs.folder.write_result(result, exported.facts)
        outputs.folder.remove_stop()
        outputs.heartbeat.update(status=status, stop_reason=result.stop_reason)
    return result


def not_begun(config: Config, reason: int) -> TrainingResult:
    """The result of a session that was asked to stop before the run folder was its own."""
    return _result(config, Progress(), "stopped", reason_name(reason), Exported())


def _result(
    config: Config,
    progress: Progress,
    status: Status,
    stop_reason: str | None,
    exported: Exported,
    outputs: RunOutputs | None = None,
    sample: str | None = None,
) -> TrainingResult:
    steps = saved_steps(outputs.folder.checkpoints) if outputs is not None else {}
    return TrainingResult(
        status=status,
        final_loss=progress.loss,
        val_loss=progress.val_loss,
        val_bpb=progress.val_bpb,
        val_other=progress.val_other,
        val_rows=progress.val_rows,
        val_rows_of=progress.val_rows_of,
        val_stride=progress.val_stride,
        val_step=progress.val_step,
        total_tokens=progress.tokens,
        total_steps=progress.step,
        training_seconds=progress.elapsed_seconds,
        tokens_per_second=progress.tokens / progress.elapsed_seconds if progress.elapsed_seconds else 0.0,
        checkpoint_path=steps.get(progress.step),
        artifact_path=exported.path,
        artifact_bytes=exported.bytes,
        artifact_bpb=exported.bpb,
        artifact_rows=exported.rows,
        sample=sample,
        run_dir=outputs.folder.path if outputs is not None else Path(config.training.output_dir or "."),
        stop_reason=stop_reason,
    )


# The artifact of a completed run: written into its folder, held against the budget, and scored by another process.


def export_artifact(trainer: Trainer, shutdown: Shutdown, score: Callable[..., Any] = score_in_fresh_process) -> Exported | None:
    """Write the artifact into the run folder and let another process score it."""
    scored = trainer.config.artifact.score and trainer.dataset.split("val").tokens > 1
    rows = trainer.artifact_rows() if scored else None
    weights = trainer.backend.weights()
    report = _export(trainer, trainer.outputs.folder, weights, shutdown) if trainer.outputs is not None else None
    if trainer.backend.maximum([trainer.outputs is not None and report is None])[0]:
        raise Interrupted
    if report is None:
        return None
    return Exported(report.path, report.bytes, _score(trainer, report.path, rows, shutdown, score) if scored else None, rows)


def _export(trainer: Trainer, folder: RunFolder, weights: list[TensorRecord], shutdown: Shutdown) -> ArtifactReport | None:
    """Write the artifact and hold it against the budget; None where a stop came before the codes that fit were found."""
    config, progress = trainer.config, trainer.progress
    a, limit = config.artifact, config.budget.artifact_bytes
    of_these = progress.val_whole and progress.val_step == progress.step  # the score is of all text, and of these weights
    facts = {**trainer.facts, "step": progress.step, "val_bpb": progress.val_bpb if of_these else None}
    if not a.tokenizer:
        facts["tokenizer"] = None
    path = folder.artifact / artifact_name(a.codec)
    trainer.reporter.waiting("exporting")
    cut_short = False

    def stop() -> bool:
        nonlocal cut_short
        cut_short = shutdown.requested
        return cut_short

    codes = find_codes(config, weights, facts, trainer.dataset, limit, trainer.reporter.message, stop)
    if cut_short:
        return None  # as far as the search came they may not fit, and are not the best
    with writing(path):
        report = write_artifact(path, weights, facts, a.quantiser, a.codec, a.dtype, codes=codes)
    if limit is not None and report.bytes > limit:
        over = f"{report.bytes - limit:,} more than budget.artifact_bytes={limit:,}"
        trainer.reporter.message(
            f"{path} has {report.bytes:,} bytes, {over}; what would fit: ingot export {shlex.quote(str(folder.path))}"
        )
    return report


def _score(trainer: Trainer, path: Path, rows: int | None, shutdown: Shutdown, score: Callable[..., Any]) -> float | None:
    """The bits per byte of the file that was written, by a process that knows nothing but the file."""
    trainer.backend.release()
    trainer.reporter.message(f"scoring {path}")
    try:
        progress, stop = partial(trainer.reporter.waiting, SCORING), lambda: shutdown.requested
        return float(score(path, None, trainer.config.training.device, rows, progress, stop)["val_bpb"])
    except RunError as error:  # all of the training is done, and no reason to call the run a failure
        why = "interrupted" if shutdown.requested else error
    trainer.reporter.message(f"{path} was not scored: {why}; score it with: ingot eval --artifact {shlex.quote(str(path))}")
    return None
