"""Outputs of a run, written only by the first rank: the locked run folder, the heartbeat, and checkpoints saved by a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.backends.open import packages
from ingot.config.fields import leaf_values
from ingot.config.loading import ResolvedConfig, load_config
from ingot.config.render import dump_yaml
from ingot.config.schema import TrainingSection
from ingot.errors import CheckpointError, ConfigError, Setting
from ingot.model.settings import FileSettings
from ingot.runs.checkpoints import (
    Checkpoint,
    Tensors,
    begin_checkpoint,
    read_kind,
    retain,
    save_checkpoint,
    save_part,
    sweep,
    update_progress,
)
from ingot.runs.folder import MODEL_COPY, TRACKIO_ID, WANDB_ID, Kind, RunFolder, new_run_dir, saved_steps
from ingot.runs.mirror import RunMirror
from ingot.runs.reporter import Reporter
from ingot.runs.state import Heartbeat
from ingot.runtime.files import is_url, user_path, write_atomically, writing
from ingot.runtime.machine import installed
from ingot.runtime.remote import local_path
from ingot.train.resume import check_sources, refuse_occupied

STATE_BYTES = 12  # bytes per parameter in a checkpoint: the weight and two AdamW moments, all in fp32
SLOW_DISK = 200e6  # write speed in bytes per second that is assumed until a save has been timed


class Saver:
    """A checkpoint writer that saves one checkpoint at a time in a background thread, while training continues."""

    def __init__(
        self, folder: Path, training: TrainingSection, done: Callable[[Path, Kind], None], failed: Callable[[str], None]
    ):
        self._folder, self._keep_last, self._keep_every = folder, training.keep_last, training.keep_every
        self._done, self._failed = done, failed
        self._thread: threading.Thread | None = None
        self.error: CheckpointError | None = None
        self.longest_seconds = 0.0  # longest time from a save request until the checkpoint was on disk

    def begin(self, step: int) -> None:
        """Create the folder of a checkpoint that several ranks write; a failure is reported by `save`, which needs the folder."""
        with suppress(OSError):
            begin_checkpoint(self._folder, step)

    def save(
        self,
        step: int,
        state: Callable[[], Tensors],
        progress: Mapping[str, Any],
        best: int | None,
        kind: Kind = "regular",
        writers: int = 1,
    ) -> None:
        """Wait for the previous save, then start a new one. A failure is reported and kept in `error` until a save succeeds."""
        began = time.monotonic()
        self.wait()

        def write() -> None:
            try:
                path = save_checkpoint(self._folder, step, state(), progress, kind, writers)
            except Exception as error:  # after any failure, even out of memory, the run must know that this step is not saved
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                advice = "; make room for it" if isinstance(error, OSError | CheckpointError | MemoryError) else ""
                self.error = CheckpointError(f"cannot save step {step} in {self._folder}: {reason}{advice}")
                with suppress(CheckpointError):  # the log may not be writable either
                    self._failed(f"{self.error}; training continues and the next save tries again")
                return
            try:
                retain(self._folder, self._keep_last, self._keep_every, best)
            except (OSError, CheckpointError) as error:  # only a warning, because the new checkpoint has been saved
                with suppress(CheckpointError):
                    reason = getattr(error, "strerror", None) or error
                    self._failed(f"cannot delete an old checkpoint in {self._folder}: {reason}")
            self.error, self.longest_seconds = None, max(self.longest_seconds, time.monotonic() - began)
            with suppress(CheckpointError):
                self._done(path, kind)

        self._thread = threading.Thread(target=write, name="checkpoint")
        self._thread.start()

    def update(self, step: int, progress: Mapping[str, Any], kind: Kind | None = None) -> None:
        """Replace the progress in the checkpoint of `step`, and the checkpoint's kind if `kind` is given."""
        self.wait()
        path = saved_steps(self._folder).get(step)
        if path is None:
            return  # the save of this step failed
        old_kind = read_kind(path)
        with writing(self._folder):
            update_progress(path, progress, kind)
        if kind is not None and kind != old_kind:
            with suppress(CheckpointError):  # the log may not be writable
                self._done(path, kind)

    def lacks(self, step: int) -> bool:
        """Wait for the save in progress, then return True if this step could not be saved."""
        self.wait()
        return self.error is not None and step not in saved_steps(self._folder)

    def wait(self) -> None:
        """Wait until no write is in progress."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def expected_seconds(self, parameters: int) -> float:
        """Return the expected duration of a save: the longest so far or, before the first save, an estimate for a slow disk."""
        return self.longest_seconds or parameters * STATE_BYTES / SLOW_DISK


class PartSaver:
    """A writer of one rank's part of each checkpoint, in a background thread; the first rank reports its failures."""

    def __init__(self, folder: Path, rank: int):
        self._folder, self._rank = folder, rank
        self._thread: threading.Thread | None = None

    def save(self, step: int, state: Callable[[], Tensors]) -> None:
        def write() -> None:
            with suppress(Exception):
                save_part(self._folder, step, state, self._rank)

        self._thread = threading.Thread(target=write, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until no write is in progress."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


@dataclass(frozen=True)
class RunOutputs:
    """The run folder with its heartbeat and its checkpoint saver; only the first rank has them."""

    folder: RunFolder
    heartbeat: Heartbeat
    saver: Saver
    mirror: RunMirror | None = None  # copies the folder to training.output_dir, if that is a URL


def claim_folder(
    resolved: ResolvedConfig, reporter: Reporter, stack: ExitStack, to_delete: Sequence[str] | None, facts: dict[str, Any]
) -> RunFolder:
    """Lock and return the run folder; if `to_delete` is given, delete the earlier run and all files that match these patterns."""
    config = resolved.config
    training, tracking, model = config.training, config.tracking, config.model
    if to_delete is not None and is_url(training.output_dir or ""):
        named = Setting("training.output_dir", training.output_dir)
        raise ConfigError("--force cannot delete files at a URL, {0}", named, advice="delete them yourself or choose another URL")
    folder = RunFolder(local_path(training.output_dir) if training.output_dir else new_run_dir(resolved.recipe))
    if training.resume == "never" and to_delete is None:
        refuse_occupied(folder.path)
    own_files = [MODEL_COPY] if isinstance(model, FileSettings) else []
    own_files += [WANDB_ID] if tracking.wandb_project is not None else []
    own_files += [TRACKIO_ID] if tracking.trackio_project is not None else []
    stack.enter_context(folder.claim(reporter.message, own_files, to_delete or ()))
    folder.remove(folder.stop_path)  # a stop file that already exists was meant for an earlier session
    sweep(folder.checkpoints)
    if to_delete is not None:
        check_sources(config, folder, facts)
        model_files = [user_path(model.file)] if isinstance(model, FileSettings) else []
        folder.clear(reporter.message, to_delete, keep=[*resolved.files, *model_files])
    return folder


def open_outputs(
    resolved: ResolvedConfig, folder: RunFolder, checkpoint: Checkpoint | None, reporter: Reporter, stack: ExitStack
) -> RunOutputs:
    """Write the session's config and environment into the run folder, and start the heartbeat and the saver."""
    config, config_path = resolved.config, folder.config_path
    # Never overwrite the config file that the run was started from.
    keep_config = any(path.exists() and config_path.exists() and path.samefile(config_path) for path in resolved.files)
    config_yaml = None if keep_config else dump_yaml(config, resolved.origins)
    other_settings: dict[str, Any] = {}  # settings that differ from the kept config file
    if keep_config:
        in_file: dict[tuple[str, ...], Any] = {}
        with suppress(ConfigError):  # the file may be invalid without this session's other settings
            in_file = dict(leaf_values(load_config(file=config_path, environment={}).config))
        unshown = ("training", "output_dir"), ("training", "resume")
        own = [(path, value) for path, value in leaf_values(config) if path not in unshown]
        other_settings = {".".join(path): value for path, value in own if path not in in_file or in_file[path] != value}
    # Write environment.json first: it marks the folder as a run folder, so that a run killed at this point can be restarted.
    folder.write_environment(installed(packages(config.training.device)), config=config_yaml, besides=other_settings)
    folder.remove(folder.result_path)  # so that the run does not look complete if this session crashes
    if config_yaml is not None:
        folder.write_config(config_yaml)
    elif other_settings:
        kept = f"this run was started from {config_path}, which is not modified"
        others = ", ".join(f"{name}={value}" for name, value in other_settings.items())
        reporter.message(f"{kept}; settings that differ from this file are recorded in environment.json: {others}")
    if checkpoint is None and isinstance(config.model, FileSettings):
        with writing(folder.path / MODEL_COPY):
            write_atomically(folder.path / MODEL_COPY, user_path(config.model.file).read_bytes())
    progress, step = (checkpoint.progress, checkpoint.step) if checkpoint is not None else ({}, -1)
    folder.metrics.truncate_after(step, evaluated=progress.get("val_step") == step)
    state: dict[str, Any] = {
        **{name: progress[name] for name in ("step", "loss", "val_bpb", "tokens", "elapsed_seconds") if name in progress},
        "checkpoint": checkpoint.path.name if checkpoint is not None else None,
        "max_steps": config.training.max_steps,
        "budget_seconds": config.budget.seconds,
    }
    mirror = None
    if is_url(url := config.training.output_dir or ""):
        mirror = RunMirror(url, folder.path, config.training)
        mirror.sync()
        stack.callback(mirror.wait)
    heartbeat = stack.enter_context(Heartbeat(folder.path, config.tracking.heartbeat_seconds, reporter.message, **state))

    def saved(path: Path, kind: Kind) -> None:
        heartbeat.update(checkpoint=path.name)
        reporter.saved(path, kind)
        if mirror is not None:
            mirror.request(reporter.message)

    saver = Saver(folder.checkpoints, config.training, saved, reporter.message)
    stack.callback(saver.wait)
    return RunOutputs(folder, heartbeat, saver, mirror)
