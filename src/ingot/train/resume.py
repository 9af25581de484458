"""What a run may not change between its sessions, and how a session goes on from a checkpoint."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ingot.artifact.gpt_simple import is_checkpoint
from ingot.backends.base import Backend
from ingot.config.fields import leaf_values
from ingot.config.loading import load_config
from ingot.config.schema import FAMILIES, Config
from ingot.config.size import model_size
from ingot.data.store.dataset import Dataset
from ingot.data.tokenizers import Tokenizer
from ingot.errors import CannotContinue, Change, CheckpointError, ConfigError, Setting
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
from ingot.runs.state import TrainingResult, read_state, read_training_result
from ingot.runs.view import Run
from ingot.runtime.files import user_path, writing
from ingot.train.saver import Progress

# What a checkpoint tells of where its run stood, checked before anything goes on from there.


def read_progress(checkpoint: Checkpoint) -> Progress:
    """Where a run stood; CheckpointError where what is told of it cannot be."""
    known, told = {one.name for one in fields(Progress)}, dict(checkpoint.progress)
    try:
        if "phases" in told:  # of versions that kept where each of them began
            told["phases_begun"] = len(told["phases"])
        found = TypeAdapter(Progress).validate_python({k: v for k, v in told.items() if k in known})
        numbers = [found.step, found.sample, found.tokens, found.elapsed_seconds, found.evaluation_seconds, found.phases_begun]
        if not all(0 <= number < MOST for number in [*numbers, *found.starts, *found.places.values()]):
            raise ValueError
    except (TypeError, ValueError):  # pydantic's too
        raise CheckpointError(f"{checkpoint.path} is damaged: it does not say where its run stood") from None
    return found


# What a run may not change between its sessions, because the state it saved would mean something else.
FIXED: dict[str, tuple[str, ...]] = {
    "model": (),  # everything
    "data": ("seq_len", "sampling", "spans", "overlap", "document_mask", "seed"),
    "optimizer": ("name", "groups"),
    "training": ("tokens_per_step", "stages", "seed"),
}
UNSAID: dict[str, Any] = {"groups": [], "stages": [], "overlap": 0}  # what they were in runs of versions that did not have them


def resume(backend: Backend, checkpoint: Checkpoint | None) -> Progress:
    """Put a checkpoint's state into the backend; without one, the start of a run."""
    if checkpoint is None:
        return Progress()
    backend.load(checkpoint.tensors)
    checkpoint.tensors.clear()  # the backend has them now, and this run may go on for weeks
    return read_progress(checkpoint)


def find_state(config: Config, folder: RunFolder, facts: dict[str, Any], say: Callable[[str], None]) -> Checkpoint | None:
    """The checkpoint in the run's folder that a session goes on from; one that training.resume names is copied there first."""
    found = newest_valid(folder.checkpoints, say)
    if found is None and config.training.resume == "auto":
        refuse_lost(folder.path)
    if config.training.resume not in ("auto", "never"):
        found = copy_named(config.training.resume, folder, found, facts, say)
    if found is not None:
        check_fits(found, facts)
    return found


def refuse_lost(folder: Path) -> None:
    """Refuse a run that has saved and whose checkpoints are not there: it would begin again, and lose what it has recorded."""
    state = read_state(folder)
    if state is not None and state.checkpoint is not None and not saved_steps(folder / "checkpoints"):
        raise CheckpointError(
            f"{folder} has saved {state.checkpoint} and {folder / 'checkpoints'} holds no checkpoint",
            Setting("training.output_dir"),
            advice="bring them back (are they on a disk that is not mounted?) or choose another {0}",
        )


def refuse_occupied(folder: Path) -> None:
    """Refuse to begin a run where one is that must not be continued."""
    if saved_steps(folder / "checkpoints"):
        raise CheckpointError(
            f"{folder} holds a run and {{0}}",
            Setting("training.resume", "never"),
            Setting("training.output_dir"),
            Setting("training.resume", "auto"),
            advice="choose another {1} or set {2}",
        )


def facts_of(config: Config, dataset: Dataset) -> dict[str, Any]:
    """What a checkpoint or an exported model says of itself, enough to rebuild it without the run folder."""
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
    """What a file has in it; None where there is none."""
    path = user_path(name) if name is not None else None
    return hashlib.sha256(path.read_bytes()).hexdigest() if path is not None and path.is_file() else None


def check_fits(checkpoint: Checkpoint, facts: dict[str, Any]) -> None:
    """Refuse to continue a run with settings or data that would make it another one."""
    try:
        changed = changes(checkpoint.progress, facts)
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{checkpoint.path} is damaged: it does not say what run it is of") from None
    if changed:
        raise CannotContinue(checkpoint.path, changed)


def changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """What makes another run of one: settings and data by what its checkpoint says of itself, and by what is now."""
    changed = []
    for section, names in FIXED.items():
        before, after = {**UNSAID, **was["config"][section]}, now["config"][section]
        for name in names or sorted((was["config"][section].keys() | after.keys()) - {"file"}):
            if (name in before or not names) and before.get(name) != after.get(name):
                changed.append(Change(f"{section}.{name}", before.get(name), after.get(name)))
    mixes = [{name: known["config"]["data"].get(name) for name in ("mix", "phases")} for known in (was, now)]
    if any(mixes[0].values()) != any(mixes[1].values()):
        was_set, is_set = ("set" if any(mix.values()) else "empty" for mix in mixes)
        said = "{0} and data.phases were {1} and are {2}: how far each bucket has been read is known only of runs with a mix"
        changed.append(Change("data.mix", was_set, is_set, said))
    if was.get("model_file_sha256") != now["model_file_sha256"]:
        said = "the contents of {0} are not what they were"
        changed.append(Change("model.file", was.get("model_file_sha256"), now["model_file_sha256"], said))
    left_out = now.get("already_read_sha256")
    if was.get("already_read_sha256", left_out) != left_out:  # runs of versions without it do not say
        said = "the documents that {0} names are not those that it named: rows would be other ones"
        changed.append(Change("data.already_read", was["already_read_sha256"], left_out, said))
    if was["data_fingerprint"] != now["data_fingerprint"]:
        prints = [known["data_fingerprint"][:12] for known in (was, now)]
        said = f"it was trained on other data than {now['config']['data']['path']} (fingerprint {{1}} and {{2}})"
        changed.append(Change("data.path", prints[0], prints[1], said))
    return changed


# What a run begins with and did not make: weights, another run's checkpoint, a config.yaml; what --force may not delete.

NOT_COMPARED = ("context", "vocab_size", "dropout", "file")  # two by what they come to, two that decide no shape


def begins_new(config: Config) -> bool:
    """Whether a run seems to have no state of its own to go on from."""
    return config.training.resume in ("auto", "never") and not has_state(config)


def has_state(config: Config) -> bool:
    """Whether there are checkpoints in the folder of a run."""
    folder = config.training.output_dir
    return folder is not None and bool(saved_steps(user_path(folder) / "checkpoints"))


def begin_with_weights(config: Config, backend: Backend, tokenizer: Tokenizer) -> None:
    """Put the weights that training.weights names into the backend; those that do not fit are told with what would make them."""
    weights = open_weights(user_path(str(config.training.weights)))
    try:
        backend.load_weights(weights.tensors, str(weights.path))
    except CheckpointError as error:
        raise (_misfit(config, weights, tokenizer) or error) from None


def check_weights(config: Config, tokenizer: Tokenizer | None) -> None:
    """Refuse what training.weights names where it is not there, is damaged or has not the parameters of this model.

    No framework is loaded, so of gpt-simple's files, which are torch's, no more is known than that they are there.
    """
    found = locate_weights(user_path(str(config.training.weights)))
    if is_checkpoint(found):
        return
    weights = open_weights(found)
    size = model_size(config, tokenizer.vocab_size) if tokenizer is not None else None
    held = sum(math.prod(record.shape) for record in weights.tensors.values())
    if size is not None and tokenizer is not None and held != size.total:
        told = f"{weights.path} has {held:,} parameters and this model {size.total:,}"
        raise _misfit(config, weights, tokenizer) or CheckpointError(told)


def _misfit(config: Config, weights: Weights, tokenizer: Tokenizer) -> CheckpointError | None:
    """What is said of weights that are not of this model; None where no setting would make them so."""
    needed = _needed(config, weights, tokenizer)
    told = ", ".join(f"{{{number}}}" for number in range(len(needed)))
    return CheckpointError(f"{weights.path} does not fit this model", *needed, advice=f"set {told}") if needed else None


def _needed(config: Config, weights: Weights, tokenizer: Tokenizer) -> list[Setting]:
    """The settings with which the model would be the one that weights are of."""
    was, now = weights.config.model, config.model
    ours, usual = now.model_dump(), FAMILIES[was.family].model_fields
    differ = {
        name: value
        for name, value in was.model_dump().items()
        if name not in NOT_COMPARED and value != ours.get(name, usual[name].default)
    }
    found = [Setting(f"model.{name}", value) for name, value in differ.items()]
    had, has = was.vocab_size or weights.facts.get("vocab_size"), now.vocab_size or tokenizer.vocab_size
    if had is not None and had != has:
        if tokenizer.vocab_size > had or weights.facts.get("tokenizer_fingerprint") not in (None, tokenizer.fingerprint()):
            kind = (weights.facts.get("tokenizer") or {}).get("kind", "another")
            raise CheckpointError(
                f"{weights.path} was trained with a tokenizer of {had:,} ids ({kind}) and the data has one of "
                f"{tokenizer.vocab_size:,} ({tokenizer.kind})",
                Setting("data.path"),
                advice="prepare the text with the tokenizer of the weights and set {0} to that",
            )
        found.append(Setting("model.vocab_size", had))
    sees, rows = was.context or weights.config.data.seq_len, config.data.seq_len
    if was.family == "gpt2" and (now.context or rows) != sees:  # which learns a vector for each place
        found += [Setting("data.seq_len", sees)] if rows > sees else []
        found += [Setting("model.context", sees)] if rows < sees or now.context is not None else []
    return found


