"""Train a model as configured: open the data, build the backend, lock the run folder, resume, and run the training loop."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from ingot.backends.open import open_backend
from ingot.backends.sampling import prompt_ids
from ingot.config.loading import ResolvedConfig
from ingot.config.schema import Config
from ingot.data.loading.data_path import open_dataset
from ingot.data.loading.rows import Rows, make_rows
from ingot.data.store.dataset import Dataset
from ingot.errors import ConfigError, DataError, IngotError, PeerLost, Setting
from ingot.eval.evaluator import evaluator_of
from ingot.runs.checkpoints import load_checkpoint
from ingot.runs.mirror import local_run
from ingot.runs.reporter import BeginReport, LineReporter, MultiReporter, Reporter
from ingot.runs.state import TrainingResult
from ingot.runs.tracking import Tracking
from ingot.runtime.files import is_url
from ingot.runtime.machine import collected_later
from ingot.runtime.processes import die_with
from ingot.runtime.ranks import ranks_from_environment
from ingot.train.end import Exporter, export_artifact, finish
from ingot.train.evaluation import open_tasks
from ingot.train.outputs import PartSaver, claim_folder, open_outputs
from ingot.train.resume import Progress, facts_of, find_state, load_initial_weights, read_progress, starts_fresh
from ingot.train.step_plan import refuse_idle_ranks
from ingot.train.stop import Shutdown, find_walltime
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
    """Train a model as configured and return the result.

    A front end may pass a `reporter` with its own output format, an `exporter` that writes its own files, a `dataset` that it has
    opened, and `began`, the Unix time at which the session's wall clock starts. With `force`, an earlier run in the run folder is
    deleted first, together with all files that match the patterns in `files`.
    """
    config, ranks = resolved.config, ranks_from_environment()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid())()  # end with the parent (torchrun's agent), even if the agent is killed
    began = began if began is not None else time.time()
    walltime = find_walltime(config.training, began)
    front = reporter = reporter if reporter is not None and ranks.first else Reporter()
    with ExitStack() as stack:
        reporter.waiting("opening the data")
        dataset, rows = open_data(config, ranks.world_size, dataset)
        context = config.model.context or config.data.seq_len
        tasks = open_tasks(config.evaluation, context, dataset.tokenizer) if config.evaluation.tasks else None
        facts = facts_of(config, dataset)
        reporter.waiting("building the model")
        starting_up = stack.enter_context(collected_later())
        backend = open_backend(config, dataset.tokenizer.vocab_size, ranks)
        # Load the weights before the run folder is created, so that no folder is left behind if they do not fit the model.
        if config.training.weights is not None and (force or starts_fresh(config)):
            load_initial_weights(config, backend, dataset.tokenizer)
        shutdown = stack.enter_context(Shutdown(announce=ranks.first))
        outputs, checkpoint, tracking = None, None, config.tracking
        if ranks.first:
            try:
                folder = claim_folder(resolved, reporter, stack, files if force else None, facts)
                reporter = MultiReporter(reporter, LineReporter(folder.log))
                checkpoint = find_state(config, folder, facts, reporter.message)
                outputs = open_outputs(resolved, folder, checkpoint, reporter, stack)
                shutdown.watch(folder.stop_path, walltime, partial(outputs.saver.expected_seconds, backend.parameters))
                if walltime is not None:
                    reporter.message(f"{walltime}; the session saves and stops before then")
            except IngotError as error:
                backend.broadcast(json.dumps({"exit_code": error.exit_code}))
                raise
        # Tell the other ranks where checkpoints are and which one the first rank resumes from, or that it failed.
        saves = outputs.folder.checkpoints.absolute() if outputs is not None else ""
        found = {"checkpoint": str(checkpoint.path.absolute()) if checkpoint else None, "folder": str(saves)}
        outcome = json.loads(backend.broadcast(json.dumps(found)))
        if "exit_code" in outcome:
            raise PeerLost(outcome["exit_code"])
        if outcome["checkpoint"] is not None and checkpoint is None:
            path = Path(outcome["checkpoint"])
            if is_url(url := config.training.output_dir or ""):  # this machine has its own copy of the run
                path = local_run(url) / "checkpoints" / path.name
            checkpoint = load_checkpoint(path)
        progress = Progress()
        if checkpoint is not None:
            progress = read_progress(checkpoint)
            backend.load(checkpoint.tensors)
            checkpoint.tensors.clear()  # free the memory: the backend has its own copy
        if outputs is not None and (tracking.tensorboard or tracking.wandb_project or tracking.trackio_project):
            shown_config, folder_path = front.tracked_config() or config.model_dump(mode="json"), outputs.folder.path
            session = folder_path, progress.step, progress.wandb_id
            tracker = Tracking(tracking, *session, shown_config, front.tracked, reporter.message)
            progress.wandb_id = tracker.wandb_id or progress.wandb_id
            reporter = MultiReporter(reporter, stack.enter_context(tracker))
        writes_part = outputs is None and ranks.rank < backend.writers
        part_saver = PartSaver(Path(outcome["folder"]), ranks.rank) if writes_part else None
        trainer = Trainer(config, dataset, rows, backend, progress, reporter, outputs, part_saver=part_saver)
        trainer.saved_step = checkpoint.step if checkpoint is not None else None
        trainer.facts, trainer.evaluation.tasks = facts, tasks
        reporter.waiting("choosing kernels")
        choices = checkpoint.progress.get("choices") if checkpoint is not None else None
        trainer.prepare(choices if isinstance(choices, dict) else {})
        if outputs is not None:
            outputs.heartbeat.update(flops_per_token=backend.flops_per_token(config.data.seq_len))
        tuned = backend.tuned()
        begin = BeginReport(
            run=str(outputs.folder.path) if outputs is not None else "",
            device=backend.device.name,
            precision=tuned["precision"],
            ranks=ranks.world_size,
            parameters=backend.parameters,
            train_tokens=dataset.split("train").tokens,
            tokens_per_step=config.training.tokens_per_step,
            micro_batch=tuned["micro_batch"],
            attention=tuned["attention"],
            resumed_at=progress.step,
            max_steps=config.training.max_steps,
            budget_seconds=config.budget.seconds,
            elapsed_seconds=progress.elapsed_seconds,
        )
        reporter.begin(begin)
        for note in backend.notes:
            reporter.message(note)
        trainer.prime(shutdown)
        starting_up.close()
        status = trainer.run(shutdown)
        if backend.maximum([shutdown.requested])[0] and status != "halted":
            status = "stopped"  # a stop was requested after the last step
        result = finish(trainer, status, shutdown, exporter or export_artifact)
        reporter.end(result)
        backend.close()  # only if training succeeded: otherwise other ranks might exit before this one reports its error
        if outputs is not None and outputs.mirror is not None:
            outputs.mirror.wait()
            outputs.mirror.sync()
    return result


def open_data(config: Config, world_size: int, dataset: Dataset | None = None) -> tuple[Dataset, Rows]:
    """Open a run's data and build its row order. Errors that can be found without a framework or run folder are raised here."""
    data, evaluation, artifact = config.data, config.evaluation, config.artifact
    refuse_idle_ranks(config, world_size)
    if dataset is None:
        dataset = open_dataset(data.path, data.tokenizer, data.trust_tokens, config.suggested_tokenizer)
    if artifact.write and artifact.quantiser in ("std", "gptq") and config.training.device == "mlx":
        raise ConfigError(f"artifact.quantiser={artifact.quantiser} needs torch and does not run on mlx; choose int8")
    if evaluation.sample_tokens:
        prompt_ids(dataset.tokenizer, evaluation.sample_prompt)
    val_tokens, during = dataset.split("val").tokens, evaluation.every or evaluation.points or evaluation.at_start
    if during and val_tokens < 2:
        settings = (Setting("evaluation.every", 0), Setting("evaluation.points", 0), Setting("evaluation.at_start", "false"))
        raise DataError(f"{data.path} has no validation text", *settings, advice="set {0}, {1} and {2}")
    if (during or evaluation.at_end) and val_tokens > 1:
        evaluator_of(config, dataset, "val").count(None)  # raises an error if the split is shorter than one row
    return dataset, make_rows(data, config.rows_per_step, dataset)
