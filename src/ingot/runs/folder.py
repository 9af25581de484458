"""The run folder: mostly text and JSON files, besides the checkpoints and the exported model.

A process locks the folder before it writes. Readers need no lock, because files are replaced atomically or only appended to.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from ingot.errors import CheckpointError, Setting, Unreadable, shown
from ingot.runs.metrics import LineFile, Metrics
from ingot.runs.state import LOCK, RESULT, STATE, RunLock, TrainingResult, is_lock, read_state, this_process, utc_now
from ingot.runtime.files import FULL, read_dict, sweep_temporaries, to_json, write_atomically, writing
from ingot.runtime.locks import FolderLock
from ingot.runtime.machine import made_by
from ingot.runtime.remote import local_path

STOP = "stop"  # file whose existence makes the run save and stop
MODEL_COPY = "model.py"  # copy of a custom model's source file
WANDB_ID = "wandb.json"  # file with the id of the Weights & Biases run
TRACKIO_ID = "trackio.json"  # file with the name of the trackio run
EVENTS = "tensorboard"  # folder of TensorBoard event files
# Files that `train --force` deletes, besides checkpoints. model.py is kept, because a user may have edited it.
WRITTEN = (
    "config.yaml", "environment.json", "metrics.jsonl", "log.txt", RESULT, STOP, STATE, WANDB_ID, TRACKIO_ID,
    "samples/step-*.txt", "artifact/model.ingot", "artifact/model.safetensors", f"{EVENTS}/events.out.tfevents.*",
)  # fmt: skip

# Definitions for the checkpoints folder. They are not in runs/checkpoints.py, because that module imports numpy, which is slow.
Kind = Literal["regular", "shutdown", "final"]  # periodic; saved on a stop request; saved at the end of a completed run
INDEX = "checkpoint.json"
PARTIAL, DAMAGED = ".partial", ".damaged"
_NAME = re.compile(r"step-(\d{8,})")


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(path.name.rpartition("-")[2])


def saved_steps(folder: Path) -> dict[int, Path]:
    """Return the paths of the checkpoints in a folder by step, oldest first, without reading the checkpoints."""
    try:
        with os.scandir(folder) as entries:
            folders = [(_NAME.fullmatch(entry.name), folder / entry.name) for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:  # returning {} would let a new run overwrite an old one
        raise Unreadable(folder, error.strerror) from None
    return dict(sorted((int(match[1]), path) for match, path in folders if match))


def named_path(name: str, run: Path | None) -> Path:
    """Resolve a path from a setting, relative to the current folder or, if it does not exist there, to the run folder."""
    path = local_path(name)
    return run / path if run is not None and not path.exists() and (run / path).exists() else path


def new_run_dir(recipe: str | None, root: Path = Path("runs"), now: datetime | None = None) -> Path:
    """Create a folder for a new run: runs/<recipe>-<local time>, with the suffix -2, -3, ... if that folder exists."""
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
    """The folder of one run, with the paths of its files and methods that write them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_path, self.environment_path = path / "config.yaml", path / "environment.json"
        self.result_path, self.stop_path, self.log_path = path / RESULT, path / STOP, path / "log.txt"
        self.metrics, self._log = Metrics(path / "metrics.jsonl"), LineFile(self.log_path)
        self.samples, self.checkpoints, self.artifact = path / "samples", path / "checkpoints", path / "artifact"
        self._folders = (self.samples, self.checkpoints, self.artifact)
        self.session = 1  # number of this session: 1 plus the number of earlier ones in environment.json

    def check_ownership(self, also: Sequence[str] = (), to_delete: Sequence[str] = ()) -> None:
        """Raise CheckpointError if a run would overwrite files that no run wrote; `also` names additional files to check."""
        files = [self.config_path, self.environment_path, self.metrics.path, self.log_path, self.result_path, self.stop_path]
        files += [self.path / name for name in (STATE, LOCK, *also)]
        with writing(self.path):
            # The folder belongs to a run (of any version) if it has a file that only a run writes, or a lock and all subfolders.
            claimed = (self.path / LOCK).is_file() and is_lock(self.path / LOCK) and all(map(Path.is_dir, self._folders))
            marked = {"started_at", "packages", "argv"} <= self.environment().keys()
            saved = any(os.path.isfile(path / INDEX) for path in saved_steps(self.checkpoints).values())  # noqa: PTH113 (never raises)
            if claimed or marked or saved or read_state(self.path) is not None:
                return
            foreign = [path.name for path in files if path.exists() and not (path.name == LOCK and is_lock(path))]
            # Leftovers of killed runs are not foreign files: partial checkpoints, and files that match a pattern in `to_delete`.
            ours = (f"step-*{PARTIAL}", *to_delete)
            foreign += [
                folder.name
                for folder in self._folders
                if folder.exists() and not (folder.is_dir() and all(any(map(entry.match, ours)) for entry in folder.iterdir()))
            ]
        if foreign:
            raise CheckpointError(
                f"{self.path} already contains {' and '.join(foreign)}, which Ingot did not create",
                Setting("training.output_dir"),
                advice="choose another {0}",
            )

    def claim(
        self, notify: Callable[[str], None] = lambda line: None, also: Sequence[str] = (), to_delete: Sequence[str] = ()
    ) -> RunLock:
        """Check that the folder is new or belongs to a run, create it if needed, lock it, and delete stale temporary files."""
        self.check_ownership(also, to_delete)
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        lock = RunLock(self.path, notify).acquire()
        try:
            with writing(self.path):
                for folder in self._folders:
                    folder.mkdir(exist_ok=True)
                for folder in (self.path, *self._folders):
                    sweep_temporaries(folder)
        except BaseException:
            lock.release()
            raise
        return lock

    def write_config(self, text: str) -> None:
        """Write the resolved settings to config.yaml."""
        with writing(self.config_path):
            write_atomically(self.config_path, text)

    def environment(self) -> dict[str, Any]:
        """Return the content of environment.json, which the last session wrote; empty if the file is missing or damaged."""
        return read_dict(self.environment_path) or {}

    def write_environment(
        self,
        packages: Mapping[str, str],
        argv: Sequence[str] | None = None,
        config: str | None = None,
        besides: Mapping[str, Any] | None = None,
    ) -> None:
        """Write environment.json: command, versions, machine and time, but no user name. Earlier sessions are kept in `earlier`.

        `config` is the content of config.yaml if this session writes it; otherwise `besides` lists settings that differ from it.
        """
        last = self.environment()
        before = last.pop("earlier", [])
        earlier = [last, *(before if isinstance(before, list) else [])] if last else []
        self.session = len(earlier) + 1
        program, *arguments = sys.argv if argv is None else argv
        commit = ""
        with suppress(OSError, subprocess.TimeoutExpired):
            git = ["git", "rev-parse", "--verify", "HEAD"]
            commit = subprocess.run(git, capture_output=True, text=True, timeout=5, stdin=subprocess.DEVNULL).stdout.strip()
        record = {
            "started_at": utc_now(),
            "host": this_process()[0],
            "platform": platform.platform(),
            "cpu_count": os.cpu_count(),
            "python": platform.python_version(),
            "made_by": made_by(),
            "packages": dict(packages),
            "argv": [Path(program).name, *arguments],
            "git_commit": commit or None,
            "config_sha256": hashlib.sha256(config.encode()).hexdigest() if config is not None else None,
            "besides_config": besides or {},
            "earlier": earlier,
        }
        with writing(self.environment_path):
            write_atomically(self.environment_path, to_json(record, indent=2) + "\n")

    def record(self, kind: str, report: Mapping[str, Any]) -> None:
        """Append a record to metrics.jsonl, adding the time and the session number."""
        self.metrics.append_record({"kind": kind, "time": utc_now(), "session": self.session, **report})

    def remove(self, path: Path) -> None:
        """Remove a file if it exists, such as the result of an earlier session or a stop file."""
        with writing(path):
            path.unlink(missing_ok=True)

    def ask_to_stop(self) -> None:
        """Write the stop file, which records the time and the process that requested the stop."""
        host, pid, _ = this_process()
        with writing(self.stop_path):
            write_atomically(self.stop_path, to_json({"asked_at": utc_now(), "host": host, "pid": pid}) + "\n")

    def write_result(self, result: TrainingResult, export: Mapping[str, Any]) -> None:
        """Write the session's result and facts about the export to result.json, with paths relative to the run folder."""
        self.metrics.flush()
        self._log.flush()
        record = {"session": self.session, "ended_at": utc_now(), **asdict(result), "export": dict(export)}
        run_dir = record.pop("run_dir")
        for name in ("checkpoint_path", "artifact_path"):
            if record[name] is not None and record[name].is_relative_to(run_dir):
                record[name] = record[name].relative_to(run_dir)
        with writing(self.result_path):
            write_atomically(self.result_path, to_json(record, indent=2) + "\n")

    def log(self, line: str) -> None:
        """Append a line with a timestamp to log.txt."""
        self._log.append(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {shown(line)}")

    def sample(self, step: int, text: str) -> Path:
        """Write a text sample generated at a step and return its path; if the disk is full, nothing is written."""
        path = self.samples / f"step-{step:08d}.txt"
        with writing(path):
            try:
                write_atomically(path, text.encode(errors="replace"))
            except OSError as error:
                if error.errno not in FULL:
                    raise
        return path

    def clear(self, say: Callable[[str], None], also: Sequence[str] = (), keep: Sequence[Path] = ()) -> None:
        """Delete the files that Ingot wrote, for `train --force`, and tell the user which ones; all other files are kept.

        `also` lists patterns of files that a compatibility command writes, `keep` lists files not to delete. The caller must hold
        the lock. The lock file and empty folders are kept, so that the command can be rerun if it is killed during the deletion.
        """
        kept = {path.resolve() for path in keep}
        doomed = {path for pattern in WRITTEN for path in self.path.glob(pattern) if path.is_file()}
        doomed |= {path for pattern in also for path in self.path.glob(pattern)}
        for path in self.checkpoints.glob("step-*"):
            if path.is_dir() and _NAME.fullmatch(path.name.removesuffix(PARTIAL).removesuffix(DAMAGED)):
                doomed.add(path)
        to_delete = sorted(path for path in doomed if path.resolve() not in kept)
        if not to_delete:
            return
        counts = Counter(path.parent.relative_to(self.path).as_posix() for path in to_delete if path.parent != self.path)
        names = [path.name for path in to_delete if path.parent == self.path]
        say(f"--force deletes from {self.path}: {', '.join([*names, *(f'{name}/ ({count})' for name, count in counts.items())])}")
        with writing(self.path):
            for path in to_delete:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)


def holds_lock(path: Path, pid: int) -> bool:
    """Return True if process `pid` on this machine has the run folder open or, without /proc, if any process has locked it."""
    descriptors = Path(f"/proc/{pid}/fd")
    if not descriptors.parent.parent.is_dir():  # without /proc the holder is unknown: check only that some process holds the lock
        with suppress(OSError), FolderLock(path) as lock:
            return not lock.acquire()
    with suppress(OSError):  # the process has ended or belongs to another user
        return any(descriptor.exists() and descriptor.samefile(path) for descriptor in descriptors.iterdir())
    return False