def copy_named(
    named: str, folder: RunFolder, newest: Checkpoint | None, facts: dict[str, Any], say: Callable[[str], None]
) -> Checkpoint:
    """A copy, in the run's folder, of the checkpoint that training.resume names; or what an earlier session made of it."""
    found = resume_source(named, folder.path, newest)
    if newest is not None:
        return newest  # it is what is named, or begins with a copy of that
    source = load_checkpoint(found)
    check_fits(source, facts)
    # A run of its own at Weights & Biases too: two branches that write into the trunk's would lose each other's numbers there.
    progress = {**source.progress, "resumed_from": str(named_path(named, folder.path).resolve()), "wandb_id": None}
    with writing(folder.checkpoints):
        tensors = {group: list(records.values()) for group, records in source.tensors.items()}
        copy = save_checkpoint(folder.checkpoints, source.step, tensors, progress)
    say(f"begins with the state of {source.path}")
    return replace(source, path=copy, progress=progress, kind="regular")


def check_sources(config: Config, folder: RunFolder, facts: dict[str, Any]) -> None:
    """Refuse to empty a folder for a run that would begin with what lies in it, or with a state that does not fit."""
    named = {"training.weights": config.training.weights, "training.resume": config.training.resume}
    for setting, value in named.items():
        if value in (None, "auto", "never"):
            continue
        path = user_path(str(value))
        if path.resolve().is_relative_to(folder.path.resolve()):
            what = Setting(setting, value)
            raise ConfigError("{0} lies in the folder that --force empties", what, advice="leave out one of them")
        if setting == "training.resume":
            check_fits(find_checkpoint(path), facts)


def besides_config(config: Config, folder: RunFolder) -> dict[str, Any]:
    """What of a config its folder's config.yaml does not say; where a run lies and goes on is seen by every session."""
    try:
        alone = dict(leaf_values(load_config(file=folder.config_path, environment={}).config))
    except ConfigError:  # it needs what was set besides
        alone = {}
    differing = {".".join(path): value for path, value in leaf_values(config) if path not in alone or alone[path] != value}
    return {name: value for name, value in differing.items() if name not in ("training.output_dir", "training.resume")}


# Whether a run is complete already: the same settings given again would take no step and score it a second time.

COMPLETE = "{} is complete: raise training.max_steps or budget.seconds to go on, or begin anew"
# What does not decide what a run comes to.
NOT_DECISIVE = ("training.output_dir", "training.resume", "training.max_runtime_seconds", "training.walltime_reserve_seconds")


def completed(config: Config, kept: bool = True) -> TrainingResult | None:
    """What the run in training.output_dir came to, where it is complete with these very settings.

    `kept`: only if its last checkpoint and its artifact are still there.
    """
    if config.training.output_dir is None or config.training.resume == "never":
        return None
    folder = user_path(config.training.output_dir)
    result, saved = read_training_result(folder), saved_config(folder)
    if saved is None and not kept:
        with suppress(ConfigError):
            saved = Run(folder).config
    if result is None or result.status != "completed" or saved is None or compared(saved) != compared(config):
        return None
    lost = result.total_steps not in saved_steps(folder / "checkpoints")
    lost |= result.artifact_path is not None and not result.artifact_path.is_file()
    return None if lost and kept else result


def saved_config(folder: Path) -> Config | None:
    """Every setting of a run as its newest checkpoint knows it; None where there is none that this version understands."""
    steps = saved_steps(folder / "checkpoints")
    try:
        return Config.model_validate(read_index(steps[max(steps)])["progress"]["config"]) if steps else None
    except (CheckpointError, ValidationError, KeyError, TypeError):
        return None


def compared(config: Config) -> dict[str, Any]:
    """The settings that decide what a run comes to, by their names."""
    leaves = {".".join(path): value for path, value in leaf_values(config)}
    return {name: value for name, value in leaves.items() if name not in NOT_DECISIVE and not name.startswith("tracking.")}
