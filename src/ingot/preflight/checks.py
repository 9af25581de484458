"""Checks of a run's plan against its data, memory, session time, output folder and checkpoint."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ingot.artifact.gpt_simple import STATE, Saved, is_checkpoint, read_model, read_saved, refuse_other_shapes, saved_checkpoints
from ingot.backends.limits import refuse_precision, refuse_ranks_on_mlx, refuse_torch_only
from ingot.config.schema import Config
from ingot.config.size import Size, row_bytes, state_bytes, step_bytes
from ingot.errors import CannotContinue, CheckpointError, ConfigError, Setting, Unreadable
from ingot.model.settings import FileSettings
from ingot.preflight.data_checks import DataFacts
from ingot.preflight.findings import Finding, Findings, Severity
from ingot.runs.checkpoints import Index, newest_index, occupied, resume_point, started_from
from ingot.runs.folder import INDEX, named_path, saved_steps
from ingot.runs.state import read_state
from ingot.runtime.files import user_path
from ingot.train.resume import changes, facts_of, refuse_lost, refuse_occupied
from ingot.train.step_plan import refuse_idle_ranks, shapes

DEVICES = re.compile(r"auto|(cpu|cuda|mps)(:(0|[1-9]\d*))?|mlx")

MAX_STEPS, PHASES, EPOCHS = Setting("training.max_steps"), Setting("data.phases"), Setting("data.epochs")
IDLE_ROWS = 1024  # unused rows of the embedding that are normal: vocabularies are rounded up
MANY_PASSES = 300  # epochs that deserve a warning; nanoGPT's smallest preset trains for 82
TOLERANCE = 0.05  # relative difference allowed between the tokens of all phases and of all steps


@dataclass(frozen=True)
class PhaseFacts:
    """A phase of the data: its mix, and the tokens read of each bucket by its end."""

    tokens: int
    mix: dict[str, float]  # shares that add up to 1
    taken: dict[str, float]


@dataclass(frozen=True)
class PlanFacts:
    """The length of a run."""

    world_size: int
    tokens_per_step: int
    max_steps: int | None
    total_tokens: int | None  # None if the clock ends the run
    phases: list[PhaseFacts] = field(default_factory=list)


def plan_of(config: Config, world_size: int) -> PlanFacts:
    """Return the plan of a run."""
    phases, taken = [], dict[str, float]()
    for phase in config.data.phases:
        mix = shares(phase.mix)
        taken = {name: taken.get(name, 0.0) + mix.get(name, 0.0) * phase.tokens for name in taken.keys() | mix.keys()}
        phases.append(PhaseFacts(phase.tokens, mix, dict(sorted(taken.items()))))
    return PlanFacts(world_size, config.training.tokens_per_step, config.training.max_steps, total_tokens(config), phases)


def total_tokens(config: Config) -> int | None:
    """Return the tokens of all steps; None if the clock ends the run."""
    steps, left, total = config.training.max_steps, config.training.max_steps, 0
    if steps is None or left is None:
        return None
    stages = config.training.stages
    for number, plan in enumerate(shapes(config)):
        length = left
        if number + 1 < len(stages):
            length = stages[number].steps or round((stages[number].share or 0.0) * steps)
        total += min(length, left) * plan.samples * config.data.seq_len
        left -= min(length, left)
    return total


def shares(mix: Mapping[str, float]) -> dict[str, float]:
    """Normalise weights to a sum of 1."""
    whole = sum(mix.values()) or 1.0
    return {name: weight / whole for name, weight in mix.items()}


def check_ranks(config: Config, world_size: int, findings: Findings) -> None:
    """Check that every rank has a row of every step."""
    if world_size < 1:
        findings.add("preflight.world_size", "error", f"{world_size} ranks cannot train; there must be at least 1")
        return
    with findings.noting("training.ranks", ConfigError):
        refuse_idle_ranks(config, world_size)


def check_device(config: Config, world_size: int, findings: Findings) -> None:
    """Check the name of the device and what it supports; only a framework can tell whether this machine has it."""
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
        path = user_path(config.model.file)
        try:
            ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError) as error:
            said = getattr(error, "strerror", None) or error
            findings.add(
                "model.file_unusable", "error", f"{{0}} cannot be used: {said}", Setting("model.file", config.model.file)
            )


def check_buckets(config: Config, facts: DataFacts, findings: Findings) -> None:
    """Check that the buckets that a mix names exist."""
    setting = Setting("data.phases" if config.data.phases else "data.mix")
    mixes = [phase.mix for phase in config.data.phases] or ([config.data.mix] if config.data.mix else [])
    wrong = [one.code for one in findings if one.blocks and one.code.startswith("data.train.")]
    told = {code.removeprefix("data.train.").rpartition(".")[0] for code in wrong}  # buckets that are there and damaged
    there, named = facts.splits.get("train", {}).keys(), {name for mix in mixes for name in mix} - told
    if not mixes or not facts.splits:
        return
    if unknown := sorted(named - there) if facts.has_buckets else sorted(named):
        has = ", ".join(sorted(there)) if facts.has_buckets else "no buckets"
        message = f"{{0}} names buckets that {facts.path} does not have: {', '.join(unknown)}; there are {has}"
        findings.add("curriculum.unknown_buckets", "error", message, setting)
    elif unused := sorted(there - {name for mix in mixes for name, weight in mix.items() if weight}):
        message = f"{', '.join(unused)}: {{0}} gives no weight to them, so they are not read"
        findings.add("curriculum.unused_buckets", "info", message, setting)


def check_files(facts: DataFacts, world_size: int, workers: int | None, findings: Findings) -> None:
    """Report what gpt-simple reports about the number of files; in Ingot ranks share rows, not files."""
    counts = {name: bucket.files for name, bucket in facts.splits.get("train", {}).items() if bucket.files}
    if not facts.has_buckets or facts.format == "jsonl" or not counts or workers is None:
        return
    name = min(counts, key=counts.__getitem__)
    if counts[name] < world_size:
        message = f"bucket {name} has {counts[name]} files and there are {world_size} ranks; that is fine here: ranks share rows"
        findings.add("data.shards.fewer_than_world", "info", message)
    elif workers > counts[name] // world_size:
        message = (
            f"num_workers={workers} is more than the {counts[name]} files of bucket {name} would feed, and without effect here"
        )
        findings.add("data.num_workers.will_clamp", "warning", message)


def check_vocabulary(config: Config, facts: DataFacts, findings: Findings) -> None:
    """Check that the vocabulary of the data uses the model's embedding."""
    rows, ids = config.model.vocab_size or 0, facts.tokenizer.vocab_size if facts.tokenizer is not None else 0
    if not ids or rows - ids <= IDLE_ROWS:
        return
    message = f"{{0}} and the data has {ids:,} ids: {rows - ids:,} rows of the embedding can never be used"
    advice = f"set {{1}} or prepare the text with --tokenizer {config.suggested_tokenizer}"
    settings = (Setting("model.vocab_size", f"{rows:,}"), Setting("model.vocab_size", "null"))
    findings.add("model.idle_rows", "warning", message, *settings, advice=advice)


