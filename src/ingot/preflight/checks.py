"""Checks of a run's device, model, memory, output folder and checkpoint."""

from __future__ import annotations

import ast
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from ingot.artifact.gpt_simple import STATE, Saved, is_checkpoint, read_model, read_saved, refuse_other_shapes, saved_checkpoints
from ingot.backends.limits import refuse_precision, refuse_ranks_on_mlx, refuse_torch_only
from ingot.config.memory import Size, row_bytes, state_bytes, step_bytes
from ingot.config.schema import Config
from ingot.errors import CannotContinue, CheckpointError, ConfigError, Setting, Unreadable
from ingot.model.settings import FileSettings
from ingot.preflight.data_checks import RunData
from ingot.preflight.findings import Finding, Findings, Severity
from ingot.runs.checkpoints import Checkpoint, newest_index, occupied, resume_point, started_from
from ingot.runs.folder import INDEX, named_path, saved_steps
from ingot.runtime.devices import DEVICES
from ingot.runtime.files import user_path
from ingot.runtime.machine import host_bytes
from ingot.train.resume import changes, facts_of, refuse_lost, refuse_occupied
from ingot.train.step_plan import refuse_idle_ranks

MICRO_BATCH, CHECKPOINTING = Setting("training.micro_batch"), Setting("training.gradient_checkpointing")
UNREADABLE = "resume.trainer_state_unreadable"


def check_ranks(config: Config, world_size: int, findings: Findings) -> None:
    """Check that every rank gets at least one row of every step."""
    if world_size < 1:
        findings.add("preflight.world_size", "error", f"{world_size} ranks cannot train; there must be at least 1")
        return
    with findings.noting("training.ranks", ConfigError):
        refuse_idle_ranks(config, world_size)


def check_device(config: Config, world_size: int, findings: Findings) -> None:
    """Check the device's name and the settings it supports, without a framework: whether it is present is checked later."""
    if not DEVICES.fullmatch(config.training.device):
        setting = Setting("training.device", config.training.device)
        findings.add("training.device_unknown", "error", "{0} is not a device; use auto, cpu, cuda, cuda:N, mps or mlx", setting)
    with findings.noting("training.device_unsupported", ConfigError):
        if config.training.device == "mlx":
            refuse_ranks_on_mlx(world_size)
            refuse_torch_only(config)
    with findings.noting("runtime.no_cuda", ConfigError):
        refuse_precision(config)


def check_model_file(config: Config, findings: Findings) -> None:
    """Check that the file of a custom model exists and is Python, without running it."""
    if isinstance(config.model, FileSettings):
        try:
            ast.parse(user_path(config.model.file).read_bytes())
        except (OSError, SyntaxError, ValueError) as error:
            message = f"{{0}} cannot be used: {getattr(error, 'strerror', None) or error}"
            findings.add("model.file_unusable", "error", message, Setting("model.file", config.model.file))


