"""Resume a run: its progress, the checkpoint to start from, and the settings that must not change between sessions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ingot.artifact.gpt_simple import is_checkpoint
from ingot.backends.base import Backend
from ingot.config.fields import leaf_values
from ingot.config.memory import model_size
from ingot.config.schema import FAMILIES, Config
from ingot.data.store.dataset import Dataset
from ingot.data.tokenizers import Tokenizer
from ingot.errors import CannotContinue, Change, CheckpointError, ConfigError, Setting
from ingot.eval.evaluator import Score
from ingot.inference.model import Weights, locate_weights, open_weights
from ingot.model.settings import MOST, FileSettings
from ingot.runs.checkpoints import (
    Checkpoint,
    find_checkpoint,
    load_checkpoint,
    newest_valid,
    read_index,
    resume_source,
    save_checkpoint,
)
from ingot.runs.folder import RunFolder, named_path, saved_steps
from ingot.runs.mirror import RunMirror, local_run
from ingot.runs.state import TrainingResult, read_state, read_training_result
from ingot.runs.view import Run
from ingot.runtime.files import file_sha256, is_url, user_path, writing
from ingot.runtime.ranks import ranks_from_environment
from ingot.runtime.remote import local_path
from ingot.train.step_plan import Position

# Settings that must not change between the sessions of a run, because the saved state would no longer be valid.
FIXED: dict[str, tuple[str, ...]] = {
    "model": (),  # an empty tuple means all settings of the section
    "data": ("seq_len", "sampling", "spans", "overlap", "document_mask", "seed"),
    "optimizer": ("name", "groups"),
    "training": ("tokens_per_step", "stages", "seed"),
}
# Model settings not compared with those of training.weights: two are checked separately, two do not affect tensor shapes.
NOT_COMPARED = ("context", "vocab_size", "dropout", "file")
COMPLETE = "{} is complete: raise training.max_steps or budget.seconds to train longer, or start a new run"
# Settings that do not affect a run's result.
NOT_DECISIVE = ("training.output_dir", "training.resume", "training.max_runtime_seconds", "training.walltime_reserve_seconds")


@dataclass
class Progress:
    """The progress of a run. Weights, optimizer state, config and progress together determine the rest of the run."""

    step: int = 0
    sample: int = 0  # index of the next row to read, counted in rows of data.seq_len tokens
    tokens: int = 0
    elapsed_seconds: float = 0.0
    step_seconds: float = 0.0  # duration of the second longest of the recent steps
    loss: float | None = None
    val_loss: float | None = None
    val_bpb: float | None = None
    val_step: int | None = None  # the step of the last validation score
    val_whole: bool = False  # True if the score covers the whole validation split
    val_rows: int = 0  # number of rows scored
    val_rows_of: int = 0  # number of rows in the validation split
    val_stride: int | None = None  # stride in tokens of a sliding-window evaluation; None: rows did not overlap
    val_final: bool = False  # True if the score is that of the final evaluation
    val_other: dict[str, float] = field(default_factory=dict)  # bits per byte for the byte count that val_bpb does not use
    best_step: int | None = None
    best_bpb: float | None = None
    best_by: list[int | str | None] = field(default_factory=list)  # row count, stride and byte-counting rule of the best score
    evaluation_seconds: float = 0.0  # seconds spent on evaluations during training; 0 if that time is not limited
    resumed_from: str | None = None  # the checkpoint or run in another folder that this run started from
    wandb_id: str | None = None  # id of the Weights & Biases run, shared by all sessions
    starts: list[int] = field(default_factory=list)  # the first step of each stage that has begun
    phases_begun: int = 0  # number of data.phases that have begun
    places: dict[str, int] = field(default_factory=dict)  # number of rows read from each bucket

    def record_score(self, score: Score, final: bool) -> None:
        """Store the validation score of this step."""
        self.val_loss, self.val_bpb, self.val_other = score.loss, score.bits_per_byte, score.other
        self.val_step, self.val_whole, self.val_final = self.step, score.rows == score.rows_of, final
        self.val_rows, self.val_rows_of, self.val_stride = score.rows, score.rows_of, score.stride

    def record_best(self, score: Score) -> bool:
        """If this step's score is the best so far, store it and return True; a score that is not finite is never the best."""
        bpb = score.bits_per_byte
        by: list[int | str | None] = [score.rows, score.stride, score.rule]
        # Scores that differ in rows, stride or rule are not comparable: after a change, the first score counts as the best.
        best = math.isfinite(bpb) and (self.best_bpb is None or self.best_by not in ([], by) or not self.best_bpb <= bpb)
        if best:
            self.best_step, self.best_bpb, self.best_by = self.step, bpb, by
        return best

    def position(self, seconds: float) -> Position:
        """Return the position of the next step; `seconds` is the training time that the ranks have agreed on."""
        return Position(self.step, self.sample, self.tokens, seconds, tuple(self.starts), self.phases_begun, self.places)


