"""Checkpoints: folders that are either whole or not there.

`checkpoints/step-00000040/` holds safetensors files and checkpoint.json, which names every tensor, its shape and place, the
checksum of every file and of itself, and all that the loop needs to go on. It is written under another name, synced and renamed,
so a kill at any moment leaves the checkpoints before it untouched.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, get_args

import numpy as np

from ingot.errors import CheckpointError, ConfigError, Setting, Unreadable
from ingot.runs.folder import DAMAGED, INDEX, PARTIAL, Kind, named_path, saved_steps
from ingot.runtime.files import fsync_dir, read_dict, read_json, sweep_temporaries, write_atomically
from ingot.runtime.tensors import ITEM_BYTES, TensorRecord, read_tensors, write_tensors

# Whether checkpoint.json tells all that is asked of it: a checksum says only that it is what somebody wrote.


def _is_complete(record: Mapping[str, Any]) -> bool:
    """Whether a record that is what somebody wrote is one that can be read: names, sizes and places of all tensors."""

    def counts(values: Any) -> bool:
        return all(type(value) is int and value >= 0 for value in values)

    try:
        files, tensors = record["files"], record["tensors"]
        entries = [entry for group in tensors.values() for entry in group.values()]
        return (
            counts([record["step"]])
            and isinstance(record["progress"], dict)
            and "model" in tensors
            and all(
                Path(file).name == file and counts([f["bytes"]]) and isinstance(f["sha256"], str) for file, f in files.items()
            )
            and all(entry["dtype"] in ITEM_BYTES and counts(entry["shape"]) and len(entry["parts"]) for entry in entries)
            and all(
                part["file"] in files and counts(part["offset"]) and len(part["offset"]) == len(entry["shape"])
                for entry in entries
                for part in entry["parts"]
            )
        )
    except (KeyError, TypeError, AttributeError):
        return False


VERSION = 1

Tensors = Mapping[str, list[TensorRecord]]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and found sound."""

    path: Path
    step: int
    progress: dict[str, Any]
    tensors: dict[str, dict[str, TensorRecord]]
    kind: Kind = "regular"

    @property
    def weights(self) -> dict[str, TensorRecord]:
        """What the model is judged by: the average of the weights where one was kept, else the weights."""
        return {**self.tensors["model"], **self.tensors.get("ema", {})}


