"""From a config to a result: opens the data, builds the backend, claims the run folder, resumes, and runs the loop."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from ingot.artifact.codecs import check_codec
from ingot.backends.base import Backend
from ingot.backends.open import open_backend, packages
from ingot.backends.sampling import prompt_ids
from ingot.config.loading import ResolvedConfig
from ingot.config.render import dump_yaml
from ingot.config.schema import Config
from ingot.data.loading.data_path import open_dataset
from ingot.data.loading.rows import Rows, make_rows
from ingot.data.store.dataset import Dataset
from ingot.errors import ConfigError, DataError, IngotError, Interrupted, PeerLost
from ingot.eval.evaluator import evaluator_of
from ingot.inference.model import locate_weights
from ingot.model.settings import FileSettings
from ingot.runs.checkpoints import Checkpoint, load_checkpoint, sweep
from ingot.runs.folder import MODEL_COPY, TRACKIO_ID, WANDB_ID, Kind, RunFolder, clear, new_run_dir, starting
from ingot.runs.reporter import BeginReport, LineReporter, MultiReporter, Reporter
from ingot.runs.state import Heartbeat, TrainingResult
from ingot.runs.tracking import open_tracking
from ingot.runtime.files import user_path, write_atomically, writing
from ingot.runtime.machine import collected_later, installed
from ingot.runtime.processes import die_with
from ingot.runtime.ranks import ranks_from_environment
from ingot.train.end import Exporter, export_artifact, finish, not_begun
from ingot.train.evaluation import open_tasks
from ingot.train.resume import (
    begin_with_weights,
    begins_new,
    besides_config,
    check_sources,
    facts_of,
    find_state,
    has_state,
    refuse_occupied,
    resume,
)
from ingot.train.saver import Progress, RunOutputs, Saver
from ingot.train.step_plan import refuse_idle_ranks
from ingot.train.stop import STOP_FILE, Shutdown, Walltime, find_walltime
from ingot.train.trainer import Trainer


def run(
    resolved: ResolvedConfig,
    reporter: Reporter | None = None,
    exporter: Exporter | None = None,
    began: float | None = None,
    force: bool = False,
    files: Sequence[str] = (),
    dataset: Dataset | None = None,
) -> TrainingResult:
    """Train as a config says; the run folder is the product, the result a summary of it.

    A door may bring a reporter, which speaks its users' language, an exporter, which writes the files they expect, the unix time
    at which its program began, from which the wall clock of the session counts (else from now), and the data, if it is open. With
    `force` an earlier run in the folder is deleted first, and what fits the patterns `files`, which a door writes there besides.
    """
    config, ranks = resolved.config, ranks_from_environment()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid())()  # torchrun's agent, which after kill -9 would leave its ranks training
    began = began if began is not None else time.time()
    walltime = find_walltime(config.training, began)
    door = reporter = reporter if reporter is not None and ranks.first else Reporter()
    named = config.training.output_dir if ranks.first else None
    with ExitStack() as stack:
        stack.enter_context(starting(user_path(named) if named else None))
        reporter.waiting("opening the data")
        dataset, rows = open_data(config, ranks.world_size, dataset)
        tasks = open_tasks(config, dataset.tokenizer) if config.evaluation.tasks else None
        facts = facts_of(config, dataset)
        reporter.waiting("building the model")
        starting_up = stack.enter_context(collected_later())
        backend = open_backend(config, dataset.tokenizer.vocab_size, ranks)
        loaded = config.training.weights is not None and (force or begins_new(config))
        if loaded:  # now, so that what does not fit leaves no run folder
            begin_with_weights(config, backend, dataset.tokenizer)
        shutdown = stack.enter_context(Shutdown(announce=ranks.first))
        try:
            outputs, checkpoint, reporter = _open_run(
                resolved, backend, facts, reporter, stack, shutdown, began, walltime, files if force else None
            )
        except Interrupted:
            return not_begun(config, shutdown.reason)
        if checkpoint is None and config.training.weights is not None and not loaded:
            begin_with_weights(config, backend, dataset.tokenizer)
        progress = resume(backend, checkpoint)
        reporter = _tracked(config, outputs, progress, door, reporter, stack)
        trainer = Trainer(config, dataset, rows, backend, progress, reporter, outputs)
        trainer.saved_step = checkpoint.step if checkpoint is not None else None
        trainer.facts, trainer.tasks = facts, tasks
        reporter.waiting("choosing kernels")
        trainer.prepare(_choices(checkpoint))
        if outputs is not None:
            outputs.heartbeat.update(flops_per_token=backend.flops_per_token(config.data.seq_len))
        reporter.begin(_begin_report(config, dataset, backend, outputs, progress))
        trainer.prime(shutdown)
        starting_up.close()
        status = trainer.run(shutdown)
        if backend.maximum([shutdown.requested])[0] and status != "halted":
            status = "stopped"  # asked for after the last step
        result = finish(trainer, status, shutdown, exporter or export_artifact)
        reporter.end(result)
        backend.close()  # not after a failure: the other ranks would be gone before this one has said why
    return result


def _open_run(
    resolved: ResolvedConfig,
    backend: Backend,
    facts: dict[str, Any],
    reporter: Reporter,
    stack: ExitStack,
    shutdown: Shutdown,
    began: float,
    walltime: Walltime | None,
    to_delete: Sequence[str] | None,
) -> tuple[RunOutputs | None, Checkpoint | None, Reporter]:
    """The run folder on the first rank, the checkpoint that every rank goes on from, and a reporter that writes there too.

    Interrupted, on every rank: a stop came first.
    """
    outputs, checkpoint = None, None
    if backend.ranks.first:
        try:
            folder = _claim(resolved, reporter, stack, to_delete, facts, shutdown, began)
            reporter = MultiReporter(reporter, LineReporter(folder.log))
            checkpoint = find_state(resolved.config, folder, facts, reporter.message)
            outputs = _open_outputs(resolved, folder, checkpoint, reporter, stack)
            shutdown.watch(folder.stop_path, walltime, partial(outputs.saver.expected_seconds, backend.parameters))
            if walltime is not None:
                reporter.message(f"{walltime}; this session saves and stops before that")
        except IngotError as error:
            backend.broadcast(json.dumps({"exit_code": error.exit_code}))
            raise
        except Interrupted:
            backend.broadcast(json.dumps({"reason": shutdown.reason}))
            raise
    told = json.loads(backend.broadcast(json.dumps({"checkpoint": str(checkpoint.path) if checkpoint is not None else None})))
    if "exit_code" in told:
        raise PeerLost(told["exit_code"])
    if "reason" in told:
        shutdown.reason = told["reason"]
        raise Interrupted
    if told["checkpoint"] is not None and checkpoint is None:
        checkpoint = load_checkpoint(Path(told["checkpoint"]))
    return outputs, checkpoint, reporter


def _choices(checkpoint: Checkpoint | None) -> dict[str, Any]:
    """What an earlier session found out on its machine; what is not understood is found out anew."""
    found = checkpoint.progress.get("choices") if checkpoint is not None else None
    return found if isinstance(found, dict) else {}


def open_data(config: Config, world_size: int, dataset: Dataset | None = None) -> tuple[Dataset, Rows]:
    """The data of a run and the order it is read in; finds the mistakes that need neither a framework nor a run folder."""
    refuse_idle_ranks(config, world_size)
    if dataset is None:
        dataset = open_dataset(config.data.path, config.data.tokenizer, config.data.trust_tokens, config.suggested_tokenizer)
    if config.artifact.write:
        check_codec(config.artifact.codec)  # now, not after hours of training
        if config.artifact.quantiser in ("std", "gptq") and config.training.device == "mlx":
            raise ConfigError(f"artifact.quantiser={config.artifact.quantiser} is computed by torch, and not on mlx; choose int8")
    if config.evaluation.sample_tokens:
        prompt_ids(dataset.tokenizer, config.evaluation.sample_prompt)
    if config.training.weights is not None and not has_state(config):
        locate_weights(user_path(config.training.weights))
    if (config.evaluation.every or config.evaluation.at_start) and dataset.split("val").tokens < 2:
        raise DataError(f"{config.data.path} has no validation text; set evaluation.every=0 and evaluation.at_start=false")
    if (config.evaluation.every or config.evaluation.at_start or config.evaluation.at_end) and dataset.split("val").tokens > 1:
        evaluator_of(config, dataset, "val").count(None)  # refuses a split that does not fill a row
    return dataset, make_rows(config.data, config.rows_per_step, dataset)


def _claim(
    resolved: ResolvedConfig,
    reporter: Reporter,
    stack: ExitStack,
    to_delete: Sequence[str] | None,
    facts: dict[str, Any],
    shutdown: Shutdown,
    began: float,
) -> RunFolder:
    """The run folder, taken for this process and, where patterns of a door's files are given, emptied of an earlier run.

    Interrupted: somebody asked to stop since the session began.
    """
    training = resolved.config.training
    folder = RunFolder(user_path(training.output_dir) if training.output_dir else new_run_dir(resolved.recipe))
    if training.resume == "never" and to_delete is None:
        refuse_occupied(folder.path)
    also = [MODEL_COPY] if isinstance(resolved.config.model, FileSettings) else []
    tracked = resolved.config.tracking
    also += [WANDB_ID] if tracked.wandb_project is not None else []
    also += [TRACKIO_ID] if tracked.trackio_project is not None else []
    stack.enter_context(folder.claim(reporter.message, also, lambda: shutdown.requested))
    if folder.take_stop(began):
        shutdown.ask(STOP_FILE)
        raise Interrupted
    sweep(folder.checkpoints)
    if to_delete is not None:
        check_sources(resolved.config, folder, facts)
        own = [user_path(resolved.config.model.file)] if isinstance(resolved.config.model, FileSettings) else []
        clear(folder, reporter.message, to_delete, keep=[*resolved.files, *own])
    return folder


def _open_outputs(
    resolved: ResolvedConfig, folder: RunFolder, checkpoint: Checkpoint | None, reporter: Reporter, stack: ExitStack
) -> RunOutputs:
    """Write down what is about to run, and start the heartbeat and the saver."""
    config = resolved.config
    kept = any(path.exists() and folder.config_path.exists() and path.samefile(folder.config_path) for path in resolved.files)
    written = None if kept else dump_yaml(config, resolved.origins)  # never over the very file that it was read from
    besides = besides_config(config, folder) if kept else {}
    # First, because by it a run folder is known: whoever is killed in here can start again.
    folder.write_environment(installed(packages(config.training.device)), config=written, besides=besides)
    folder.remove_result()
    if written is not None:
        folder.write_config(written)
    elif besides:
        reporter.message(
            f"{folder.config_path}, which this run was started from, stays as it is; set besides, and kept in environment.json: "
            + ", ".join(f"{name}={value}" for name, value in besides.items())
        )
    if checkpoint is None and isinstance(config.model, FileSettings):
        with writing(folder.path / MODEL_COPY):
            write_atomically(folder.path / MODEL_COPY, user_path(config.model.file).read_bytes())
    if checkpoint is None:
        folder.metrics.truncate_after(-1)
    else:
        folder.metrics.truncate_after(checkpoint.step, evaluated=checkpoint.progress.get("val_step") == checkpoint.step)
    known = checkpoint.progress if checkpoint is not None else {}
    told: dict[str, Any] = {
        name: known[name] for name in ("step", "loss", "val_bpb", "tokens", "elapsed_seconds") if name in known
    }
    told |= {"checkpoint": checkpoint.path.name if checkpoint is not None else None, "max_steps": config.training.max_steps}
    told["budget_seconds"] = config.budget.seconds
    heartbeat = stack.enter_context(Heartbeat(folder.path, config.tracking.heartbeat_seconds, reporter.message, **told))

    def saved(path: Path, kind: Kind) -> None:
        heartbeat.update(checkpoint=path.name)
        reporter.saved(path, kind)

    saver = Saver(folder.checkpoints, config.training.keep_last, config.training.keep_every, saved, reporter.message)
    stack.callback(saver.wait)
    return RunOutputs(folder, heartbeat, saver)


def _tracked(
    config: Config, outputs: RunOutputs | None, progress: Progress, door: Reporter, reporter: Reporter, stack: ExitStack
) -> Reporter:
    """The reporter, and what sends numbers where the settings ask for it, in the words of the door."""
    t = config.tracking
    if outputs is None or (t.wandb_project is None and t.trackio_project is None and not t.tensorboard):
        return reporter
    told = door.tracked_config() or config.model_dump(mode="json")
    folder, known = outputs.folder.path, progress.wandb_id
    tracking = open_tracking(config.tracking, folder, progress.step, known, told, door.tracked, reporter.message)
    progress.wandb_id = tracking.wandb_id or known
    return MultiReporter(reporter, stack.enter_context(tracking))


def _begin_report(
    config: Config, dataset: Dataset, backend: Backend, outputs: RunOutputs | None, progress: Progress
) -> BeginReport:
    choices = backend.tuned()
    return BeginReport(
        run=str(outputs.folder.path) if outputs is not None else "",
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