def check_memory(config: Config, size: Size, vocab_size: int, world_size: int, findings: Findings) -> int:
    """Estimate the least memory a rank needs, and check that a machine without a GPU has it. Loads no framework."""
    state = state_bytes(config, size) + step_bytes(config, world_size)
    rows = 1 if config.training.micro_batch == "auto" else config.training.micro_batch
    rows = min(rows, max(1, config.rows_per_step // world_size))
    needed = state + rows * row_bytes(config, vocab_size, bool(config.training.gradient_checkpointing))
    device, memory = config.training.device, host_bytes()
    on_gpu = device.startswith("cuda") or (device == "auto" and shutil.which("nvidia-smi") is not None)
    if memory is not None and needed > memory and not on_gpu:
        message = f"a rank needs about {byte_count(needed)}, but this machine has {byte_count(memory)}"
        advice = "use a smaller model, lower {0} or set {1}"
        severity: Severity = "error" if state > memory else "warning"
        findings.add("model.memory", severity, message, MICRO_BATCH, CHECKPOINTING, advice=advice)
    return needed


def byte_count(number: int) -> str:
    """Format a number of bytes."""
    return f"{number / (1 << 30):.1f} GiB" if number >= 1 << 30 else f"{number / (1 << 20):.1f} MiB"


def check_output(config: Config, findings: Findings) -> Path | None:
    """Return the run folder and check that it can be written, without creating anything."""
    if config.training.output_dir is None:
        return None
    folder = user_path(config.training.output_dir).absolute()
    nearest = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    why = ""
    if folder.resolve() == Path(folder.anchor):
        why = "a run needs its own folder"
    elif not nearest.is_dir():
        why = f"{nearest} is not a folder"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        why = f"{nearest} cannot be written"
    if why:
        setting = Setting("training.output_dir")
        findings.add("output.not_writable", "error", f"{{0}} cannot be {folder}: {why}", setting)
    return folder


@dataclass(frozen=True)
class ResumeFacts:
    """The checkpoint that a run resumes from."""

    path: Path
    step: int
    tokens: int | None = None


def check_resume(config: Config, output: Path | None, data: RunData, findings: Findings) -> ResumeFacts | None:
    """Return the checkpoint that the run resumes from; None for a new run."""
    resume = config.training.resume

    def on_skipped(path: Path, error: CheckpointError) -> None:
        oldest = path == next(iter(saved_steps(path.parent).values()))
        findings.append(Finding(UNREADABLE, "error" if oldest else "warning", error))  # nothing older to fall back to

    try:
        if resume == "never" and output is not None:
            refuse_occupied(output)
        if (theirs := foreign_checkpoint(resume, output)) is not None:
            return _theirs(config, theirs, findings)
        checkpoint = resume_point(resume, output, on_skipped)
        if output is not None and resume == "auto":
            refuse_lost(output)
    except CheckpointError as error:
        code = UNREADABLE if isinstance(error, Unreadable) else _code(resume, output)
        findings.append(Finding(code, "error", error))
        return None
    return _ours(config, checkpoint, data, findings) if checkpoint is not None else None


def foreign_checkpoint(resume: str, output: Path | None) -> Saved | None:
    """Return the gpt-simple checkpoint that a run resumes from; None for a new run or one with an Ingot checkpoint."""
    if resume == "never" or output is None:
        return None
    last = max(saved_steps(output / "checkpoints"), default=-1)
    theirs = saved_checkpoints(output)
    if resume == "auto":
        return theirs[-1] if theirs and theirs[-1].step > last else None
    named = named_path(resume, output)
    if (named / INDEX).is_file() or not is_checkpoint(named):
        return None
    saved = read_saved(named)
    if last >= 0:
        newest = newest_index(output)
        if newest is not None and started_from(newest, named):
            return None  # an earlier session of the same command already imported it
        raise occupied(resume, output, "holds another run", last)
    if theirs and theirs[-1].step > saved.step:
        raise occupied(resume, output, "has newer checkpoints", theirs[-1].step)
    return saved


def _code(resume: str, output: Path | None) -> str:
    """Return gpt-simple's finding code for the reason why a run cannot resume."""
    if resume in ("auto", "never"):
        return "resume.resolve_failed"
    path = named_path(resume, output)
    if not path.is_dir():
        return "resume.path_missing"
    if not any((path / name).is_file() for name in (INDEX, STATE)) and not saved_steps(path / "checkpoints"):
        return "resume.no_trainer_state"
    return UNREADABLE if newest_index(output) is None else "resume.resolve_failed"


def _ours(config: Config, checkpoint: Checkpoint, data: RunData, findings: Findings) -> ResumeFacts:
    path, was = checkpoint.path, checkpoint.progress
    try:
        if data.dataset is not None:
            now = facts_of(config, data.dataset)
        else:  # problems at data.path are reported elsewhere
            now = {**was, "config": config.model_dump(mode="json"), "data_fingerprint": was["data_fingerprint"]}
        changed = changes(was, now)
    except (KeyError, TypeError, AttributeError):
        findings.add(UNREADABLE, "error", f"{path} does not record which run it belongs to")
        return ResumeFacts(path, checkpoint.step)
    shape = [change for change in changed if change.setting.startswith("model.")]
    rest = [change for change in changed if change not in shape]
    for code, some in (("resume.arch_drift", shape), ("resume.run_changed", rest)):
        if some:
            findings.append(Finding(code, "error", CannotContinue(path, some)))
    if not changed and config.model_dump(mode="json") != was["config"]:
        message = f"some settings differ from those saved in {path}; the run continues with the new ones"
        findings.add("resume.config_drift", "info", message)
    return ResumeFacts(path, checkpoint.step, was.get("tokens"))


def _theirs(config: Config, saved: Saved, findings: Findings) -> ResumeFacts:
    """Check a gpt-simple checkpoint."""
    with findings.noting("resume.arch_drift", CheckpointError):
        refuse_other_shapes(saved.path, read_model(saved.path), config.model.model_dump(mode="json"))
    tokens = saved.state.get("tokens_trained")
    return ResumeFacts(saved.path, saved.step, tokens if isinstance(tokens, int) else None)
