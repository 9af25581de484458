"""What a run may not change between its sessions, and how a session goes on from a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ingot.backends.base import Backend
from ingot.config.schema import Config
from ingot.data.store.dataset import Dataset
from ingot.errors import CannotContinue, Change, CheckpointError, Setting
from ingot.model.settings import FileSettings
from ingot.runs.checkpoints import Checkpoint, newest_sound
from ingot.runs.folder import RunFolder
from ingot.runs.state import read_state
from ingot.runs.steps import saved_steps
from ingot.runtime.files import user_path
from ingot.train.progress import Progress
from ingot.train.reading import read_progress

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
    found = newest_sound(folder.checkpoints, say)
    if found is None and config.training.resume == "auto":
        refuse_lost(folder.path)
    if config.training.resume not in ("auto", "never"):
        from ingot.train.sources import copy_named  # here: it asks this file what fits

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
