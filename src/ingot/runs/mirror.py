"""Runs in object storage: a run trains in the staging folder of its URL, which is copied to the URL after every checkpoint.

checkpoint.json is uploaded last and deleted first, so that an interrupted copy never looks like a checkpoint.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from ingot.config.schema import TrainingSection
from ingot.errors import CheckpointError
from ingot.runs.checkpoints import read_index, read_kind, to_keep
from ingot.runs.folder import INDEX, MODEL_COPY, PARTIAL, STOP, WRITTEN, saved_steps, step_of
from ingot.runs.state import RESULT, STATE
from ingot.runtime.files import is_url
from ingot.runtime.remote import Remote, local_path, staging

COPIED = sorted({*WRITTEN, MODEL_COPY} - {STATE, STOP})  # patterns of the files to copy, besides checkpoints


def local_run(name: str, notify: Callable[[str], None] = lambda line: None) -> Path:
    """Return the path of a run; for a URL, first download its files and newest checkpoint if that is newer than the local one."""
    if not is_url(name):
        return local_path(name)
    with staging(name, CheckpointError) as folder:
        remote = Remote(name, CheckpointError)
        files, newest, damaged = remote.sizes(), max(saved_steps(folder / "checkpoints"), default=-1), ""
        for step, checkpoint in sorted(_remote_steps(files).items(), reverse=True):
            if step <= newest:
                break
            try:
                _fetch_checkpoint(remote, checkpoint, files, folder / checkpoint)
            except ValueError as error:
                damaged = str(error)
                notify(f"{damaged}; trying an older checkpoint")
                continue
            newest, damaged = step, ""
            (folder / RESULT).unlink(missing_ok=True)
            for file in (file for file in files if any(fnmatch(file, pattern) for pattern in COPIED)):
                remote.download(file, folder / file)
        if damaged and newest < 0:
            raise CheckpointError(f"no checkpoint of {name} is valid: {damaged}")
    return folder


def _remote_steps(files: Mapping[str, int]) -> dict[int, str]:
    """Return the names of the complete checkpoints among the files of a run, by step."""
    names = [name.removesuffix(f"/{INDEX}") for name in files if fnmatch(name, f"checkpoints/step-*/{INDEX}")]
    return {step_of(Path(name)): name for name in names}


def _fetch_checkpoint(remote: Remote, name: str, files: Mapping[str, int], target: Path) -> None:
    """Download a checkpoint and verify every byte; raise ValueError if it is damaged."""
    partial = target.with_name(target.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    remote.download(f"{name}/{INDEX}", partial / INDEX)
    try:
        record = read_index(partial)
    except CheckpointError:
        raise ValueError(f"{remote.url}/{name}/{INDEX} is damaged") from None
    for file, entry in record["files"].items():
        if files.get(f"{name}/{file}") != entry["bytes"]:
            raise ValueError(f"{remote.url}/{name}/{file} is damaged: it does not have {entry['bytes']:,} bytes")
        remote.download(f"{name}/{file}", partial / file, entry["sha256"])
    partial.rename(target)


class RunMirror:
    """Copies a run folder to a URL: `sync` now, `request` in a background thread, where a failure is only reported."""

    def __init__(self, url: str, folder: Path, training: TrainingSection, failed: Callable[[str], None]) -> None:
        self._folder, self._training, self._failed = folder, training, failed
        self._remote, self._pool = Remote(url, CheckpointError), ThreadPoolExecutor(1, "upload")
        self._next: Future[None] | None = None
        self._uploaded: dict[Path, tuple[int, int]] = {}  # size and modification time of each uploaded file
        self.longest_seconds = 0.0

    def request(self) -> None:
        """Copy the folder soon, after the copy in progress."""
        if self._next is None or self._next.running() or self._next.done():
            self._next = self._pool.submit(self._attempt)

    def wait(self) -> None:
        """Wait for the requested copies; no more can be requested."""
        self._pool.shutdown()

    def _attempt(self) -> None:
        try:
            self.sync()
        except (CheckpointError, OSError) as error:
            with suppress(CheckpointError):  # the log may not be writable
                self._failed(f"{error}; training continues and the next save tries again")

    def sync(self) -> None:
        """Upload what is new in the folder, and delete old checkpoints; raise CheckpointError if that fails."""
        began, files, local = time.monotonic(), self._remote.sizes(), saved_steps(self._folder / "checkpoints")
        # Metrics are uploaded before checkpoints, because a resumed run drops all metrics after its checkpoint.
        for path in (path for pattern in COPIED for path in self._folder.glob(pattern)):
            self._upload(path)
        if RESULT in files and not (self._folder / RESULT).exists():
            self._remote.delete([RESULT])
        for path in local.values():
            try:
                self._upload_checkpoint(path, files)
            except (CheckpointError, OSError):
                if path.exists():  # otherwise it was deleted meanwhile, because newer ones were saved
                    raise
        if local:
            self._delete_old(files, local)
        self.longest_seconds = max(self.longest_seconds, time.monotonic() - began)

    def _delete_old(self, files: Mapping[str, int], local: Mapping[int, Path]) -> None:
        kinds, newest = {step: read_kind(path) for step, path in local.items()}, max(local)
        for step, name in _remote_steps(files).items():
            with suppress(ValueError, LookupError, TypeError):  # damaged
                kinds.setdefault(step, json.loads(self._remote.read(f"{name}/{INDEX}"))["kind"])
        kept = {step for step, _ in to_keep(sorted(kinds.items()), self._training.keep_last, self._training.keep_every)}
        kept |= {*local, read_index(local[newest])["progress"].get("best_step")}
        steps = {name: step_of(Path(name).parent) for name in files if fnmatch(name, "checkpoints/step-*/*")}
        old = [name for name, step in steps.items() if step < newest and step not in kept]
        self._remote.delete(sorted(old, key=lambda name: not name.endswith(INDEX)))

    def _upload_checkpoint(self, path: Path, files: Mapping[str, int]) -> None:
        index = f"checkpoints/{path.name}/{INDEX}"
        if index in files and self._remote.read(index) == (path / INDEX).read_bytes():
            return
        changed = [file for file in path.glob("*.safetensors") if self._uploaded.get(file) != _version(file)]
        if changed and index in files:
            self._remote.delete([index])
        for file in (*changed, path / INDEX):
            self._upload(file)

    def _upload(self, path: Path) -> None:
        if self._uploaded.get(path) != (version := _version(path)):
            self._remote.upload(path, path.relative_to(self._folder).as_posix())
            self._uploaded[path] = version


def _version(path: Path) -> tuple[int, int]:
    return (stat := path.stat()).st_size, stat.st_mtime_ns