def check_supply(config: Config, facts: DataFacts, plan: PlanFacts, allow_mismatch: bool, findings: Findings) -> None:
    """Check that the data has as many tokens as the run reads."""
    if plan.phases:
        _check_phases(config, facts, plan, allow_mismatch, findings)
    elif plan.total_tokens is not None:
        _check_plain(config, facts, plan.total_tokens, findings)


def _check_phases(config: Config, facts: DataFacts, plan: PlanFacts, allow_mismatch: bool, findings: Findings) -> None:
    epochs, halts = config.data.epochs, config.data.exhausted == "halt"
    buckets = facts.splits.get("train", {})
    for name, demand in plan.phases[-1].taken.items():
        tokens = buckets[name].tokens if name in buckets else 0
        if epochs is None or tokens is None or name not in buckets or demand <= epochs * tokens:
            continue
        message = f"the phases of {{0}} read {count(demand)} tokens of bucket {name}, which has {count(epochs * tokens)}"
        then = "the run would halt there" if halts else "the others share its weight from then on"
        findings.add(f"curriculum.shortfall.{name}", "budget" if halts else "warning", f"{message}: {then}", PHASES)
    demand = sum(phase.tokens for phase in plan.phases)
    if plan.total_tokens is not None and abs(plan.total_tokens - demand) > TOLERANCE * demand:
        more = "more" if plan.total_tokens > demand else "fewer"
        message = f"{{0}} steps read {count(plan.total_tokens)} tokens, {more} than the {count(demand)} of the phases"
        severity: Severity = "warning" if allow_mismatch else "budget"
        advice = "change {0} or the tokens of {1}"
        findings.add("training.budget_mismatch", severity, message, MAX_STEPS, PHASES, advice=advice)


