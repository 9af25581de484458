"""From a config to a result: opens the data, builds the backend, claims the run folder, resumes, and runs the loop."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from ingot.artifact.codecs import check_codec
from ingot.artifact.container import ArtifactReport, artifact_name, write_artifact
from ingot.artifact.fresh_process import SCORING, score_in_fresh_process
from ingot.backends.base import Backend
from ingot.backends.open import open_backend
from ingot.config.loading import ResolvedConfig
from ingot.config.render import dump_yaml
from ingot.config.schema import Config
from ingot.data.loading.open import open_dataset
from ingot.data.loading.rows import Rows, make_rows
from ingot.data.store.dataset import Dataset
from ingot.errors import CheckpointError, ConfigError, DataError, IngotError, PeerLost, RunError
from ingot.generate.sampling import prompt_ids
from ingot.model.settings import FileSettings
from ingot.runs.checkpoints import Checkpoint, load_checkpoint, newest_sound, saved_steps, sweep
from ingot.runs.folder import MODEL_COPY, RunFolder, new_run_dir
from ingot.runs.report import BeginReport, Chorus, LineReporter, Reporter
from ingot.runtime.files import write_atomically, writing
from ingot.runtime.ranks import ranks_from_environment
from ingot.train.plan import shapes
from ingot.train.saver import Saver
from ingot.train.stopping import Shutdown
from ingot.train.trainer import Desk, Interrupted, Progress, Status, Trainer
from ingot.trained.weights import open_weights

# What a run may not change between its sessions, because the state it saved would mean something else.
FIXED: dict[str, tuple[str, ...]] = {
    "model": (),  # everything
    "data": ("seq_len", "sampling", "spans", "document_mask", "seed"),
    "optimizer": ("name", "groups"),
    "training": ("tokens_per_step", "stages", "seed"),
}


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


@dataclass(frozen=True)
class Exported:
    """What was written for others, and the bits per byte of the file, read again."""

    path: Path
    bytes: int
    bpb: float | None
    rows: int | None = None  # by which it was found; None: by all


Exporter = Callable[[Trainer, Shutdown], Exported | None]  # called on every rank of a run that is complete


def run(resolved: ResolvedConfig, reporter: Reporter | None = None, exporter: Exporter | None = None) -> TrainingResult:
    """Train as a config says; the run folder is the product, the result a summary of it.

    A door may bring a reporter, which speaks its users' language, and an exporter, which writes the files they expect.
    """
    config, ranks = resolved.config, ranks_from_environment()
    reporter = reporter if reporter is not None and ranks.first else Reporter()
    reporter.waiting("opening the data")
    dataset, rows = open_data(config, ranks.world_size)
    facts = facts_of(config, dataset)
    reporter.waiting("building the model")
    with ExitStack() as stack:
        backend = open_backend(config, dataset.tokenizer.vocab_size, ranks)
        shutdown = stack.enter_context(Shutdown(announce=ranks.first))
        desk, checkpoint = None, None
        if ranks.first:
            try:
                folder = _claim(resolved, reporter, stack)
                reporter = Chorus(reporter, LineReporter(folder.log))
                checkpoint = newest_sound(folder.checkpoints, reporter.message)
                if checkpoint is not None:
                    check_fits(checkpoint, facts)
                desk = _open_desk(resolved, folder, checkpoint, reporter, stack)
            except IngotError as error:
                backend.broadcast(json.dumps({"exit_code": error.exit_code}))
                raise
        told = json.loads(backend.broadcast(json.dumps({"checkpoint": str(checkpoint.path) if checkpoint is not None else None})))
        if "exit_code" in told:
            raise PeerLost(told["exit_code"])
        if told["checkpoint"] is not None and checkpoint is None:
            checkpoint = load_checkpoint(Path(told["checkpoint"]))
        progress = _resume(backend, checkpoint)
        if checkpoint is None and config.training.weights is not None:
            weights = open_weights(Path(config.training.weights).expanduser())
            backend.load_weights(weights.tensors, str(weights.path))
        trainer = Trainer(config, dataset, rows, backend, progress, reporter, desk)
        trainer.facts = facts
        reporter.waiting("choosing kernels")
        trainer.prepare(checkpoint.progress["choices"] if checkpoint is not None else {})
        reporter.begin(_begin_report(config, dataset, backend, desk, progress))
        trainer.prime()
        status = trainer.run(shutdown)
        if backend.maximum([shutdown.requested])[0]:
            status = "stopped"  # asked for after the last step
        result = _finish(trainer, status, shutdown, exporter or export_artifact)
        reporter.end(result)
        backend.close()  # not after a failure: the other ranks would be gone before this one has said why
    return result


def open_data(config: Config, world_size: int) -> tuple[Dataset, Rows]:
    """The data of a run and the order it is read in; finds the mistakes that need neither a framework nor a run folder."""
    if world_size > (fewest := min(plan.samples for plan in shapes(config))):
        raise ConfigError(
            f"{world_size} ranks cannot share the {fewest} rows of a step; use fewer ranks or raise training.tokens_per_step"
        )
    dataset = open_dataset(config.data.path, config.data.tokenizer, config.data.trust_tokens)
    if config.artifact.write:
        check_codec(config.artifact.codec)  # now, not after hours of training
    if config.evaluation.sample_tokens:
        prompt_ids(dataset.tokenizer, config.evaluation.sample_prompt)
    if (config.evaluation.every or config.evaluation.at_start) and dataset.split("val").tokens < 2:
        raise DataError(f"{config.data.path} has no validation text; set evaluation.every=0 and evaluation.at_start=false")
    return dataset, make_rows(config.data, config.rows_per_step, dataset)


def _claim(resolved: ResolvedConfig, reporter: Reporter, stack: ExitStack) -> RunFolder:
    """The run folder, taken for this process."""
    training = resolved.config.training
    folder = RunFolder(Path(training.output_dir).expanduser() if training.output_dir else new_run_dir(resolved.recipe))
    if saved_steps(folder.checkpoints) and training.resume == "never":
        raise CheckpointError(
            f"{folder.path} holds a run and training.resume=never; choose another training.output_dir or set training.resume=auto"
        )
    stack.enter_context(folder.claim(reporter.message, [MODEL_COPY] if isinstance(resolved.config.model, FileSettings) else []))
    sweep(folder.checkpoints)
    return folder


def _open_desk(
    resolved: ResolvedConfig, folder: RunFolder, checkpoint: Checkpoint | None, reporter: Reporter, stack: ExitStack
) -> Desk:
    """Write down what is about to run, and start the heartbeat and the saver."""
    config = resolved.config
    # First, because by it a run folder is known: whoever is killed in here can start again.
    folder.write_environment({name: metadata.version(name) for name in ("torch", "numpy", "pydantic")})
    _write_config(resolved, folder, reporter)
    if checkpoint is None and isinstance(config.model, FileSettings):
        with writing(folder.path / MODEL_COPY):
            write_atomically(folder.path / MODEL_COPY, Path(config.model.file).expanduser().read_bytes())
    if checkpoint is None:
        folder.metrics.truncate_after(-1)
    else:
        folder.metrics.truncate_after(checkpoint.step, judged=checkpoint.progress["val_step"] == checkpoint.step)
    known = checkpoint.progress if checkpoint is not None else {}
    told: dict[str, Any] = {
        name: known[name] for name in ("step", "loss", "val_bpb", "tokens", "elapsed_seconds") if name in known
    }
    told |= {"checkpoint": checkpoint.path.name if checkpoint is not None else None, "max_steps": config.training.max_steps}
    heartbeat = folder.heartbeat(config.tracking.heartbeat_seconds, reporter.message, **told)
    stack.enter_context(heartbeat)

    def saved(path: Path) -> None:
        heartbeat.update(checkpoint=path.name)
        reporter.saved(path)

    saver = Saver(folder.checkpoints, config.training.keep_last, config.training.keep_every, saved, reporter.message)
    stack.callback(saver.wait)
    return Desk(folder, heartbeat, saver)


def _write_config(resolved: ResolvedConfig, folder: RunFolder, reporter: Reporter) -> None:
    """Record the config, unless it would replace the very file that it was read from."""
    if not any(path.exists() and folder.config_path.exists() and path.samefile(folder.config_path) for path in resolved.files):
        folder.write_config(dump_yaml(resolved.config, resolved.origins))
        return
    ways = ("command line", "python", "environment ")
    if other := [name for name, origin in resolved.origins.items() if origin.startswith(ways)]:
        reporter.message(
            f"{folder.config_path}, which this run was started from, stays as it is; checkpoints and environment.json tell what "
            f"was set besides: {', '.join(other)}"
        )


def _resume(backend: Backend, checkpoint: Checkpoint | None) -> Progress:
    """Put a checkpoint's state into the backend; without one, the start of a run."""
    if checkpoint is None:
        return Progress()
    backend.load(checkpoint.tensors)
    known = {field.name for field in fields(Progress)}
    return Progress(**{key: value for key, value in checkpoint.progress.items() if key in known})


