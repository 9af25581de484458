"""The artifact of a completed run: written into its folder, held against the budget, and scored by another process."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path

from ingot.artifact.container import ArtifactReport, artifact_name, write_artifact
from ingot.artifact.fresh_process import SCORING, score_in_fresh_process
from ingot.errors import Interrupted, RunError
from ingot.runs.folder import RunFolder
from ingot.runtime.files import writing
from ingot.runtime.tensors import TensorRecord
from ingot.train.export import Exported
from ingot.train.rounding import find_codes
from ingot.train.stopping import Shutdown
from ingot.train.trainer import Trainer


def export_artifact(trainer: Trainer, shutdown: Shutdown) -> Exported | None:
    """Write the artifact into the run folder and let another process score it."""
    scored = trainer.config.artifact.score and trainer.dataset.split("val").tokens > 1
    rows = trainer.artifact_rows() if scored else None
    weights = trainer.backend.weights()
    report = _export(trainer, trainer.outputs.folder, weights, shutdown) if trainer.outputs is not None else None
    if trainer.backend.maximum([trainer.outputs is not None and report is None])[0]:
        raise Interrupted
    if report is None:
        return None
    return Exported(report.path, report.bytes, _score(trainer, report.path, rows, shutdown) if scored else None, rows)


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


def _score(trainer: Trainer, path: Path, rows: int | None, shutdown: Shutdown) -> float | None:
    """The bits per byte of the file that was written, by a process that knows nothing but the file."""
    trainer.backend.release()
    trainer.reporter.message(f"scoring {path}")
    try:
        progress, stop = partial(trainer.reporter.waiting, SCORING), lambda: shutdown.requested
        return float(score_in_fresh_process(path, None, trainer.config.training.device, rows, progress, stop)["val_bpb"])
    except RunError as error:  # all of the training is done, and no reason to call the run a failure
        why = "interrupted" if shutdown.requested else error
    trainer.reporter.message(f"{path} was not scored: {why}; score it with: ingot eval --artifact {shlex.quote(str(path))}")
    return None
