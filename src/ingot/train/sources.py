"""What a run begins with and did not make: weights, another run's checkpoint, a config.yaml; what --force may not delete."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ingot.artifact.gpt_simple import is_checkpoint
from ingot.backends.base import Backend
from ingot.config.families import FAMILIES
from ingot.config.fields import leaf_values
from ingot.config.loading import load_config
from ingot.config.schema import Config
from ingot.config.size import model_size
from ingot.data.tokenizers import Tokenizer
from ingot.errors import CheckpointError, ConfigError, Setting
from ingot.runs.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from ingot.runs.finding import find_checkpoint, find_named
from ingot.runs.folder import RunFolder
from ingot.runs.steps import named_path, saved_steps
from ingot.runtime.files import user_path, writing
from ingot.train.resume import check_fits
from ingot.trained.weights import Weights, locate_weights, open_weights

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
    found = find_named(named, folder.path, newest)
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
