"""Where a run goes and what it goes on from, looked at without writing anything."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ingot.artifact.gpt_simple import STATE, Saved, is_checkpoint, read_model, read_saved, refuse_other_shapes, saved_checkpoints
from ingot.config.schema import Config
from ingot.errors import CannotContinue, CheckpointError, Setting, Unreadable
from ingot.preflight.data_checks import DataFacts
from ingot.preflight.findings import Finding, Findings
from ingot.runs.checkpoints import INDEX, Index, began_with, going_on_from, named_path, newest_index, occupied, saved_steps
from ingot.runs.state import read_state
from ingot.runtime.files import user_path
from ingot.train.resume import changes, facts_of, refuse_lost, refuse_occupied

OUTPUT = Setting("training.output_dir")
UNREADABLE = "resume.trainer_state_unreadable"


@dataclass(frozen=True)
class ResumeFacts:
    """The checkpoint that a run goes on from."""

    path: Path
    step: int
    tokens: int | None
    tokens_per_second: float | None
    loss: float | None


def check_output(config: Config, findings: Findings) -> Path | None:
    """The folder of the run, if it can be written; nothing is made to find that out."""
    if config.training.output_dir is None:
        return None
    folder = user_path(config.training.output_dir).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    why = ""
    if folder.resolve() == Path(folder.anchor):
        why = "a run has a folder of its own"
    elif not there.is_dir():
        why = f"{there} is not a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        why = f"{there} cannot be written"
    if why:
        findings.add("output.not_writable", "error", f"{{0}} cannot be {folder}: {why}", OUTPUT)
    return folder


def check_resume(config: Config, output: Path | None, data: DataFacts, findings: Findings) -> ResumeFacts | None:
    """What the run goes on from; None for a new run."""
    asked = config.training.resume
    try:
        if asked == "never" and output is not None:
            refuse_occupied(output)
        if (theirs := foreign_checkpoint(asked, output)) is not None:
            return _theirs(config, theirs, findings)
        found = going_on_from(asked, output, partial(_passed_over, findings))
        if output is not None and asked == "auto":
            refuse_lost(output)
    except Unreadable as error:
        findings.append(Finding.of(UNREADABLE, error))
        return None
    except CheckpointError as error:
        findings.append(Finding.of(_code(asked, output), error))
        return None
    return _ours(config, found, output, data, findings) if found is not None else None


def foreign_checkpoint(asked: str, output: Path | None) -> Saved | None:
    """The checkpoint of gpt-simple's that a run goes on from by training.resume; None where it begins, or has one of ours."""
    if asked == "never" or output is None:
        return None
    last = max(saved_steps(output / "checkpoints"), default=-1)
    theirs = saved_checkpoints(output)
    if asked == "auto":
        return theirs[-1] if theirs and theirs[-1].step > last else None
    named = named_path(asked, output)
    if (named / INDEX).is_file() or not is_checkpoint(named):
        return None
    saved = read_saved(named)
    if last >= 0:
        newest = newest_index(output)
        if newest is not None and began_with(newest, named):
            return None  # the same command again: it was taken over by an earlier session
        raise occupied(asked, output, "holds another run", last)
    if theirs and theirs[-1].step > saved.step:
        raise occupied(asked, output, "has newer checkpoints", theirs[-1].step)
    return saved


def _code(asked: str, output: Path | None) -> str:
    """Why nothing can be gone on from, in the codes of gpt-simple."""
    if asked in ("auto", "never"):
        return "resume.resolve_failed"
    path = named_path(asked, output)
    if not path.is_dir():
        return "resume.path_missing"
    if not any((path / name).is_file() for name in (INDEX, STATE)) and not saved_steps(path / "checkpoints"):
        return "resume.no_trainer_state"
    return UNREADABLE if newest_index(output) is None else "resume.resolve_failed"


def _passed_over(findings: Findings, path: Path, error: CheckpointError) -> None:
    """A checkpoint that is passed over; of the oldest one there is nothing left to go on from."""
    oldest = path == next(iter(saved_steps(path.parent).values()))
    findings.append(Finding.of(UNREADABLE, error, "error" if oldest else "warning"))


def _ours(config: Config, found: Index, output: Path | None, data: DataFacts, findings: Findings) -> ResumeFacts:
    path, was = found.path, found.progress
    try:
        if data.dataset is not None:
            now = facts_of(config, data.dataset)
        else:  # what lies at data.path is told elsewhere
            now = {**was, "config": config.model_dump(mode="json"), "data_fingerprint": was["data_fingerprint"]}
        changed = changes(was, now)
        drift = config.model_dump(mode="json") != was["config"]
    except (KeyError, TypeError, AttributeError):
        findings.add(UNREADABLE, "error", f"{path} does not say what run it is of")
        return ResumeFacts(path, found.step, None, None, None)
    shape = [change for change in changed if change.setting.startswith("model.")]
    for code, some in (("resume.arch_drift", shape), ("resume.run_changed", [one for one in changed if one not in shape])):
        if some:
            findings.append(Finding.of(code, CannotContinue(path, some)))
    if not changed and drift:
        message = f"some settings are not those that {path} was saved with; the run goes on with them"
        findings.add("resume.config_drift", "info", message)
    state = read_state(output) if output is not None else None
    speed = state.tokens_per_second if state is not None else None
    return ResumeFacts(path, found.step, was.get("tokens"), speed, was.get("loss"))


def _theirs(config: Config, saved: Saved, findings: Findings) -> ResumeFacts | None:
    """A checkpoint of gpt-simple's."""
    with findings.noting("resume.arch_drift", CheckpointError):
        refuse_other_shapes(saved.path, read_model(saved.path), config.model.model_dump(mode="json"))
    metrics, tokens = saved.state.get("metrics"), saved.state.get("tokens_trained")
    loss = metrics.get("loss") if isinstance(metrics, dict) else None
    return ResumeFacts(saved.path, saved.step, tokens if isinstance(tokens, int) else None, None, loss)
