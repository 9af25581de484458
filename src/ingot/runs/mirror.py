"""Runs in object storage: the run trains in a local staging folder, which is copied to the run's URL after every checkpoint.

checkpoint.json is uploaded last and deleted first, so that an interrupted copy never looks like a checkpoint.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from ingot.config.schema import TrainingSection
from ingot.errors import CheckpointError
from ingot.runs.checkpoints import read_index, read_kind, to_keep
from ingot.runs.folder import INDEX, MODEL_COPY, PARTIAL, STOP, WRITTEN, Kind, saved_steps
from ingot.runs.state import STATE
from ingot.runtime.files import is_url
from ingot.runtime.remote import Remote, local_path, staging

COPIED = sorted({*WRITTEN, MODEL_COPY} - {STATE, STOP})  # patterns of the files to copy, besides checkpoints
_FILE = re.compile(r"checkpoints/step-(\d{8,})/([^/]+)")


def local_run(name: str) -> Path:
    """Return the local path of a run; for a URL, first download the run if its newest checkpoint is newer than the local one."""
    if not is_url(name):
        return local_path(name)
    with staging(name, CheckpointError) as folder:
        remote = Remote(name, CheckpointError)
        files, saved = remote.sizes(), saved_steps(folder / "checkpoints")
        shared = max(_remote_steps(files) & saved.keys(), default=None)
        if shared is not None:
            there = json.loads(remote.read(f"checkpoints/{saved[shared].name}/{INDEX}"))
            if there.get("files") != read_index(saved[shared])["files"]:
                raise CheckpointError(f"{name} holds another run than its staging folder {folder}; delete that folder")
        if (newest := max(_remote_steps(files), default=-1)) > max(saved, default=-1):
            target = folder / "checkpoints" / f"step-{newest:08d}"
            partial, where = target.with_name(target.name + PARTIAL), f"checkpoints/{target.name}"
            shutil.rmtree(partial, ignore_errors=True)
            remote.download(f"{where}/{INDEX}", partial / INDEX)
            for file, entry in read_index(partial)["files"].items():
                remote.download(f"{where}/{file}", partial / file, entry["sha256"])
            for file in (file for file in files if any(fnmatch(file, pattern) for pattern in COPIED)):
                remote.download(file, folder / file)
            partial.rename(target)
    return folder


def _remote_steps(files: Iterable[str]) -> set[int]:
    """Return the steps of the complete checkpoints among the files of a run."""
    return {int(match[1]) for match in map(_FILE.fullmatch, files) if match is not None and match[2] == INDEX}


class RunMirror:
    """Copies a run folder to a URL: `sync` copies at once, `request` in a background thread, which only reports failures."""

    def __init__(self, url: str, folder: Path, training: TrainingSection) -> None:
        self._folder, self._training = folder, training
        self._remote, self._pool = Remote(url, CheckpointError), ThreadPoolExecutor(1, "upload")

    def request(self, report: Callable[[str], None]) -> None:
        """Queue a copy of the folder, which is quick if the copies queued before it leave nothing to upload."""

        def attempt() -> None:
            try:
                self.sync()
            except (CheckpointError, OSError) as error:
                with suppress(CheckpointError):  # the log may not be writable
                    report(f"{error}; training continues and the next save tries again")

        self._pool.submit(attempt)

    def wait(self) -> None:
        """Wait for all requested copies; after this call, no more can be requested."""
        self._pool.shutdown()

    def sync(self) -> None:
        """Upload new and changed files, and delete old checkpoints at the URL; raise CheckpointError if that fails."""
        files, local = self._remote.sizes(), saved_steps(self._folder / "checkpoints")
        # Metrics are uploaded before checkpoints, because a resumed run drops all metrics after its checkpoint.
        for path in (path for pattern in COPIED for path in self._folder.glob(pattern)):
            name = path.relative_to(self._folder).as_posix()
            if name not in files or path.parent.name != "samples":  # samples never change
                self._remote.upload(path, name)
        for path in local.values():
            try:
                self._upload_checkpoint(path, files)
            except (CheckpointError, OSError):
                if path.exists():  # otherwise it has been deleted, because newer checkpoints were saved
                    raise
        if local:
            kinds: dict[int, Kind] = dict.fromkeys(_remote_steps(files), "regular")
            kinds |= {step: read_kind(path) for step, path in local.items()}
            kept = {step for step, _ in to_keep(sorted(kinds.items()), self._training.keep_last, self._training.keep_every)}
            kept |= {*local, read_index(local[max(local)])["progress"].get("best_step")}
            steps = {name: int(match[1]) for name in files if (match := _FILE.fullmatch(name))}
            old = [name for name, step in steps.items() if step < max(local) and step not in kept]
            self._remote.delete(sorted(old, key=lambda name: not name.endswith(INDEX)))

    def _upload_checkpoint(self, path: Path, files: Mapping[str, int]) -> None:
        index = f"checkpoints/{path.name}/{INDEX}"
        if index in files and self._remote.read(index) == (path / INDEX).read_bytes():
            return
        uploaded = json.loads(self._remote.read(index))["files"] if index in files else {}
        changed = [file for file, entry in read_index(path)["files"].items() if uploaded.get(file) != entry]
        if changed and uploaded:
            raise CheckpointError(f"{self._remote.url} holds another run than {self._folder}; delete that folder and start again")
        for file in (*changed, INDEX):
            self._remote.upload(path / file, f"checkpoints/{path.name}/{file}")
