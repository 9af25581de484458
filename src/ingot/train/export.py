"""The end of a run: the last evaluation, what is exported for others, and what it all came to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ingot.config.schema import Config
from ingot.errors import IngotError, Interrupted
from ingot.runs.result import TrainingResult
from ingot.runs.state import Status
from ingot.runs.steps import saved_steps
from ingot.train.progress import Progress, RunOutputs
from ingot.train.stopping import Shutdown, reason_name
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
        outputs.folder.forget_stop()
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
