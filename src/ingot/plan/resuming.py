"""Where a run goes and what it goes on from, looked at without writing anything."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.artifact.gpt_simple import STATE, read_model, read_saved, saved_checkpoints
from ingot.config.schema import Config
from ingot.errors import CannotContinue, CheckpointError, Setting, Unreadable
from ingot.plan.data import DataFacts
from ingot.plan.findings import Finding
from ingot.runs.checkpoints import read_index
from ingot.runs.state import read_state
from ingot.runs.steps import INDEX, named_path, saved_steps
from ingot.runtime.files import user_path
from ingot.train.resume import changes, facts_of, refuse_occupied

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


def check_output(config: Config, findings: list[Finding]) -> Path | None:
    """The folder of the run, if it can be written; nothing is made to find that out."""
    if config.training.output_dir is None:
        return None
    folder = user_path(config.training.output_dir).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    if not there.is_dir():
        findings.append(
            Finding("output.not_writable", "error", f"{{0}} cannot be {folder}: {there} is not a folder", "", (OUTPUT,))
        )
    elif not os.access(there, os.W_OK | os.X_OK):
        findings.append(
            Finding("output.not_writable", "error", f"{{0}} cannot be {folder}: {there} cannot be written", "", (OUTPUT,))
        )
    return folder


def check_resume(config: Config, output: Path | None, data: DataFacts, findings: list[Finding]) -> ResumeFacts | None:
    """What the run goes on from; None for a new run."""
    asked = config.training.resume
    try:
        saved = saved_steps(output / "checkpoints") if output is not None else {}
    except Unreadable as error:
        findings.append(Finding.of(UNREADABLE, error))
        return None
    if asked == "never":
        try:
            if output is not None:
                refuse_occupied(output)
        except CheckpointError as error:
            findings.append(Finding.of("resume.resolve_failed", error))
        return None
    if asked != "auto":
        return _named(config, output, asked, data, findings)
    for path in reversed(saved.values()):
        try:
            index = read_index(path)
        except Unreadable as error:  # which may be sound: the run does not go back
            findings.append(Finding.of(UNREADABLE, error))
            return None
        except CheckpointError as error:
            newest_left = path == next(iter(saved.values()))
            findings.append(Finding.of(UNREADABLE, error, "error" if newest_left else "warning"))
            continue
        return _ours(config, path, index, output, data, findings)
    try:
        theirs = saved_checkpoints(output) if output is not None and not saved else []
    except Unreadable as error:
        findings.append(Finding.of(UNREADABLE, error))
        return None
    return _theirs(config, theirs[-1].path, findings) if theirs else None


def _named(config: Config, output: Path | None, asked: str, data: DataFacts, findings: list[Finding]) -> ResumeFacts | None:
    path = named_path(asked, output)
    setting = (Setting("training.resume", asked),)
    if (copied := _copied(path, output)) is not None:
        return _ours(config, *copied, output, data, findings)
    if not path.is_dir():
        findings.append(Finding("resume.path_missing", "error", f"{{0}}: there is no folder {path}", "", setting))
        return None
    if not (path / INDEX).is_file() and (saved := saved_steps(path / "checkpoints")):
        path = saved[max(saved)]
    if (path / INDEX).is_file():
        try:
            return _ours(config, path, read_index(path), output, data, findings)
        except CheckpointError as error:
            findings.append(Finding.of(UNREADABLE, error))
            return None
    if (path / STATE).is_file():
        return _theirs(config, path, findings)
    message = f"{{0}} is not a checkpoint: {path} has neither {INDEX} nor {STATE}"
    findings.append(Finding("resume.no_trainer_state", "error", message, "", setting))
    return None


def _copied(path: Path, output: Path | None) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint of a run that an earlier session began with a copy of this one; training goes on from it."""
    saved = saved_steps(output / "checkpoints") if output is not None else {}
    for found in reversed(saved.values()):
        try:
            index = read_index(found)
        except CheckpointError:
            continue
        return (found, index) if index["progress"].get("resumed_from") == str(path.resolve()) else None
    return None


def _ours(
    config: Config, path: Path, index: dict[str, Any], output: Path | None, data: DataFacts, findings: list[Finding]
) -> ResumeFacts:
    was = index["progress"]
    try:
        if data.dataset is not None:
            now = facts_of(config, data.dataset)
        else:  # what lies at data.path is told elsewhere
            now = {**was, "config": config.model_dump(mode="json"), "data_fingerprint": was["data_fingerprint"]}
        found = changes(was, now)
        drift = config.model_dump(mode="json") != was["config"]
    except (KeyError, TypeError, AttributeError):
        findings.append(Finding(UNREADABLE, "error", f"{path} does not say what run it is of"))
        return ResumeFacts(path, int(index["step"]), None, None, None)
    shape = [change for change in found if change.setting.startswith("model.")]
    for code, some in (("resume.arch_drift", shape), ("resume.run_changed", [one for one in found if one not in shape])):
        if some:
            findings.append(Finding.of(code, CannotContinue(path, some)))
    if not found and drift:
        message = f"some settings are not those that {path} was saved with; the run goes on with them"
        findings.append(Finding("resume.config_drift", "info", message))
    state = read_state(output) if output is not None else None
    speed = state.tokens_per_second if state is not None else None
    return ResumeFacts(path, int(index["step"]), was.get("tokens"), speed, was.get("loss"))


def _theirs(config: Config, path: Path, findings: list[Finding]) -> ResumeFacts | None:
    """A checkpoint of gpt-simple's."""
    try:
        saved = read_saved(path)
        was = read_model(path)
    except CheckpointError as error:
        findings.append(Finding.of(UNREADABLE, error))
        return None
    now = config.model.model_dump(mode="json")
    decides = ("family", "layers", "width", "heads", "kv_heads", "inner_width", "mlp", "tied", "norm", "bias")
    if other := [name for name in decides if name in was and name in now and was[name] != now[name]]:
        told = ", ".join(f"model.{name} was {was[name]} and is {now[name]}" for name in other)
        settings = tuple(Setting(f"model.{name}") for name in other)
        findings.append(Finding("resume.arch_drift", "error", f"{path} cannot be continued: {told}", "", settings))
    metrics, tokens = saved.state.get("metrics"), saved.state.get("tokens_trained")
    loss = metrics.get("loss") if isinstance(metrics, dict) else None
    return ResumeFacts(path, saved.step, tokens if isinstance(tokens, int) else None, None, loss)