def read_progress(checkpoint: Checkpoint) -> Progress:
    """Read the progress from a checkpoint; raise CheckpointError if a value is invalid."""
    names = {field.name for field in fields(Progress)}
    try:
        progress = TypeAdapter(Progress).validate_python({k: v for k, v in checkpoint.progress.items() if k in names})
        counts = [progress.step, progress.sample, progress.tokens, progress.phases_begun, *progress.starts]
        seconds = [progress.elapsed_seconds, progress.evaluation_seconds]
        if not all(0 <= number < MOST for number in [*counts, *seconds, *progress.places.values()]):
            raise ValueError
    except (TypeError, ValueError):  # pydantic's ValidationError is a ValueError
        raise CheckpointError(f"{checkpoint.path} is damaged: its progress record is invalid") from None
    return progress


def find_state(config: Config, folder: RunFolder, facts: dict[str, Any], say: Callable[[str], None]) -> Checkpoint | None:
    """Return the checkpoint to resume from, or None; a checkpoint named by training.resume is first copied to the run folder."""
    checkpoint, named = newest_valid(folder.checkpoints, say), config.training.resume
    if checkpoint is None and named == "auto":
        refuse_lost(folder.path)
    source = resume_source(named, folder.path, checkpoint) if named not in ("auto", "never") else None
    if source is None or checkpoint is not None:  # no source is named, or an earlier session has copied it
        if checkpoint is not None:
            check_fits(checkpoint, facts)
        return checkpoint
    original = load_checkpoint(source)
    check_fits(original, facts)
    # Start a new Weights & Biases run too: two runs that log to the original one would overwrite each other's metrics.
    origin = named if is_url(named) else str(named_path(named, folder.path).resolve())
    progress = {**original.progress, "resumed_from": origin, "wandb_id": None}
    with writing(folder.checkpoints):
        tensors = {group: list(records.values()) for group, records in original.tensors.items()}
        copy = save_checkpoint(folder.checkpoints, original.step, tensors, progress)
    say(f"starting from the state of {original.path}")
    return replace(original, path=copy, progress=progress, kind="regular")


def refuse_lost(folder: Path) -> None:
    """Raise an error if a run's checkpoints have been deleted, because the run would restart and overwrite its records."""
    state = read_state(folder)
    if state is not None and state.checkpoint is not None and not saved_steps(folder / "checkpoints"):
        lost = f"{folder} has saved {state.checkpoint}, but {folder / 'checkpoints'} holds no checkpoint"
        advice = "restore the checkpoints (is their disk mounted?) or choose another {0}"
        raise CheckpointError(lost, Setting("training.output_dir"), advice=advice)


def refuse_occupied(folder: Path) -> None:
    """Raise an error if a run that must not resume would start in a folder that already contains checkpoints."""
    if saved_steps(folder / "checkpoints"):
        named = Setting("training.resume", "never"), Setting("training.output_dir"), Setting("training.resume", "auto")
        raise CheckpointError(f"{folder} already contains a run and {{0}} is set", *named, advice="choose another {1} or set {2}")


