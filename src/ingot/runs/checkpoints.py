"""Checkpoints: folders that are written atomically.

`checkpoints/step-00000040/` holds safetensors files and checkpoint.json, which lists every tensor with its shape and offset, the
checksum of every file and of itself, and everything the training loop needs to resume. A checkpoint is written under a temporary
name, synced and renamed, so a kill at any moment leaves the earlier checkpoints untouched. In a sharded run, every rank writes
its rows of each tensor to separate files; the first rank waits for these files, lists them in checkpoint.json and renames the
folder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from ingot.errors import CheckpointError, ConfigError, Setting, Unreadable
from ingot.runs.folder import DAMAGED, INDEX, PARTIAL, Kind, named_path, saved_steps
from ingot.runtime.files import fsync_dir, read_dict, read_json, sweep_temporaries, write_atomically
from ingot.runtime.tensors import TensorRecord, read_tensors, write_tensors

VERSION, UNSHARDED = 2, 1  # in version 2, a tensor can have several parts; in version 1, every tensor has one
PART_INDEX = "part-{:05d}.json"  # the index of one rank's part, until the first rank has merged it into checkpoint.json
PART_WAIT_SECONDS = 1800.0  # how long the first rank waits for the parts of the other ranks

Tensors = Mapping[str, list[TensorRecord]]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has been read and verified; `tensors` is empty if only checkpoint.json was read."""

    path: Path
    step: int
    progress: dict[str, Any]
    tensors: dict[str, dict[str, TensorRecord]]
    kind: Kind = "regular"

    @property
    def weights(self) -> dict[str, TensorRecord]:
        """Return the weights to evaluate: their moving average (EMA) if there is one, else the raw weights."""
        return {**self.tensors["model"], **self.tensors.get("ema", {})}


def begin_checkpoint(folder: Path, step: int) -> Path:
    """Create the empty folder into which the parts of a checkpoint are written, and return its path."""
    partial = folder / f"step-{step:08d}{PARTIAL}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    return partial


