"""From a config to a result: opens the data, builds the backend, claims the run folder, resumes, and runs the loop."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from ingot.artifact.weights import WEIGHTS_FILE, write_weights
from ingot.backends.base import Backend
from ingot.config.loading import ResolvedConfig
from ingot.config.render import dump_yaml
from ingot.config.schema import Config
from ingot.data.dataset import Dataset
from ingot.data.samples import open_dataset
from ingot.data.stream import make_order
from ingot.errors import CheckpointError, ConfigError
from ingot.runs.checkpoints import Checkpoint, load_checkpoint, newest_sound, saved_steps, sweep
from ingot.runs.folder import RunFolder, new_run_dir
from ingot.runtime.files import writing
from ingot.runtime.ranks import Ranks, ranks_from_environment
from ingot.train.checkpoint import Saver
from ingot.train.report import Chorus, LineReporter, Reporter
from ingot.train.shutdown import Shutdown
from ingot.train.trainer import Desk, Progress, Status, Trainer

# What a run may not change between its sessions, because the state it saved would mean something else.
FIXED = (
    "model.*", "data.seq_len", "data.sampling", "data.seed", "optimizer.name", "training.tokens_per_step", "training.seed",
)  # fmt: skip
MODEL_COPY = "model.py"  # a model of one's own, kept in the run folder


@dataclass(frozen=True)
class TrainingResult:
    """What a session of a run came to."""

    status: Status
    final_loss: float | None  # nats per token, of the last step
    val_loss: float | None
    val_bpb: float | None  # bits per byte of the validation text
    total_tokens: int
    total_steps: int
    training_seconds: float
    tokens_per_second: float
    checkpoint_path: Path | None
    artifact_path: Path | None
    artifact_bytes: int | None
    sample: str | None
    run_dir: Path


def run(resolved: ResolvedConfig, reporter: Reporter | None = None) -> TrainingResult:
    """Train as a config says; the run folder is the product, the result a summary of it."""
    config, ranks = resolved.config, ranks_from_environment()
    if ranks.world_size > config.rows_per_step:
        raise ConfigError(
            f"{ranks.world_size} ranks cannot share the {config.rows_per_step} rows of a step; "
            "use fewer ranks or raise training.tokens_per_step"
        )
    reporter = reporter if reporter is not None and ranks.first else Reporter()
    dataset = open_dataset(config.data.path, config.data.tokenizer)
    order = make_order(config.data.sampling, dataset.split("train"), config.data.seq_len, config.data.seed)
    with ExitStack() as stack:
        backend = _backend(config, dataset.tokenizer.vocab_size, ranks)
        stack.callback(backend.close)
        shutdown = stack.enter_context(Shutdown(announce=ranks.first))
        desk = None
        if ranks.first:
            desk, reporter = _open_desk(resolved, reporter, stack)
        checkpoint = _agreed_checkpoint(backend, config, dataset, desk, reporter)
        progress = Progress()
        if checkpoint is not None:
            known = {field.name for field in fields(Progress)}
            progress = Progress(**{key: value for key, value in checkpoint.progress.items() if key in known})
            backend.load(checkpoint.tensors)
        if desk is not None:
            _record_config(resolved, desk.folder, fresh=checkpoint is None)
            desk.folder.metrics.truncate_after(progress.step)
        trainer = Trainer(config, dataset, order, backend, progress, reporter, desk)
        trainer.facts = facts_of(config, dataset)
        trainer.prepare(checkpoint.progress["choices"] if checkpoint is not None else {})
        reporter.begin(_begin_facts(config, dataset, backend, desk, progress))
        status = trainer.run(shutdown)
        result = _finish(trainer, status)
        reporter.end(result)
    return result


def _backend(config: Config, vocab_size: int, ranks: Ranks) -> Backend:
    from ingot.backends.torch import TorchBackend  # here, so that a mistake in config or data is told before torch has loaded

    return TorchBackend(config, vocab_size, ranks)


def _open_desk(resolved: ResolvedConfig, reporter: Reporter, stack: ExitStack) -> tuple[Desk, Reporter]:
    """Claim the run folder and write down what is about to run."""
    config = resolved.config
    output = config.training.output_dir
    folder = RunFolder(Path(output) if output else new_run_dir(resolved.recipe))
    if saved_steps(folder.checkpoints) and config.training.resume == "never":
        raise CheckpointError(
            f"{folder.path} holds a run and training.resume=never; choose another training.output_dir or set training.resume=auto"
        )
    stack.enter_context(folder.claim(reporter.message))
    sweep(folder.checkpoints)
    folder.write_environment({name: metadata.version(name) for name in ("torch", "numpy", "pydantic")})
    heartbeat = folder.heartbeat(config.tracking.heartbeat_seconds, reporter.message, max_steps=config.training.max_steps)
    stack.enter_context(heartbeat)
    reporter = Chorus(reporter, LineReporter(folder.log))

    def saved(path: Path) -> None:
        heartbeat.update(checkpoint=path.name)
        reporter.saved(path)

    saver = Saver(folder.checkpoints, config.training.keep_last, config.training.keep_every, saved, reporter.message)
    stack.callback(saver.wait)
    return Desk(folder, heartbeat, saver), reporter


def _record_config(resolved: ResolvedConfig, folder: RunFolder, fresh: bool) -> None:
    folder.write_config(dump_yaml(resolved.config, resolved.origins))
    if fresh and resolved.config.model.family == "file":
        with writing(folder.path / MODEL_COPY):
            shutil.copyfile(resolved.config.model.file, folder.path / MODEL_COPY)


def _agreed_checkpoint(
    backend: Backend, config: Config, dataset: Dataset, desk: Desk | None, reporter: Reporter
) -> Checkpoint | None:
    """The checkpoint the first rank found sound and fitting, read by every rank; None at the start of a run."""
    found = newest_sound(desk.folder.checkpoints, reporter.message) if desk is not None else None
    if found is not None:
        check_fits(found, config, dataset)
    path = backend.tell(str(found.path) if found is not None else "")
    if not path:
        return None
    return found if found is not None else load_checkpoint(Path(path))


def facts_of(config: Config, dataset: Dataset) -> dict[str, Any]:
    """What a checkpoint or an exported model says of itself, enough to rebuild it without the run folder."""
    return {
        "config": config.model_dump(),
        "tokenizer": dataset.tokenizer.spec(),
        "data_fingerprint": dataset.fingerprint,
    }


def check_fits(checkpoint: Checkpoint, config: Config, dataset: Dataset) -> None:
    """Refuse to continue a run with settings or data that would make it another one."""
    was, now = checkpoint.progress["config"], config.model_dump()
    changed = []
    for pattern in FIXED:
        section, key = pattern.split(".")
        keys = sorted((was[section].keys() | now[section].keys()) - {"file"}) if key == "*" else [key]
        for name in keys:
            before, after = was[section].get(name), now[section].get(name)
            if before != after:
                changed.append(f"{section}.{name} was {before} and is {after}")
    if changed:
        raise CheckpointError(
            f"{checkpoint.path} cannot be continued with other settings: {'; '.join(changed)}; "
            "set them back or choose another training.output_dir"
        )
    if checkpoint.progress["data_fingerprint"] != dataset.fingerprint:
        raise CheckpointError(
            f"{checkpoint.path} was trained on other data than {config.data.path} holds now (fingerprint "
            f"{checkpoint.progress['data_fingerprint'][:12]}, now {dataset.fingerprint[:12]}); "
            "restore the data or choose another training.output_dir"
        )


def _begin_facts(config: Config, dataset: Dataset, backend: Backend, desk: Desk | None, progress: Progress) -> dict[str, Any]:
    choices = backend.choices()
    facts = {
        "run": str(desk.folder.path) if desk is not None else "",
        "device": backend.device_name,
        "precision": choices["precision"],
        "ranks": backend.ranks.world_size,
        "parameters": f"{backend.parameters:,}",
        "train_tokens": f"{dataset.split('train').tokens:,}",
        "tokens_per_step": f"{config.training.tokens_per_step:,}",
        "micro_batch": choices["micro_batch"],
    }
    return {**facts, "resumed_at": f"step {progress.step}"} if progress.step else facts


def _finish(trainer: Trainer, status: Status) -> TrainingResult:
    """Judge and export a completed run, and say how it went."""
    config, progress, desk = trainer.config, trainer.progress, trainer.desk
    artifact_path, artifact_bytes = None, None
    if status == "completed":
        if trainer.dataset.split("val").tokens > 1 and trainer.evaluate(None):
            trainer.note()  # it is the best
        if desk is not None and config.artifact.write:
            artifact_path = desk.folder.artifact / WEIGHTS_FILE
            artifact_bytes = _export(trainer, artifact_path)
    steps = saved_steps(desk.folder.checkpoints) if desk is not None else {}
    if desk is not None:
        desk.heartbeat.update(status=status)
    return TrainingResult(
        status=status,
        final_loss=progress.loss,
        val_loss=progress.val_loss,
        val_bpb=progress.val_bpb,
        total_tokens=progress.tokens,
        total_steps=progress.step,
        training_seconds=progress.elapsed_seconds,
        tokens_per_second=progress.tokens / progress.elapsed_seconds if progress.elapsed_seconds else 0.0,
        checkpoint_path=steps.get(progress.step),
        artifact_path=artifact_path,
        artifact_bytes=artifact_bytes,
        sample=trainer.last_sample,
        run_dir=desk.folder.path if desk is not None else Path(config.training.output_dir or "."),
    )


def _export(trainer: Trainer, path: Path) -> int:
    """Write the weights for others and hold them against the budget."""
    config, progress = trainer.config, trainer.progress
    facts = {**trainer.facts, "step": progress.step, "val_bpb": progress.val_bpb}
    with writing(path):
        size = write_weights(path, trainer.backend.weights(config.artifact.dtype), facts)
    limit = config.budget.artifact_bytes
    if limit is not None and size > limit:
        trainer.reporter.message(f"{path} has {size:,} bytes, {size - limit:,} more than budget.artifact_bytes={limit:,}")
    return size
