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

from ingot.errors import CheckpointError, Setting, Unreadable
from ingot.runs.steps import DAMAGED, INDEX, PARTIAL, Kind, saved_steps
from ingot.runs.telling import tells_all
from ingot.runtime.files import fsync_dir, read_dict, read_json, sweep_temporaries, write_atomically
from ingot.runtime.tensors import ITEM_BYTES, TensorRecord, read_tensors, write_tensors

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
    if not tells_all(record):
        raise CheckpointError(f"{file} is damaged: it does not tell what a checkpoint holds")
    return record


def newest_sound(folder: Path, warn: Callable[[str], None], look_only: bool = False) -> Checkpoint | None:
    """The newest checkpoint that is whole, None where there are none; damaged ones are named to `warn` and put aside.

    One that cannot be read is no reason to go back: it may be sound. With `look_only` nothing is put aside.
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
            if look_only:
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


def note_progress(path: Path, progress: Mapping[str, Any], kind: Kind | None = None) -> None:
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