def save_checkpoint(
    folder: Path, step: int, tensors: Tensors, progress: Mapping[str, Any], kind: Kind = "regular", writers: int = 1
) -> Path:
    """Write a checkpoint and return its path once it is on disk.

    If several ranks (`writers`) write it, call `begin_checkpoint` first; the other ranks call `save_part`.
    """
    final = folder / f"step-{step:08d}"
    partial = folder / (final.name + PARTIAL)
    try:
        if writers == 1:
            begin_checkpoint(folder, step)
        record: dict[str, Any] = {
            "format": "ingot-checkpoint",
            "version": UNSHARDED if writers == 1 else VERSION,
            "step": step,
            "kind": kind,
        }
        record |= {"progress": dict(progress), **_write_part(partial, tensors, "")}
        for rank in range(1, writers):
            other = _wait_for_part(partial / PART_INDEX.format(rank))
            record["files"] |= other["files"]
            for group, entries in other["tensors"].items():
                for name, entry in entries.items():
                    record["tensors"][group].setdefault(name, {**entry, "parts": []})["parts"] += entry["parts"]
        record["sha256"] = _checksum(record)
        write_atomically(partial / INDEX, json.dumps(record))
        partial.rename(final)
        fsync_dir(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def save_part(folder: Path, step: int, state: Callable[[], Tensors], rank: int) -> None:
    """Write this rank's part of a checkpoint that `save_checkpoint` completes on the first rank."""
    partial = folder / f"step-{step:08d}{PARTIAL}"
    try:
        index = _write_part(partial, state(), f"-{rank:05d}")
    except Exception as error:
        try:
            write_atomically(partial / PART_INDEX.format(rank), json.dumps({"error": f"rank {rank}: {error}"}))
        except OSError:  # no room for the reason; without the folder, the first rank does not wait either
            shutil.rmtree(partial, ignore_errors=True)
        raise
    write_atomically(partial / PART_INDEX.format(rank), json.dumps(index))


def _write_part(partial: Path, tensors: Tensors, suffix: str) -> dict[str, Any]:
    """Write one rank's tensors; return the entries `files` and `tensors` of the index."""
    files: dict[str, Any] = {}
    listed: dict[str, Any] = {}
    for name, records in tensors.items():
        file = f"{name}{suffix}.safetensors"
        size, sha256 = write_tensors(partial / file, records)
        files[file] = {"bytes": size, "sha256": sha256}
        listed[name] = {}
        for r in records:
            offset, shape = (r.part.offset, r.part.whole) if r.part is not None else ((0,) * len(r.shape), r.shape)
            listed[name][r.name] = {"dtype": r.dtype, "shape": list(shape), "parts": [{"file": file, "offset": list(offset)}]}
    return {"files": files, "tensors": listed}


def _wait_for_part(path: Path) -> dict[str, Any]:
    """Wait for the index of another rank's part; return the index and remove its file."""
    deadline = time.monotonic() + PART_WAIT_SECONDS
    while (index := read_dict(path)) is None:
        if not path.parent.is_dir():
            raise CheckpointError("another rank cannot write its part")
        if time.monotonic() > deadline:
            raise CheckpointError(f"{path.name} did not appear: all ranks must write to the same file system")
        time.sleep(0.02)
    if "error" in index:
        raise CheckpointError(index["error"])
    path.unlink()
    return index


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and verify every byte; raise CheckpointError if it is damaged."""
    record, tensors, files = read_index(path), dict[str, dict[str, TensorRecord]](), dict[str, dict[str, TensorRecord]]()
    reading = path
    try:
        for file, entry in record["files"].items():
            reading = path / file
            files[file], _ = read_tensors(reading, str(entry["sha256"]))
        reading = path
        for group, listed in record["tensors"].items():
            tensors[group] = {}
            for name, entry in listed.items():
                parts = [(tuple(part["offset"]), files[part["file"]].pop(name)) for part in entry["parts"]]
                tensors[group][name] = joined(name, parts, entry["dtype"], tuple(entry["shape"]))
        if any(files.values()):
            raise ValueError(f"the tensor files hold tensors that {INDEX} does not list")
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename} is missing") from None
    except (ValueError, IsADirectoryError) as error:
        raise CheckpointError(f"{reading} is damaged: {error}") from None
    except (KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path} is damaged: the tensors in its files differ from those listed in {INDEX}") from None
    except OSError as error:
        raise Unreadable(reading, error.strerror) from None
    return Checkpoint(path, record["step"], record["progress"], tensors, record.get("kind", "regular"))


def read_index(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's checkpoint.json; raise CheckpointError if it is missing, damaged or too new."""
    file = path / INDEX
    try:
        record = read_json(file)
        checksum = record.pop("sha256")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not a checkpoint: it has no {INDEX}") from None
    except (ValueError, KeyError, AttributeError, TypeError, IsADirectoryError, NotADirectoryError):
        raise CheckpointError(f"{file} is damaged: it cannot be read") from None
    except OSError as error:
        raise Unreadable(file, error.strerror) from None
    if isinstance(version := record.get("version"), int) and version > VERSION:
        raise CheckpointError(f"{file} has version {version}, but this Ingot reads versions up to {VERSION}; upgrade Ingot")
    if checksum != _checksum(record):
        raise CheckpointError(f"{file} is damaged: its checksum does not match")
    step, progress, files, tensors = (record.get(name) for name in ("step", "progress", "files", "tensors"))
    whole = type(step) is int and step >= 0 and all(isinstance(value, dict) for value in (progress, files, tensors))
    # A valid checksum does not make the index trustworthy, so file names must not point outside the folder.
    if not whole or "model" not in tensors or any(Path(name).name != name for name in files):
        raise CheckpointError(f"{file} is damaged: required fields are missing or invalid")
    return record


def newest_valid(folder: Path, warn: Callable[[str], None], read_only: bool = False) -> Checkpoint | None:
    """Return the newest valid checkpoint, or None if the folder has no checkpoint; report and rename damaged checkpoints.

    Raise CheckpointError if all are damaged, or on an I/O error: a checkpoint that cannot be read may be valid, so falling back
    to an older one would lose work. With `read_only`, damaged checkpoints are reported but not renamed.
    """
    damaged: list[tuple[Path, CheckpointError]] = []
    checkpoint = _first_valid(folder, load_checkpoint, lambda path, error: damaged.append((path, error)))
    if checkpoint is None and damaged:
        advice = "restore a checkpoint or choose another {0}"
        raise CheckpointError(f"no checkpoint is valid: {damaged[0][1]}", Setting("training.output_dir"), advice=advice)
    for bad, why in damaged:
        kept = bad.with_name(bad.name + DAMAGED)
        renamed = "" if read_only else f", and the damaged checkpoint is kept as {kept.name}"
        warn(f"{why}; the run resumes from an older checkpoint{renamed}")
        if not read_only:
            shutil.rmtree(kept, ignore_errors=True)
            bad.rename(kept)
    return checkpoint


OnSkipped = Callable[[Path, CheckpointError], object]  # called with each damaged checkpoint


def _first_valid(folder: Path, read: Callable[[Path], Checkpoint], on_skipped: OnSkipped) -> Checkpoint | None:
    for path in reversed(saved_steps(folder).values()):
        try:
            return read(path)
        except Unreadable:
            raise  # the checkpoint may be valid, so an older one must not be used instead
        except CheckpointError as error:
            on_skipped(path, error)
    return None


def read_kind(path: Path) -> Kind:
    """Return the kind of a checkpoint: `regular` if its checkpoint.json is unreadable or contains no kind."""
    kind: Any = (read_dict(path / INDEX) or {}).get("kind")
    return kind if kind in get_args(Kind) else "regular"


def to_keep(saved: Sequence[tuple[int, Kind]], keep_last: int | None, keep_every: int) -> set[tuple[int, Kind]]:
    """Return the last `keep_last` regular checkpoints, the last of each other kind, and those at multiples of `keep_every`."""
    if keep_last is None:
        return set(saved)
    newest = {"regular": keep_last, "shutdown": 1, "final": 1}
    kept = {pair for kind, count in newest.items() for pair in [pair for pair in saved if pair[1] == kind][-count:]}
    return kept | {(step, kind) for step, kind in saved if keep_every and step % keep_every == 0}


def retain(folder: Path, keep_last: int | None, keep_every: int, best: int | None) -> None:
    """Delete the checkpoints that `to_keep` does not select, except the best checkpoint.

    If a checkpoint cannot be deleted, the others are still deleted before OSError is raised.
    """
    saved = {(step, read_kind(path)): path for step, path in saved_steps(folder).items()}
    kept = to_keep(list(saved), keep_last, keep_every)
    failure = None
    for path in [path for (step, kind), path in saved.items() if (step, kind) not in kept and step != best]:
        doomed = path.with_name(path.name + PARTIAL)  # rename first, so that a killed process does not leave half a checkpoint
        try:
            shutil.rmtree(doomed, ignore_errors=True)
            shutil.rmtree(path.rename(doomed))
        except OSError as error:
            failure = error
    if failure is not None:
        raise failure


def update_progress(path: Path, progress: Mapping[str, Any], kind: Kind | None = None) -> None:
    """Replace the progress record of a checkpoint, and its kind if `kind` is given; its tensors stay unchanged."""
    before = read_index(path)
    record = {**before, "kind": kind or before.get("kind", "regular"), "progress": dict(progress)}
    write_atomically(path / INDEX, json.dumps({**record, "sha256": _checksum(record)}))


def sweep(folder: Path) -> None:
    """Remove partial files left behind by killed saves and updates."""
    for leftover in folder.glob(f"step-*{PARTIAL}"):
        shutil.rmtree(leftover, ignore_errors=True)
    for path in saved_steps(folder).values():
        sweep_temporaries(path)


def joined(name: str, parts: Sequence[tuple[tuple[int, ...], TensorRecord]], dtype: str, shape: tuple[int, ...]) -> TensorRecord:
    """Return a tensor of `shape` from its parts and their offsets; raise ValueError unless the parts cover it exactly."""
    if len(parts) == 1 and (parts[0][1].dtype, parts[0][1].shape) == (dtype, shape):
        return parts[0][1]
    rows = sorted((offset[0], part) for offset, part in parts) if shape else []
    ends = [first + part.shape[0] for first, part in rows if part.dtype == dtype and part.shape[1:] == shape[1:]]
    if [first for first, _ in rows] + list(shape[:1]) != [0, *ends]:
        raise ValueError(f"the parts of {name!r:.100} do not have the dtype and shape that {INDEX} lists")
    data = np.concatenate([np.frombuffer(part.data, np.uint8) for _, part in rows])
    return TensorRecord(name, dtype, shape, data.data)


def _checksum(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


NAME_A_CHECKPOINT = "give the path of a checkpoint or run folder, or auto or never"


def find_checkpoint(path: Path, which: str = "latest") -> Checkpoint:
    """Load the checkpoint at `path` or, if `path` is a run folder, the run's latest or best checkpoint."""
    return load_checkpoint(locate_checkpoint(path, which))


def locate_checkpoint(path: Path, which: str = "latest") -> Path:
    """Return the path of the checkpoint that `find_checkpoint` would load, without reading its tensors."""
    if which not in ("latest", "best"):
        raise ConfigError(f"unknown checkpoint {which!r}; choose latest or best")
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
        why = "the run was not evaluated" if best is None else f"the checkpoint of step {best}, with the best score, was not kept"
        raise CheckpointError(f"{path} has no best checkpoint: {why}; use the latest checkpoint")
    return steps[best]


def resume_point(resume: str, run: Path | None, on_skipped: OnSkipped = lambda path, error: None) -> Checkpoint | None:
    """Return the checkpoint that a run in the folder `run` resumes from, without its tensors; None if the run starts anew."""
    if resume == "never":
        return None
    newest = newest_index(run, on_skipped)
    return newest if resume == "auto" else open_index(resume_source(resume, run, newest))


def newest_index(run: Path | None, on_skipped: OnSkipped = lambda path, error: None) -> Checkpoint | None:
    """Return the newest undamaged checkpoint of a run, without its tensors; None if the run has none."""
    return _first_valid(run / "checkpoints", open_index, on_skipped) if run is not None else None


def open_index(path: Path) -> Checkpoint:
    """Read only checkpoint.json and return the checkpoint without its tensors."""
    index = read_index(path)
    return Checkpoint(path, index["step"], index["progress"], {}, index.get("kind", "regular"))


def resume_source(resume: str, run: Path | None, newest: Checkpoint | None) -> Path:
    """Return the path of the checkpoint that training.resume names; `newest` is the newest checkpoint in the run's own folder.

    If the same command has already started this run from the named checkpoint, return the path of `newest` to resume the run.
    """
    path = named_path(resume, run)
    if newest is not None and (started_from(newest, path) or newest.progress.get("resumed_from") == resume):
        return newest.path
    if not path.exists():
        raise CheckpointError(f"{{0}}: there is no {path}", Setting("training.resume", resume), advice=NAME_A_CHECKPOINT)
    source = locate_checkpoint(path)
    if newest is not None and run is not None and source.resolve() != newest.path.resolve():
        why = "has newer checkpoints" if path.resolve().is_relative_to(run.resolve()) else "holds another run"
        raise occupied(resume, run, why, newest.step)
    return source


def started_from(newest: Checkpoint, path: Path) -> bool:
    """Return True if the run that wrote `newest` was started from the checkpoint or run at `path`."""
    return newest.progress.get("resumed_from") == str(path.resolve())


def occupied(resume: str, run: Path, why: str, step: int) -> CheckpointError:
    """Return the error for a run folder `run` that already holds another run or newer checkpoints; `why` says which."""
    return CheckpointError(
        f"{{0}}: {run} {why} (newest checkpoint: step {step})",
        Setting("training.resume", resume),
        Setting("training.output_dir"),
        Setting("training.resume", "auto"),
        advice="choose another {1} to start from the named checkpoint, or continue the run in that folder with {2}",
    )