def facts_of(config: Config, dataset: Dataset) -> dict[str, Any]:
    """Return the metadata of checkpoints and exported models: the config, the tokenizer, and fingerprints of the inputs."""
    model_file = config.model.file if isinstance(config.model, FileSettings) else None
    return {
        "config": config.model_dump(mode="json"),
        "tokenizer": dataset.tokenizer.spec(),
        "tokenizer_fingerprint": dataset.tokenizer.fingerprint(),
        "vocab_size": dataset.tokenizer.vocab_size,
        "data_fingerprint": dataset.fingerprint,
        "model_file_sha256": _sha256(model_file),
        "already_read_sha256": _sha256(config.data.already_read),
    }


def _sha256(name: str | None) -> str | None:
    path = user_path(name) if name is not None else None
    return file_sha256(path) if path is not None and path.is_file() else None


def check_fits(checkpoint: Checkpoint, facts: dict[str, Any]) -> None:
    """Raise an error if the data or the settings that must not change differ from those of the checkpoint."""
    try:
        changed = changes(checkpoint.progress, facts)
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{checkpoint.path} is damaged: it lacks the metadata of its run") from None
    if changed:
        raise CannotContinue(checkpoint.path, changed)


def changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return the changes in the data and in FIXED settings from a checkpoint's metadata (`was`) to the current run (`now`)."""
    changed = []
    for section, names in FIXED.items():
        saved, current = was["config"][section], now["config"][section]
        for name in names or sorted((saved.keys() | current.keys()) - {"file"}):
            if saved.get(name) != current.get(name):
                changed.append(Change(f"{section}.{name}", saved.get(name), current.get(name)))
    mixed = ["set" if any(facts["config"]["data"].get(name) for name in ("mix", "phases")) else "empty" for facts in (was, now)]
    others: dict[str, tuple[Any, Any, str]] = {
        "data.mix": (
            mixed[0], mixed[1],
            "{0} and data.phases were {1} and are now {2}: only runs with a mix track how far each bucket has been read",
        ),
        "model.file": (was.get("model_file_sha256"), now["model_file_sha256"], "the contents of {0} have changed"),
        "data.already_read": (
            was.get("already_read_sha256"), now.get("already_read_sha256"),
            "{0} lists different documents than at the start of the run, so the rows would differ",
        ),
        "data.path": (
            was["data_fingerprint"], now["data_fingerprint"],
            f"it was trained on data with the fingerprint {was['data_fingerprint']:.12}, "
            f"but {now['config']['data']['path']} has the fingerprint {now['data_fingerprint']:.12}",
        ),
    }  # fmt: skip
    return changed + [Change(name, *change) for name, change in others.items() if change[0] != change[1]]


def starts_fresh(config: Config) -> bool:
    """Return True if training.resume names no checkpoint and the run folder contains none."""
    folder = config.training.output_dir
    saved = folder is not None and bool(saved_steps(local_path(folder) / "checkpoints"))
    return config.training.resume in ("auto", "never") and not saved


def load_initial_weights(config: Config, backend: Backend, tokenizer: Tokenizer) -> None:
    """Load training.weights into the backend; on a mismatch, raise an error with the settings that would match."""
    weights = open_weights(local_run(str(config.training.weights)))
    try:
        backend.load_weights(weights.tensors, str(weights.path))
    except CheckpointError as error:
        raise _misfit(config, weights, tokenizer, error) from None


def check_initial_weights(config: Config, tokenizer: Tokenizer | None) -> None:
    """Raise an error if training.weights is missing or damaged, or if its parameter count differs from that of the model."""
    path = locate_weights(local_run(str(config.training.weights)))
    if is_checkpoint(path) or tokenizer is None:  # reading gpt-simple's weights would require importing torch
        return
    weights, size = open_weights(path), model_size(config, tokenizer.vocab_size)
    parameters = sum(math.prod(record.shape) for record in weights.tensors.values())
    if size is not None and parameters != size.total:
        message = f"{weights.path} has {parameters:,} parameters, but this model has {size.total:,}"
        raise _misfit(config, weights, tokenizer, CheckpointError(message))


