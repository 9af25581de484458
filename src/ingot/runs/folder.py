"""The run folder: every file in it is text, JSON or a checkpoint, and readable without Ingot.

A process claims the folder before it writes. Readers need no lock, because every file is replaced whole or only grows.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from ingot.errors import CheckpointError, Setting, Unreadable, shown
from ingot.runs.lock import LOCK, RunLock, is_lock
from ingot.runs.metrics import LineFile, Metrics
from ingot.runs.state import RESULT, STATE, TrainingResult, read_state, result_record, this_process, utc_now
from ingot.runtime.files import (
    FULL,
    file_sha256,
    read_dict,
    read_json,
    sweep_temporaries,
    temporary_beside,
    to_json,
    user_path,
    write_atomically,
    writing,
)
from ingot.runtime.locks import FolderLock
from ingot.runtime.machine import made_by

STOP = "stop"  # a file that asks the run to save and stop
MODEL_COPY = "model.py"  # copy of a custom model
WANDB_ID = "wandb.json"  # id of the run at Weights & Biases
TRACKIO_ID = "trackio.json"  # name of the run at trackio
CLOCK_LAG_SECONDS = 0.02  # how far a file's modification time may lag
EVENTS = "tensorboard"  # folder of TensorBoard event files
ARTIFACTS = ("model.ingot", "model.safetensors")


# Names of checkpoint folders. Reading a checkpoint needs numpy (runs/checkpoints.py); looking at a run does not.
Kind = Literal["regular", "shutdown", "final"]  # saved during training, by a stop, by a completed run
INDEX = "checkpoint.json"
PARTIAL, DAMAGED = ".partial", ".damaged"
_NAME = re.compile(r"step-(\d{8,})")


def is_checkpoint_name(name: str) -> bool:
    """Return True if a folder with this name is a checkpoint."""
    return _NAME.fullmatch(name) is not None


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(path.name.rpartition("-")[2])


def saved_steps(folder: Path) -> dict[int, Path]:
    """Return the checkpoints of a folder by step, oldest first, without reading them."""
    try:
        with os.scandir(folder) as entries:
            folders = [(_NAME.fullmatch(entry.name), folder / entry.name) for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:  # returning none would let a new run start over an old one
        raise Unreadable(folder, error.strerror) from None
    return dict(sorted((int(match[1]), path) for match, path in folders if match))


def named_path(name: str, run: Path | None) -> Path:
    """Return the path that a setting names, relative to the working folder or else to the run folder."""
    path = user_path(name)
    return run / path if run is not None and not path.exists() and (run / path).exists() else path


def new_run_dir(recipe: str | None, root: Path = Path("runs"), now: datetime | None = None) -> Path:
    """Create a folder for a new run: runs/<recipe>-<local time>, with -2, -3... if that exists."""
    name = f"{(recipe or 'run').replace('/', '-')}-{now or datetime.now():%Y%m%d-%H%M%S}"
    path, count = root / name, 1
    with writing(path):
        root.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                path.mkdir()
                return path
            except FileExistsError:
                count += 1
                path = root / f"{name}-{count}"


class RunFolder:
    """The files of one run, and how each is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_path = path / "config.yaml"
        self.environment_path = path / "environment.json"
        self.log_path = path / "log.txt"
        self.samples = path / "samples"
        self.checkpoints = path / "checkpoints"
        self.artifact = path / "artifact"
        self._folders = (self.samples, self.checkpoints, self.artifact)
        self.metrics, self._log = Metrics(path / "metrics.jsonl"), LineFile(self.log_path)
        self.result_path = path / RESULT
        self.stop_path = path / STOP
        self.session = 1  # number of this session, counted in environment.json

    def check_ownership(self, also: Sequence[str] = ()) -> None:
        """Refuse a folder where our files, or those in `also`, would replace somebody else's or be written through links."""
        files = [self.config_path, self.environment_path, self.metrics.path, self.log_path, self.result_path, self.stop_path]
        files += [self.path / name for name in (STATE, LOCK, *also)]
        for path in (path for path in files if path.is_symlink()):
            with writing(path):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        for path in (path for path in self._folders if path.is_symlink() and not path.exists()):
            with writing(path):  # a link to another disk is fine, a broken one is not
                raise OSError(errno.ENOENT, f"it is a link to {path.readlink()}, which is not there")
        with writing(self.path):
            if self._holds_a_run():
                return
            foreign = [path.name for path in files if path.exists() and not self._is_left_by_start(path)]
            foreign += [folder.name for folder in self._folders if folder.exists() and not _is_empty_folder(folder)]
        if foreign:
            raise CheckpointError(
                f"{self.path} holds {' and '.join(foreign)}, which no run of Ingot wrote",
                Setting("training.output_dir"),
                advice="choose another {0}",
            )

    def _is_left_by_start(self, path: Path) -> bool:
        """Return True for a lock of ours, or a request to stop that was left for a run that had just started."""
        return is_lock(path) if path.name == LOCK else path == self.stop_path and "asked_at" in (read_dict(path) or {})

    def is_blank(self) -> bool:
        """Return True if the folder holds nothing but what starting a run leaves."""
        try:
            entries = list(self.path.iterdir())
            return all(self._is_left_by_start(path) or (path in self._folders and _is_empty_folder(path)) for path in entries)
        except OSError:
            return False

    def _holds_a_run(self) -> bool:
        """Return True if a run of any version wrote here: there is a file that nothing else writes, or traces of a claim."""
        claimed = (self.path / LOCK).is_file() and is_lock(self.path / LOCK) and all(map(Path.is_dir, self._folders))
        record = read_dict(self.environment_path) or {}
        saved = any(os.path.isfile(path / INDEX) for path in saved_steps(self.checkpoints).values())  # noqa: PTH113 (never raises)
        return claimed or saved or {"started_at", "packages", "argv"} <= record.keys() or read_state(self.path) is not None

    def claim(
        self,
        notify: Callable[[str], None] = lambda line: None,
        also: Sequence[str] = (),
        stop: Callable[[], bool] = lambda: False,
    ) -> RunLock:
        """Create the folder if needed, lock it for this process and remove half-written files of a killed one.

        A folder with files that no run wrote, or with those in `also`, is refused. `stop`: as with RunLock.
        """
        messages: list[str] = []

        def report(line: str) -> None:
            messages.append(line)
            notify(line)

        self.check_ownership(also)
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        lock = RunLock(self.path, report, stop=stop).acquire()
        try:
            with writing(self.path):
                for folder in self._folders:
                    folder.mkdir(exist_ok=True)
                for folder in (self.path, *self._folders):
                    sweep_temporaries(folder)
            for message in messages:  # only now: before the lock is held, log.txt belongs to another process
                self.log(message)
        except BaseException:
            lock.release()
            raise
        return lock

    def write_config(self, text: str) -> None:
        """Write config.yaml, the resolved settings."""
        with writing(self.config_path):
            write_atomically(self.config_path, text)

    def wrote_config(self) -> bool:
        """Return True if config.yaml is as the last session wrote it, neither edited nor a user's own."""
        written = (read_dict(self.environment_path) or {}).get("config_sha256")
        return written is not None and written == file_sha256(self.config_path)

    def besides_config(self) -> dict[str, Any]:
        """Return the settings that the last session had in addition to a config.yaml that it did not write."""
        besides = (read_dict(self.environment_path) or {}).get("besides_config")
        return besides if isinstance(besides, dict) else {}

    def write_environment(
        self,
        packages: Mapping[str, str],
        argv: Sequence[str] | None = None,
        config: str | None = None,
        besides: Mapping[str, Any] | None = None,
    ) -> None:
        """Write environment.json: versions, machine and command of this session; earlier sessions move to `earlier`.

        `config`: the content of config.yaml if this session writes it; otherwise `besides` are the settings that it lacks.
        """
        earlier = self._earlier_sessions()
        self.session = len(earlier) + 1
        record = _environment(packages, sys.argv if argv is None else argv)
        record["config_sha256"] = hashlib.sha256(config.encode()).hexdigest() if config is not None else None
        record |= {"besides_config": besides or {}, "earlier": earlier}
        with writing(self.environment_path):
            write_atomically(self.environment_path, to_json(record, indent=2) + "\n")

    def record(self, kind: str, report: Mapping[str, Any]) -> None:
        """Append a record to metrics.jsonl, with the time and the session."""
        self.metrics.append_record({"kind": kind, "time": utc_now(), "session": self.session, **report})

    def remove_result(self) -> None:
        """Remove the result of an earlier session: one that dies must not seem to have completed."""
        with writing(self.result_path):
            self.result_path.unlink(missing_ok=True)

    def ask_to_stop(self) -> None:
        """Write the file that asks the run to stop; it says who asked."""
        host, pid, _ = this_process()
        with writing(self.stop_path):
            write_atomically(self.stop_path, to_json({"asked_at": utc_now(), "host": host, "pid": pid}) + "\n")

    def take_stop(self, began: float) -> bool:
        """Remove a request to stop and return True if it was made after a session began, not for an earlier one.

        Its age is measured against a file created now, because a file server may have another clock than ours.
        """
        taken = temporary_beside(self.stop_path)
        with writing(self.stop_path):
            try:
                self.stop_path.rename(taken)  # first, so that a request made meanwhile is another file
            except FileNotFoundError:
                return False
            requested_at = taken.stat().st_mtime
            taken.unlink()
            taken.touch()
            age = taken.stat().st_mtime - requested_at
            taken.unlink()
        return age <= time.time() - began + CLOCK_LAG_SECONDS

    def remove_stop(self) -> None:
        """Remove a request to stop that was obeyed."""
        with writing(self.stop_path):
            self.stop_path.unlink(missing_ok=True)

    def write_result(self, result: TrainingResult, export: Mapping[str, Any]) -> None:
        """Write result.json."""
        self.metrics.flush()
        self._log.flush()
        with writing(self.result_path):
            write_atomically(self.result_path, to_json(result_record(result, self.session, export), indent=2) + "\n")

    def log(self, line: str) -> None:
        """Append a line to log.txt, with the time before it."""
        self._log.append(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {shown(line)}")

    def sample(self, step: int, text: str) -> Path:
        """Write a sample of the model at a step; if the disk is full the run continues without it."""
        path = self.samples / f"step-{step:08d}.txt"
        with writing(path):
            try:
                write_atomically(path, text.encode(errors="replace"))
            except OSError as error:
                if error.errno not in FULL:
                    raise
        return path

    def _earlier_sessions(self) -> list[Any]:
        last = read_dict(self.environment_path) or {}
        earlier = last.pop("earlier", [])
        return [last, *(earlier if isinstance(earlier, list) else [])] if last else []


def _is_empty_folder(path: Path) -> bool:
    """Return True if a folder holds nothing but what a killed save of a checkpoint left."""
    return path.is_dir() and all(entry.match(f"step-*{PARTIAL}") for entry in path.iterdir())


def _environment(packages: Mapping[str, str], argv: Sequence[str]) -> dict[str, Any]:
    """Return what runs, where and when; nothing about who."""
    return {
        "started_at": utc_now(),
        "host": this_process()[0],
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "made_by": made_by(),
        "packages": dict(packages),
        "argv": [Path(argv[0]).name, *argv[1:]] if argv else [],
        "git_commit": _git_commit(),
    }


def _git_commit() -> str | None:
    command = ["git", "rev-parse", "--verify", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


@contextmanager
def starting(path: Path | None) -> Iterator[None]:
    """Create a run folder before it is claimed, so that a request to stop can be left in it; remove it if the start fails."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()] if path is not None and _is_free(path) else []
    with suppress(OSError):  # reported when the folder is claimed
        for folder in reversed(made):
            folder.mkdir()
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for folder in made:
                if [entry.name for entry in folder.iterdir()] == [RunFolder(folder).stop_path.name]:
                    RunFolder(folder).remove_stop()
                folder.rmdir()
        raise


def is_claimed(path: Path) -> bool:
    """Return True if a process of this machine holds the folder; False also if the disk has no locks."""
    with suppress(OSError), FolderLock(path) as lock:
        return not lock.acquire()
    return False


def _is_free(path: Path) -> bool:
    try:
        return not path.is_symlink() and not path.exists()
    except OSError:
        return False


def clear(folder: RunFolder, say: Callable[[str], None], also: Sequence[str] = (), keep: Sequence[Path] = ()) -> None:
    """Delete what Ingot wrote into a run folder, for `train --force`, and report it; files that others put there stay.

    `also` are patterns of files that a compatibility command writes, `keep` are files to leave alone. The caller has claimed the
    folder. Its lock and its empty folders stay, so that a process killed here can start again.
    """
    kept = {path.resolve() for path in keep}
    matching = {path for pattern in also for path in folder.path.glob(pattern)}
    to_delete = [path for path in [*_written(folder), *sorted(matching)] if path.resolve() not in kept]
    if not to_delete:
        return
    counts = Counter(path.parent.relative_to(folder.path).as_posix() for path in to_delete if path.parent != folder.path)
    names = [path.name for path in to_delete if path.parent == folder.path]
    say(f"--force deletes in {folder.path}: {', '.join([*names, *(f'{name}/ ({count})' for name, count in counts.items())])}")
    with writing(folder.path):
        for path in to_delete:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _written(folder: RunFolder) -> list[Path]:
    checkpoints = [path for path in sorted(folder.checkpoints.glob("step-*")) if _is_ours(path)]
    files = [folder.config_path, folder.environment_path, folder.metrics.path, folder.log_path, folder.result_path]
    files += [folder.stop_path, folder.path / STATE, folder.path / WANDB_ID, folder.path / TRACKIO_ID]
    if _model_hashes(checkpoints) & _hash_of(folder.path / MODEL_COPY):
        files.append(folder.path / MODEL_COPY)
    written = [path for path in files if path.is_file()] + checkpoints
    written += sorted(folder.samples.glob("step-*.txt"))
    written += [folder.artifact / name for name in ARTIFACTS if (folder.artifact / name).is_file()]
    return written + sorted((folder.path / EVENTS).glob("events.out.tfevents.*"))


def _is_ours(path: Path) -> bool:
    return path.is_dir() and is_checkpoint_name(path.name.removesuffix(PARTIAL).removesuffix(DAMAGED))


def _model_hashes(checkpoints: Sequence[Path]) -> set[str]:
    """Return the checksums of the custom models of checkpoints: model.py is ours to delete only if it is one of them."""
    hashes = set()
    for path in checkpoints:
        try:
            hashes.add(str(read_json(path / INDEX)["progress"]["model_file_sha256"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return hashes


def _hash_of(path: Path) -> set[str]:
    return {hashlib.sha256(path.read_bytes()).hexdigest()} if path.is_file() else set()