def facts_of(config: Config, dataset: Dataset) -> dict[str, Any]:
    """What a checkpoint or an exported model says of itself, enough to rebuild it without the run folder."""
    file = Path(config.model.file).expanduser() if isinstance(config.model, FileSettings) else None
    return {
        "config": config.model_dump(mode="json"),
        "tokenizer": dataset.tokenizer.spec(),
        "tokenizer_fingerprint": dataset.tokenizer.fingerprint(),
        "vocab_size": dataset.tokenizer.vocab_size,
        "data_fingerprint": dataset.fingerprint,
        "model_file_sha256": hashlib.sha256(file.read_bytes()).hexdigest() if file is not None and file.is_file() else None,
    }


def check_fits(checkpoint: Checkpoint, facts: dict[str, Any]) -> None:
    """Refuse to continue a run with settings or data that would make it another one."""
    was, now = checkpoint.progress, facts
    changed = [
        f"{section}.{name} was {was['config'][section].get(name)} and is {now['config'][section].get(name)}"
        for section, names in FIXED.items()
        for name in names or sorted((was["config"][section].keys() | now["config"][section].keys()) - {"file"})
        if (name in was["config"][section] or not names) and was["config"][section].get(name) != now["config"][section].get(name)
    ]
    if was.get("model_file_sha256") != now["model_file_sha256"]:
        changed.append("the contents of model.file are not what they were")
    if was["data_fingerprint"] != now["data_fingerprint"]:
        prints = [known["data_fingerprint"][:12] for known in (was, now)]
        changed.append(f"it was trained on other data than {now['config']['data']['path']} (fingerprint {' and '.join(prints)})")
    if changed:
        raise CheckpointError(
            f"{checkpoint.path} cannot be continued: {'; '.join(changed)}; set it back or choose another training.output_dir"
        )