def save_checkpoint(folder: Path, step: int, tensors: Tensors, progress: Mapping[str, Any], kind: Kind = "regular") -> Path:
    """Write a checkpoint and return its path when it is on the disk."""
    final = folder / f"step-{step:08d}"
    partial = folder / (final.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        record: dict[str, Any] = {
            "format": "ingot-checkpoint",
            "version": VERSION,
            "step": step,
            "kind": kind,
            "progress": dict(progress),
            "files": {},
            "tensors": {},
        }
        for name, records in tensors.items():
            file = f"{name}.safetensors"
            size, sha256 = write_tensors(partial / file, records)
            record["files"][file] = {"bytes": size, "sha256": sha256}
            # One process holds all of every tensor, so each has one part, at offset zero; shards of a tensor are more parts.
            record["tensors"][name] = {
                r.name: {"dtype": r.dtype, "shape": list(r.shape), "parts": [{"file": file, "offset": [0] * len(r.shape)}]}
                for r in records
            }
        record["sha256"] = _checksum(record)
        write_atomically(partial / INDEX, json.dumps(record))
        partial.rename(final)
        fsync_dir(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and verify every byte; CheckpointError says what is wrong with a damaged one."""
    record = read_index(path)
    files = {file: _read_file(path / file, known["sha256"]) for file, known in record["files"].items()}
    held = {(file, name) for file, tensors in files.items() for name in tensors}
    named = {
        (part["file"], n) for tensors in record["tensors"].values() for n, entry in tensors.items() for part in entry["parts"]
    }
    for file, _ in sorted(held ^ named):
        raise CheckpointError(f"{path / file} does not hold the tensors that {INDEX} names")
    try:
        tensors = {
            group: {name: _assembled(name, entry, files) for name, entry in entries.items()}
            for group, entries in record["tensors"].items()
        }
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    return Checkpoint(path, record["step"], record["progress"], tensors, record.get("kind", "regular"))


def _read_file(path: Path, sha256: str) -> dict[str, TensorRecord]:
    try:
        return read_tensors(path, sha256)[0]
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (ValueError, IsADirectoryError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise Unreadable(path, error.strerror) from None


def _assembled(name: str, entry: Mapping[str, Any], files: Mapping[str, Mapping[str, TensorRecord]]) -> TensorRecord:
    """A tensor from the parts that one or several processes wrote, each at its offset in the whole."""
    shape, parts = tuple(entry["shape"]), [(files[part["file"]][name], part["offset"]) for part in entry["parts"]]
    whole, offset = parts[0]
    if len(parts) == 1 and (whole.shape, whole.dtype) == (shape, entry["dtype"]) and not any(offset):
        return whole
    if sum(part.data.nbytes for part, _ in parts) != prod(shape) * ITEM_BYTES[entry["dtype"]]:  # before memory is taken
        raise ValueError(f"its parts do not fill {name!r:.100}")
    items = np.zeros((*shape, ITEM_BYTES[entry["dtype"]]), np.uint8)
    filled = np.zeros(shape, np.bool_)
    for part, offset in parts:
        place = tuple(slice(begin, begin + size) for begin, size in zip(offset, part.shape, strict=True))
        if part.dtype != entry["dtype"] or filled[place].shape != part.shape or filled[place].any():
            raise ValueError(f"a part of {name!r:.100} does not fit the tensor")
        items[place] = np.frombuffer(part.data, np.uint8).reshape(*part.shape, -1)
        filled[place] = True
    if not filled.all():
        raise ValueError(f"its parts do not fill {name!r:.100}")
    return TensorRecord(name, entry["dtype"], shape, items.reshape(-1).data)


def read_index(path: Path) -> dict[str, Any]:
    """The checked contents of checkpoint.json."""
    file = path / INDEX
    try:
        record = read_json(file)
        told = record.pop("sha256")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not a checkpoint: it has no {INDEX}") from None
    except (ValueError, KeyError, AttributeError, TypeError, IsADirectoryError, NotADirectoryError):
        raise CheckpointError(f"{file} is damaged: it cannot be read") from None
    except OSError as error:
        raise Unreadable(file, error.strerror) from None
    if isinstance(version := record.get("version"), int) and version > VERSION:
        raise CheckpointError(f"{file} has version {version} and this ingot reads up to {VERSION}; upgrade ingot")
    if told != _checksum(record):
        raise CheckpointError(f"{file} is damaged: its checksum does not match")
    if not _is_complete(record):
        raise CheckpointError(f"{file} is damaged: it does not tell what a checkpoint holds")
    return record


def newest_valid(folder: Path, warn: Callable[[str], None], read_only: bool = False) -> Checkpoint | None:
    """The newest checkpoint that is whole, None where there are none; damaged ones are named to `warn` and put aside.

    One that cannot be read is no reason to go back: it may be sound. With `read_only` nothing is put aside.
    """
    damaged: list[tuple[Path, CheckpointError]] = []
    for path in reversed(saved_steps(folder).values()):
        try:
            sound = load_checkpoint(path)
        except Unreadable:
            raise
        except CheckpointError as error:
            damaged.append((path, error))
            continue
        for bad, why in damaged:
            if read_only:
                warn(f"{why}; {path.name} is taken instead")
                continue
            warn(f"{why}; it is kept as {bad.name}{DAMAGED} and the run goes on from {path.name}")
            shutil.rmtree(bad.with_name(bad.name + DAMAGED), ignore_errors=True)
            bad.rename(bad.with_name(bad.name + DAMAGED))
        return sound
    if damaged:
        what, folder_setting = f"no checkpoint is sound: {damaged[0][1]}", Setting("training.output_dir")
        raise CheckpointError(what, folder_setting, advice="restore one or choose another {0}")
    return None


def read_kind(path: Path) -> Kind:
    """Which kind of checkpoint it is; what cannot be read, and those of versions that knew no kinds, are regular ones."""
    kind: Any = (read_dict(path / INDEX) or {}).get("kind")
    return kind if kind in get_args(Kind) else "regular"


def update_progress(path: Path, progress: Mapping[str, Any], kind: Kind | None = None) -> None:
    """Give a checkpoint another progress, and perhaps another kind; its tensors stay as they are."""
    before = read_index(path)
    record = {**before, "kind": kind or before.get("kind", "regular"), "progress": dict(progress)}
    write_atomically(path / INDEX, json.dumps({**record, "sha256": _checksum(record)}))


def sweep(folder: Path) -> None:
    """Remove what killed saves, and kills while a saved one was noted in, left behind."""
    for leftover in folder.glob(f"step-*{PARTIAL}"):
        shutil.rmtree(leftover, ignore_errors=True)
    for path in saved_steps(folder).values():
        sweep_temporaries(path)


def _checksum(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# Which checkpoint is meant: by a path, by a run folder, and by the setting training.resume.

OnSkipped = Callable[[Path, CheckpointError], None]  # is told of a checkpoint that is damaged
NAME_A_CHECKPOINT = "name a checkpoint or a run folder, auto or never"


@dataclass(frozen=True)
class Index:
    """A checkpoint by what its checkpoint.json says; the tensors are not read."""

    path: Path
    step: int
    progress: dict[str, Any]


def find_checkpoint(path: Path, which: str = "latest") -> Checkpoint:
    """The checkpoint that a path means: itself, or the latest or best one of a run folder."""
    return load_checkpoint(locate_checkpoint(path, which))


def locate_checkpoint(path: Path, which: str = "latest") -> Path:
    """Where that checkpoint is; its tensors are not read."""
    if which not in ("latest", "best"):
        raise ConfigError(f"which checkpoint is {which!r}; choose latest or best")
    if (path / INDEX).is_file():
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    steps = saved_steps(folder)
    if not steps:
        raise CheckpointError(f"there is no checkpoint in {path}; give a run folder, a checkpoint or an artifact")
    newest = steps[max(steps)]
    if which == "latest":
        return newest
    best = read_index(newest)["progress"].get("best_step")
    if best not in steps:
        why = "it was not evaluated" if best is None else f"its best score is that of step {best}, which is not saved"
        raise CheckpointError(f"{path} has no best checkpoint: {why}; use the latest")
    return steps[best]


def resume_point(asked: str, run: Path | None, skipped: OnSkipped = lambda path, error: None) -> Index | None:
    """What a run in this folder goes on from, by training.resume; None where it begins."""
    if asked == "never":
        return None
    newest = newest_index(run, skipped)
    return newest if asked == "auto" else open_index(resume_source(asked, run, newest))


def newest_index(run: Path | None, skipped: OnSkipped = lambda path, error: None) -> Index | None:
    """The newest checkpoint of a run that is not damaged; None where there is none."""
    for path in reversed(saved_steps(run / "checkpoints").values()) if run is not None else ():
        try:
            return open_index(path)
        except Unreadable:
            raise  # it may be sound: a run does not go back
        except CheckpointError as error:
            skipped(path, error)
    return None


def open_index(path: Path) -> Index:
    """What a checkpoint says of itself."""
    index = read_index(path)
    return Index(path, index["step"], index["progress"])


def resume_source(named: str, run: Path | None, newest: Index | Checkpoint | None) -> Path:
    """The checkpoint that a run begins with because training.resume names it; `newest` is that of the run's own folder.

    `newest` itself, where the same command was given before: an earlier session has begun with a copy of what is named.
    """
    path = named_path(named, run)
    if newest is not None and started_from(newest, path):
        return newest.path
    if not path.exists():
        raise CheckpointError(f"{{0}}: there is no {path}", Setting("training.resume", named), advice=NAME_A_CHECKPOINT)
    source = locate_checkpoint(path)
    if newest is not None and run is not None and source.resolve() != newest.path.resolve():
        why = "has newer checkpoints" if path.resolve().is_relative_to(run.resolve()) else "holds another run"
        raise occupied(named, run, why, newest.step)
    return source


def started_from(newest: Index | Checkpoint, path: Path) -> bool:
    """Whether the run of a checkpoint began with the state of a checkpoint or run that lies elsewhere."""
    return newest.progress.get("resumed_from") == str(path.resolve())


def occupied(named: str, run: Path, why: str, step: int) -> CheckpointError:
    """What is said where a named state cannot be begun with, because the folder has a run that would be lost."""
    return CheckpointError(
        f"{{0}}: {run} {why}, the newest at step {step}",
        Setting("training.resume", named),
        Setting("training.output_dir"),
        Setting("training.resume", "auto"),
        advice="choose another {1} to go on from there, or go on with this run by {2}",
    )