def _check_plain(config: Config, facts: DataFacts, total: int, findings: Findings) -> None:
    epochs, tokens = config.data.epochs, facts.tokens()
    if not tokens:
        return
    if epochs is None:
        if total > tokens:
            message = (
                f"{facts.path} has {count(tokens)} tokens and the run reads {count(total)}: it is read {total / tokens:.1f} times"
            )
            many = total > MANY_PASSES * tokens and config.budget.seconds is None
            advice = "lower {0} or prepare more text" if many else ""
            findings.add("data.repeated", "warning" if many else "info", message, MAX_STEPS, advice=advice)
        return
    supply = float(epochs * tokens)
    if config.data.mix and config.data.exhausted == "halt":
        weights = shares(config.data.mix)
        known = {name: bucket.tokens or 0 for name, bucket in facts.splits["train"].items()}
        supply = min((epochs * known.get(name, 0) / share for name, share in weights.items() if share), default=supply)
    if total > supply:
        step = int(supply // max(1, total // max(1, config.training.max_steps or 1)))
        ends = "halts" if config.data.mix and config.data.exhausted == "halt" else "ends"
        message = f"{facts.path} has {count(supply)} tokens for this mix, and {{0}} steps read {count(total)}"
        advice = f"lower {{0}}, raise {{1}} or add data: the run {ends} at about step {step:,}"
        findings.add("data.shorter_than_plan", "warning", message, MAX_STEPS, EPOCHS, advice=advice)


def least_bytes(config: Config, size: Size, world_size: int) -> int:
    """Return the bytes a rank needs for its state and the rows of its steps, whatever the micro-batch."""
    return state_bytes(config, size) + step_bytes(config, world_size)


def needed_bytes(config: Config, size: Size, vocab_size: int, world_size: int) -> int:
    """Return about the least memory a rank needs, including the activations of a micro-batch; loads no framework."""
    asked = config.training.micro_batch
    rows = min(1 if asked == "auto" else asked, max(1, config.rows_per_step // world_size))
    return least_bytes(config, size, world_size) + rows * row_bytes(
        config, vocab_size, bool(config.training.gradient_checkpointing)
    )


def has_gpu() -> bool:
    """Return True if nvidia-smi is installed."""
    return shutil.which("nvidia-smi") is not None


def gpu_bytes() -> int | None:
    """Return the memory of the smallest GPU as nvidia-smi reports it; None if there is none."""
    if not has_gpu():
        return None
    words = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        out = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout
        return min(int(line) for line in out.split()) << 20
    return None


def check_memory(name: str, needed: int, least: int, there: int | None, findings: Findings) -> None:
    """Check that a rank fits in memory; it is an error if its state alone does not."""
    if there is not None and needed > there:
        message = f"a rank needs about {byte_count(needed)} and {name} has {byte_count(there)}"
        settings = (Setting("training.micro_batch"), Setting("training.gradient_checkpointing"))
        advice = "take a smaller model, lower {0} or set {1}"
        findings.add("model.memory", "error" if least > there else "warning", message, *settings, advice=advice)


def check_time(
    config: Config, seconds: float | None, tokens_per_second: float | None, left: int | None, findings: Findings
) -> None:
    """Check that the rest of a run fits in the session, at a measured speed."""
    if seconds is None or not tokens_per_second or not left:
        return
    needed = left / tokens_per_second
    if needed <= seconds:
        return
    message = f"what is left takes about {needed:,.0f} s at {tokens_per_second:,.0f} tokens/s and this session has {seconds:,.0f}"
    sessions = f"about {needed / seconds:.1f} sessions"
    if config.training.output_dir is None:
        advice = "set {0}: without it every session begins a new run"
        findings.add("training.walltime", "warning", message, Setting("training.output_dir"), advice=advice)
    else:
        findings.add("training.walltime", "info", f"{message}: it takes {sessions}")


def count(tokens: float) -> str:
    """Format a number of tokens, such as 1.50M."""
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if tokens >= limit:
            return f"{tokens / limit:.2f}{letter}"
    return f"{tokens:.0f}"


def byte_count(number: int) -> str:
    """Format a number of bytes."""
    return f"{number / (1 << 30):.1f} GiB" if number >= 1 << 30 else f"{number / (1 << 20):.1f} MiB"


OUTPUT = Setting("training.output_dir")
UNREADABLE = "resume.trainer_state_unreadable"


@dataclass(frozen=True)
class ResumeFacts:
    """The checkpoint that a run resumes from."""

    path: Path
    step: int
    tokens: int | None
    tokens_per_second: float | None
    loss: float | None


def check_output(config: Config, findings: Findings) -> Path | None:
    """Return the run folder and check that it can be written, without creating anything."""
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
    """Return the checkpoint that the run resumes from; None for a new run."""
    asked = config.training.resume
    try:
        if asked == "never" and output is not None:
            refuse_occupied(output)
        if (theirs := foreign_checkpoint(asked, output)) is not None:
            return _theirs(config, theirs, findings)
        found = resume_point(asked, output, partial(_passed_over, findings))
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
    """Return the gpt-simple checkpoint that a run resumes from; None for a new run or one with an Ingot checkpoint."""
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
        if newest is not None and started_from(newest, named):
            return None  # the same command again: it was taken over by an earlier session
        raise occupied(asked, output, "holds another run", last)
    if theirs and theirs[-1].step > saved.step:
        raise occupied(asked, output, "has newer checkpoints", theirs[-1].step)
    return saved


def _code(asked: str, output: Path | None) -> str:
    """Return the code, as in gpt-simple, for why a run cannot resume."""
    if asked in ("auto", "never"):
        return "resume.resolve_failed"
    path = named_path(asked, output)
    if not path.is_dir():
        return "resume.path_missing"
    if not any((path / name).is_file() for name in (INDEX, STATE)) and not saved_steps(path / "checkpoints"):
        return "resume.no_trainer_state"
    return UNREADABLE if newest_index(output) is None else "resume.resolve_failed"


def _passed_over(findings: Findings, path: Path, error: CheckpointError) -> None:
    """Report a checkpoint that is skipped; it is an error for the oldest, after which none is left."""
    oldest = path == next(iter(saved_steps(path.parent).values()))
    findings.append(Finding.of(UNREADABLE, error, "error" if oldest else "warning"))


def _ours(config: Config, found: Index, output: Path | None, data: DataFacts, findings: Findings) -> ResumeFacts:
    path, was = found.path, found.progress
    try:
        if data.dataset is not None:
            now = facts_of(config, data.dataset)
        else:  # problems at data.path are reported elsewhere
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
        message = f"some settings are not those that {path} was saved with; the run continues with them"
        findings.add("resume.config_drift", "info", message)
    state = read_state(output) if output is not None else None
    speed = state.tokens_per_second if state is not None else None
    return ResumeFacts(path, found.step, was.get("tokens"), speed, was.get("loss"))


def _theirs(config: Config, saved: Saved, findings: Findings) -> ResumeFacts | None:
    """Check a gpt-simple checkpoint."""
    with findings.noting("resume.arch_drift", CheckpointError):
        refuse_other_shapes(saved.path, read_model(saved.path), config.model.model_dump(mode="json"))
    metrics, tokens = saved.state.get("metrics"), saved.state.get("tokens_trained")
    loss = metrics.get("loss") if isinstance(metrics, dict) else None
    return ResumeFacts(saved.path, saved.step, tokens if isinstance(tokens, int) else None, None, loss)