def _begin_report(config: Config, dataset: Dataset, backend: Backend, desk: Desk | None, progress: Progress) -> BeginReport:
    choices = backend.tuned()
    return BeginReport(
        run=str(desk.folder.path) if desk is not None else "",
        device=backend.device.name,
        precision=choices["precision"],
        ranks=backend.ranks.world_size,
        parameters=backend.parameters,
        train_tokens=dataset.split("train").tokens,
        tokens_per_step=config.training.tokens_per_step,
        micro_batch=choices["micro_batch"],
        attention=choices["attention"],
        resumed_at=progress.step,
        max_steps=config.training.max_steps,
        budget_seconds=config.budget.seconds,
        elapsed_seconds=progress.elapsed_seconds,
    )


def _finish(trainer: Trainer, status: Status, shutdown: Shutdown, exporter: Exporter) -> TrainingResult:
    """Judge and export a completed run, and say how it went."""
    config, progress, desk = trainer.config, trainer.progress, trainer.desk
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
    steps = saved_steps(desk.folder.checkpoints) if desk is not None else {}
    if desk is not None:
        desk.heartbeat.update(status=status)
    return TrainingResult(
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
        run_dir=desk.folder.path if desk is not None else Path(config.training.output_dir or "."),
    )


def export_artifact(trainer: Trainer, shutdown: Shutdown) -> Exported | None:
    """Write the artifact into the run folder and let another process score it."""
    scored = trainer.config.artifact.score and trainer.dataset.split("val").tokens > 1
    rows = trainer.artifact_rows() if scored else None
    if trainer.desk is None:
        return None
    report = _export(trainer, trainer.desk.folder)
    return Exported(report.path, report.bytes, _score(trainer, report.path, rows, shutdown) if scored else None, rows)


def _export(trainer: Trainer, folder: RunFolder) -> ArtifactReport:
    """Write the artifact and hold it against the budget."""
    config, progress = trainer.config, trainer.progress
    a, limit = config.artifact, config.budget.artifact_bytes
    facts = {**trainer.facts, "step": progress.step, "val_bpb": progress.val_bpb if progress.val_whole else None}
    if not a.tokenizer:
        facts["tokenizer"] = None
    path = folder.artifact / artifact_name(a.codec)
    trainer.reporter.waiting("exporting")
    with writing(path):
        report = write_artifact(path, trainer.backend.weights(), facts, a.quantiser, a.codec, a.dtype)
    if limit is not None and report.bytes > limit:
        over = f"{report.bytes - limit:,} more than budget.artifact_bytes={limit:,}"
        trainer.reporter.message(f"{path} has {report.bytes:,} bytes, {over}; what would fit: ingot export {folder.path}")
    return report


def _score(trainer: Trainer, path: Path, rows: int | None, shutdown: Shutdown) -> float | None:
    """The bits per byte of the file that was written, by a process that knows nothing but the file."""
    trainer.backend.release()
    trainer.reporter.message(f"scoring {path}")
    try:
        progress = partial(trainer.reporter.waiting, SCORING)
        return float(score_in_fresh_process(path, None, trainer.config.training.device, rows, progress)["val_bpb"])
    except RunError:
        if not shutdown.requested:
            raise
    trainer.reporter.message(f"{path} was not scored: interrupted; score it with: ingot eval --artifact {path}")
    return None