def _misfit(config: Config, weights: Weights, tokenizer: Tokenizer, error: CheckpointError) -> CheckpointError:
    """Return an error that says which settings would make the model fit the weights, or `error` if no settings would."""
    was, now = weights.config.model, config.model
    ours, defaults = now.model_dump(), FAMILIES[was.family].model_fields
    needed = [
        Setting(f"model.{name}", value)
        for name, value in was.model_dump().items()
        if name not in NOT_COMPARED and value != ours.get(name, defaults[name].default)
    ]
    had, has = was.vocab_size or weights.facts.get("vocab_size"), now.vocab_size or tokenizer.vocab_size
    if had is not None and had != has:
        if tokenizer.vocab_size > had or weights.facts.get("tokenizer_fingerprint") not in (None, tokenizer.fingerprint()):
            kind = (weights.facts.get("tokenizer") or {}).get("kind", "another")
            differs = f"{had:,} ids ({kind}), but the data has a tokenizer of {tokenizer.vocab_size:,} ids ({tokenizer.kind})"
            advice = "prepare the text with the tokenizer of the weights and set {0} to the prepared data"
            return CheckpointError(
                f"{weights.path} was trained with a tokenizer of {differs}", Setting("data.path"), advice=advice
            )
        needed.append(Setting("model.vocab_size", had))
    context, seq_len = was.context or weights.config.data.seq_len, config.data.seq_len
    if was.family == "gpt2" and (now.context or seq_len) != context:  # gpt2 has learned positional embeddings
        needed += [Setting("data.seq_len", context)] if seq_len > context else []
        needed += [Setting("model.context", context)] if seq_len < context or now.context is not None else []
    if not needed:
        return error
    listed = ", ".join(f"{{{number}}}" for number in range(len(needed)))
    return CheckpointError(f"{weights.path} does not fit this model", *needed, advice=f"set {listed}")


def check_sources(config: Config, folder: RunFolder, facts: dict[str, Any]) -> None:
    """Raise an error if --force would delete the weights or checkpoint to start from, or if the checkpoint is incompatible."""
    sources = {"training.weights": config.training.weights, "training.resume": config.training.resume}
    for setting, value in sources.items():
        if value in (None, "auto", "never"):
            continue
        path = local_path(str(value))
        if path.resolve().is_relative_to(folder.path.resolve()):
            raise ConfigError(
                "{0} is in the folder that --force deletes", Setting(setting, value), advice="leave out --force or that setting"
            )
        if setting == "training.resume":
            check_fits(find_checkpoint(path), facts)


def fetch_runs(config: Config) -> None:
    """Download the runs at the URLs in training.output_dir and training.resume; finish the upload of a completed run."""
    training = config.training
    for name in filter(is_url, filter(None, (training.output_dir, training.resume))):
        folder = local_run(name)
        if name == training.output_dir and completed_result(config) is not None and ranks_from_environment().first:
            RunMirror(name, folder, training).sync()


def completed_result(config: Config, require_files: bool = True) -> TrainingResult | None:
    """Return the run's result if it completed with equivalent settings and, with `require_files`, its files exist; else None."""
    if config.training.output_dir is None or config.training.resume == "never":
        return None
    folder = local_path(config.training.output_dir)
    result, saved = read_training_result(folder), saved_config(folder)
    if saved is None and not require_files:
        with suppress(ConfigError):
            saved = Run(folder).config
    if result is None or result.status != "completed" or saved is None or decisive_settings(saved) != decisive_settings(config):
        return None
    missing = result.total_steps not in saved_steps(folder / "checkpoints")
    missing |= result.artifact_path is not None and not result.artifact_path.is_file()
    return None if missing and require_files else result


def saved_config(folder: Path) -> Config | None:
    """Return the config stored in a run's newest checkpoint; None if there is no checkpoint or the config cannot be parsed."""
    steps = saved_steps(folder / "checkpoints")
    try:
        return Config.model_validate(read_index(steps[max(steps)])["progress"]["config"]) if steps else None
    except (CheckpointError, ValidationError, KeyError, TypeError):
        return None


def decisive_settings(config: Config) -> dict[str, Any]:
    """Return the settings that affect a run's result, by name."""
    leaves = {".".join(path): value for path, value in leaf_values(config)}
    return {name: value for name, value in leaves.items() if name not in NOT_DECISIVE and not name.startswith("tracking.")}
