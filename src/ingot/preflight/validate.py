"""All checks before a run starts: `ingot validate` prints the findings, and `train` does not start if one of them is blocking."""

from __future__ import annotations

import ast
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.artifact.gpt_simple import STATE, Saved, is_checkpoint, read_model, read_saved, refuse_other_shapes, saved_checkpoints
from ingot.backends.open import find_device, open_backend, open_group, refuse_precision, refuse_ranks_on_mlx, refuse_torch_only
from ingot.config.memory import Size, model_size, row_bytes, state_bytes, step_bytes
from ingot.config.schema import GPT2_PADDED_VOCAB_SIZE, Config
from ingot.data.store.dataset import Dataset
from ingot.data.tokenizers.by_name import BPE, bpe_size
from ingot.errors import CannotContinue, CheckpointError, ConfigError, IngotError, Rename, Setting, Unreadable
from ingot.model.settings import FileSettings
from ingot.preflight.data_checks import (
    Finding,
    Findings,
    RunData,
    Severity,
    check_buckets,
    check_files,
    check_supply,
    look_at_data,
    phases_of,
    total_tokens,
)
from ingot.runs.checkpoints import newest_index, occupied, resume_point, started_from
from ingot.runs.folder import INDEX, named_path, saved_steps
from ingot.runtime.devices import DEVICES
from ingot.runtime.files import user_path
from ingot.runtime.machine import host_bytes
from ingot.runtime.ranks import Ranks, ranks_from_environment
from ingot.runtime.remote import local_path
from ingot.train.evaluation import open_tasks
from ingot.train.reader import read_rank_batch
from ingot.train.resume import (
    changes,
    check_initial_weights,
    facts_of,
    fetch_runs,
    load_initial_weights,
    refuse_lost,
    refuse_occupied,
    starts_fresh,
)
from ingot.train.start import open_data
from ingot.train.step_plan import Position, plan_step, refuse_idle_ranks
from ingot.train.stop import find_walltime

MICRO_BATCH, CHECKPOINTING = Setting("training.micro_batch"), Setting("training.gradient_checkpointing")
IDLE_ROWS = 1024  # up to this many unused embedding rows are normal, because vocabulary sizes are rounded up
UNREADABLE = "resume.trainer_state_unreadable"


@dataclass
class Report:
    """The facts and findings about a run."""

    config: Config
    world_size: int
    data: RunData
    vocab_size: int
    total_tokens: int | None  # None if the number of steps is not set
    output: Path | None
    size: Size | None
    memory: int | None = None  # estimated memory per rank in bytes
    resume: dict[str, Any] | None = None
    runtime: dict[str, str] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings)


def validate(
    config: Config,
    world_size: int = 1,
    *,
    began: float | None = None,
    workers: int | None = None,
    allow_mismatch: bool = True,
    thorough: bool = True,
    fresh: bool = False,
) -> Report:
    """Check a run of `world_size` ranks. Nothing is written, and neither PyTorch nor MLX is imported.

    `began` is the Unix time when the session started, `workers` the number of loader processes requested in gpt-simple. With
    `allow_mismatch`, phases may have more or fewer tokens than the steps read. Without `thorough`, checks that training repeats
    anyway are skipped. With `fresh`, an earlier run in the output folder is not checked, because it will be deleted.
    """
    findings, ranks, total = Findings(), max(1, world_size), total_tokens(config)
    if world_size < 1:
        findings.add("preflight.world_size", "error", f"{world_size} ranks cannot train; there must be at least 1")
    else:
        with findings.noting("training.ranks", ConfigError):
            refuse_idle_ranks(config, world_size)
    if thorough:
        _check_device_and_model(config, world_size, findings)
    data = look_at_data(config, findings)
    check_buckets(config, data, findings)
    check_files(data, ranks, workers, findings)
    rows, ids = config.model.vocab_size or 0, data.tokenizer.vocab_size if data.tokenizer is not None else 0
    if ids and rows - ids > IDLE_ROWS:
        message = f"{{0}}, but the data has {ids:,} ids: {rows - ids:,} rows of the embedding are never used"
        advice = f"set {{1}} or prepare the text with --tokenizer {config.suggested_tokenizer or f'bpe:{rows}'}"
        settings = (Setting("model.vocab_size", f"{rows:,}"), Setting("model.vocab_size", "null"))
        findings.add("model.idle_rows", "warning", message, *settings, advice=advice)
    # Skip the supply check after an error in the data, because the token counts are wrong.
    if not any(finding.blocks and finding.code.startswith("data.") for finding in findings):
        check_supply(config, data, total, allow_mismatch, findings)
    output, vocab_size = _check_output(config, findings), rows or ids
    if not vocab_size and (config.data.tokenizer or "").startswith(BPE):
        vocab_size = bpe_size(config.data.tokenizer or "")  # the run will train this tokenizer before it starts
    if not vocab_size:
        vocab_size = GPT2_PADDED_VOCAB_SIZE
        message = f"the vocabulary size is unknown; the model's size is estimated for {GPT2_PADDED_VOCAB_SIZE:,} ids"
        findings.add("model.vocab_unknown", "warning", message)
    size = model_size(config, vocab_size)
    report = Report(config, ranks, data, vocab_size, total, output, size, findings=findings)
    if size is not None:
        report.memory = _check_memory(config, size, vocab_size, ranks, findings)
    report.resume = None if fresh else check_resume(config, output, data, findings)
    if thorough and config.training.weights is not None and (fresh or starts_fresh(config)):
        with findings.noting("resume.weights_unusable", CheckpointError):
            check_initial_weights(config, data.tokenizer)
    if thorough and config.evaluation.tasks and data.tokenizer is not None:
        with findings.noting("evaluation.tasks_unusable"):
            open_tasks(config.evaluation, config.model.context or config.data.seq_len, data.tokenizer)
    with findings.noting("training.walltime", ConfigError):
        began = time.time() if began is None else began
        find_walltime(config.training, began, warn=lambda text: findings.add("training.walltime", "warning", text))
    if thorough and data.dataset is not None and not findings.blocked:
        try:
            open_data(config, ranks, data.dataset)
        except IngotError as error:
            findings.append(Finding("data.unusable" if error.exit_code == 3 else "training.unusable", "error", error))
    return report


def check_before_training(
    config: Config,
    world_size: int,
    say: Callable[[str], None],
    *,
    workers: int | None = None,
    allow_mismatch: bool = True,
    fresh: bool = False,
    name: Rename = str,
    advise: Rename = str,
) -> Dataset | None:
    """Raise the first finding that keeps a run from starting, and report warnings; return the dataset if it was opened.

    `name` and `advise` adapt the setting names and advice of warnings; errors are adapted where they are printed.
    """
    report = validate(config, world_size, workers=workers, allow_mismatch=allow_mismatch, thorough=False, fresh=fresh)
    report.findings.refuse()
    for finding in report.findings:
        if finding.severity == "warning":
            say(f"{finding.code}: {finding.render(name, advise)}")
    return report.data.dataset


def _check_device_and_model(config: Config, world_size: int, findings: Findings) -> None:
    """Check that the device supports the settings and that a custom model's file is valid Python, without importing anything."""
    if not DEVICES.fullmatch(config.training.device):
        setting = Setting("training.device", config.training.device)
        findings.add("training.device_unknown", "error", "{0} is not a device; use auto, cpu, cuda, cuda:N, mps or mlx", setting)
    with findings.noting("training.device_unsupported", ConfigError):
        if config.training.device == "mlx":
            refuse_ranks_on_mlx(world_size)
            refuse_torch_only(config)
    with findings.noting("runtime.no_cuda", ConfigError):
        refuse_precision(config)
    if isinstance(config.model, FileSettings):
        try:
            ast.parse(user_path(config.model.file).read_bytes())
        except (OSError, SyntaxError, ValueError) as error:
            message = f"{{0}} cannot be used: {getattr(error, 'strerror', None) or error}"
            findings.add("model.file_unusable", "error", message, Setting("model.file", config.model.file))


def _check_memory(config: Config, size: Size, vocab_size: int, world_size: int, findings: Findings) -> int:
    """Return the estimated minimum memory of a rank in bytes; add a finding if a machine without a GPU has less."""
    state = state_bytes(config, size) + step_bytes(config, world_size)
    rows = 1 if config.training.micro_batch == "auto" else config.training.micro_batch
    rows = min(rows, max(1, config.rows_per_step // world_size))
    needed = state + rows * row_bytes(config, vocab_size, bool(config.training.gradient_checkpointing))
    device, memory = config.training.device, host_bytes()
    on_gpu = device.startswith("cuda") or (device == "auto" and shutil.which("nvidia-smi") is not None)
    if memory is not None and needed > memory and not on_gpu:
        message = f"a rank needs about {_byte_count(needed)} of memory, but this machine has {_byte_count(memory)}"
        advice = "use a smaller model, lower {0} or set {1}"
        severity: Severity = "error" if state > memory else "warning"
        findings.add("model.memory", severity, message, MICRO_BATCH, CHECKPOINTING, advice=advice)
    return needed


def _byte_count(number: int) -> str:
    return f"{number / (1 << 30):.1f} GiB" if number >= 1 << 30 else f"{number / (1 << 20):.1f} MiB"


def _check_output(config: Config, findings: Findings) -> Path | None:
    """Return the run folder, or None if it is not set; check that it can be written, without creating anything."""
    if config.training.output_dir is None:
        return None
    folder = local_path(config.training.output_dir).absolute()
    nearest = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    if folder.resolve() == Path(folder.anchor):
        why = "a run needs its own folder"
    elif not nearest.is_dir():
        why = f"{nearest} is not a folder"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        why = f"{nearest} cannot be written"
    else:
        return folder
    findings.add("output.not_writable", "error", f"{{0}} cannot be {folder}: {why}", Setting("training.output_dir"))
    return folder


def check_resume(config: Config, output: Path | None, data: RunData, findings: Findings) -> dict[str, Any] | None:
    """Check whether the run can resume; return its checkpoint's path, step and tokens, or None if no checkpoint is usable."""
    resume = config.training.resume

    def on_skipped(path: Path, error: CheckpointError) -> None:
        oldest = path == next(iter(saved_steps(path.parent).values()))
        findings.append(Finding(UNREADABLE, "error" if oldest else "warning", error))  # an error if no older checkpoint is left

    try:
        fetch_runs(config)
        if resume == "never" and output is not None:
            refuse_occupied(output)
        if (theirs := foreign_checkpoint(resume, output)) is not None:
            with findings.noting(UNREADABLE, CheckpointError):
                shapes = read_model(theirs.path)
                with findings.noting("resume.arch_drift", CheckpointError):
                    refuse_other_shapes(theirs.path, shapes, config.model.model_dump(mode="json"))
            tokens = theirs.state.get("tokens_trained")
            return {"path": str(theirs.path), "step": theirs.step, "tokens": tokens if isinstance(tokens, int) else None}
        checkpoint = resume_point(resume, output, on_skipped)
        if output is not None and resume == "auto":
            refuse_lost(output)
    except CheckpointError as error:
        code = UNREADABLE if isinstance(error, Unreadable) else "resume.resolve_failed"
        if code != UNREADABLE and resume not in ("auto", "never"):  # gpt-simple has a separate finding code for each reason
            path = named_path(resume, output)
            if not path.is_dir():
                code = "resume.path_missing"
            elif not any((path / name).is_file() for name in (INDEX, STATE)) and not saved_steps(path / "checkpoints"):
                code = "resume.no_trainer_state"
            elif newest_index(output) is None:
                code = UNREADABLE
        findings.append(Finding(code, "error", error))
        return None
    if checkpoint is None:
        return None
    path, was = checkpoint.path, checkpoint.progress
    now = {"path": str(path), "step": checkpoint.step, "tokens": was.get("tokens")}
    try:
        if data.dataset is not None:
            facts = facts_of(config, data.dataset)
        else:  # the data could not be opened; look_at_data reports why
            facts = {**was, "config": config.model_dump(mode="json"), "data_fingerprint": was["data_fingerprint"]}
        changed = changes(was, facts)
    except (KeyError, TypeError, AttributeError):
        findings.add(UNREADABLE, "error", f"{path} does not record which run it belongs to")
        return now
    shape = [change for change in changed if change.setting.startswith("model.")]
    rest = [change for change in changed if change not in shape]
    for code, some in (("resume.arch_drift", shape), ("resume.run_changed", rest)):
        if some:
            findings.append(Finding(code, "error", CannotContinue(path, some)))
    if not changed and config.model_dump(mode="json") != was["config"]:
        message = f"some settings differ from those saved in {path}; the run continues with the new ones"
        findings.add("resume.config_drift", "info", message)
    return now


def foreign_checkpoint(resume: str, output: Path | None) -> Saved | None:
    """Return the gpt-simple checkpoint that a run resumes from; None for a new run or if it resumes from an Ingot checkpoint."""
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
            return None  # an earlier session of the same command already imported this checkpoint
        raise occupied(resume, output, "holds another run", last)
    if theirs and theirs[-1].step > saved.step:
        raise occupied(resume, output, "has newer checkpoints", theirs[-1].step)
    return saved


# The report as JSON and as text.

MARKS = {"error": "x", "budget": "$", "warning": "!", "info": "i"}
SECTIONS = {  # section title -> key in the record, and the prefixes of its finding codes
    "Model": ("model", ("model.",)),
    "Data": ("data", ("data.", "tokenizer.")),
    "Curriculum": ("curriculum", ("curriculum.",)),
    "Training plan": ("training", ("training.", "preflight.", "evaluation.")),
    "Output": ("output", ("output.",)),
    "Resume": ("resume", ("resume.",)),
    "Runtime": ("runtime", ("runtime.",)),
}


def report_record(report: Report, strict: bool, name: Rename = str, advise: Rename = str) -> dict[str, Any]:
    """Return the report as a JSON object."""
    config, size, data = report.config, report.size, report.data
    splits = {split: {bucket: vars(facts) for bucket, facts in buckets.items()} for split, buckets in data.splits.items()}
    return {
        "exit_code": report.findings.exit_code(strict),
        "findings": [finding.record(name, advise) for finding in report.findings],
        "model": {
            **{name: getattr(config.model, name) for name in ("family", "layers", "width", "heads")},
            "vocab_size": report.vocab_size,
            "parameters": size.total if size is not None else None,
            "embedding": size.embedding if size is not None else None,
            "memory_bytes": report.memory,
        },
        "data": {
            "path": data.path,
            "format": data.format,
            "tokenizer": data.tokenizer.kind if data.tokenizer is not None else None,
            "splits": splits,
        },
        "curriculum": phases_of(config),
        "training": {
            "world_size": report.world_size,
            "tokens_per_step": config.training.tokens_per_step,
            "max_steps": config.training.max_steps,
            "total_tokens": report.total_tokens,
            "budget_seconds": config.budget.seconds,
        },
        "output": str(report.output) if report.output is not None else None,
        "resume": report.resume,
        "runtime": report.runtime,
    }


def report_lines(report: Report, name: Rename = str, advise: Rename = str) -> list[str]:
    """Return the report as lines of text: facts and findings by section."""
    record, lines = report_record(report, False), []
    record["output"] = record["output"] or f"a new folder below runs/, because {name('training.output_dir')} is not set"
    for section, (key, codes) in SECTIONS.items():
        findings = [finding for finding in report.findings if finding.code.startswith(codes)]
        rendered = [f"[{MARKS[finding.severity]}] {finding.code}: {finding.render(name, advise)}" for finding in findings]
        if facts := [*_facts(record[key]), *rendered]:
            lines += [section, *(f"  {line}" for line in facts), ""]
    counts = [sum(finding.severity == severity for finding in report.findings) for severity in MARKS]
    return [*lines, "{} errors, {} over budget, {} warnings, {} notes".format(*counts)]


def _facts(value: Any, label: str = "") -> Iterator[str]:
    """Yield the lines of a part of the record; a mapping without nested mappings, such as the counts of a bucket, is one line."""
    if isinstance(value, list):
        value = {f"phase {number}": item for number, item in enumerate(value, 1)}
    if not isinstance(value, dict):
        if value not in (None, ""):
            yield f"{label}{': ' if label else ''}{_number(value)}"
        return
    for key, item in value.items():
        name = f"{label} {key}".strip().replace("_", " ")
        if isinstance(item, dict) and item and not any(isinstance(part, dict) for part in item.values()):
            yield f"{name}: " + ", ".join(f"{part.replace('_', ' ')} {_number(v)}" for part, v in item.items() if v is not None)
        else:
            yield from _facts(item, name)


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


# Before a run, a trial step on this machine reports the device, memory use and speed. It writes no files.

FAILED = "runtime.probe.failed"


def add_probe(report: Report) -> None:
    """Try a few steps on this machine; add the device, speed, loss and peak memory, or the failure, to the report."""
    ranks, training, findings = ranks_from_environment(), report.config.training, report.findings
    try:
        device = find_device(training.device, ranks.local_rank)
    except IngotError as error:
        findings.append(Finding("runtime.no_cuda", "error", error))
        return
    report.runtime["device"] = device.name
    with findings.noting("runtime.bf16_unsupported" if device.kind == "cuda" else "runtime.no_cuda", ConfigError):
        report.runtime["precision"] = device.precision(training.precision)
        if device.kind == "cpu" and training.device == "auto":
            message, advice = f"no GPU was found; training would use {device.name}", "set {0} to cpu if that is intended"
            findings.add("runtime.cpu_only", "warning", message, Setting("training.device"), advice=advice)
    if not findings.blocked:
        try:
            _take_step(report, ranks)
        except Exception as error:  # a custom model may raise anything
            full = "memory" in f"{type(error).__name__}: {error}".lower()  # frameworks word this error differently
            code, advice = ("runtime.probe.oom", "lower {0}, set {1} or use a smaller model") if full else (FAILED, "")
            if isinstance(error, IngotError):
                findings.append(Finding(code, "error", error))
            else:
                message = f"a step failed: {type(error).__name__}: {error}"
                findings.add(code, "error", message, MICRO_BATCH, CHECKPOINTING, advice=advice)
    if ranks.world_size > 1:
        failed = findings.blocked
        group = open_group(device, ranks)
        if group.maximum([failed])[0] and not failed:
            findings.add(FAILED, "error", "a trial step failed on another rank")
        group.close()


def alone(config: Config, world_size: int) -> Config:
    """Return a config for one process with a single rank's share of a step; CUDA graphs are off if the full run uses none."""
    rows, t = -(-config.rows_per_step // world_size), config.training
    changes: dict[str, Any] = {"tokens_per_step": rows * config.data.seq_len, "stages": []}
    if t.cuda_graphs == "auto" and (world_size > 1 or t.stages):
        changes["cuda_graphs"] = False
    return config.model_copy(update={"training": config.training.model_copy(update=changes)})


def _take_step(report: Report, ranks: Ranks) -> None:
    """Run a few steps; report the time of a step after compilation, the loss of the first step, and the peak memory."""
    config, rank = alone(report.config, max(ranks.world_size, report.world_size)), Ranks(local_rank=ranks.local_rank)
    dataset, rows = open_data(config, 1, report.data.dataset)
    with closing(open_backend(config, dataset.tokenizer.vocab_size, rank)) as backend:
        if config.training.weights is not None and starts_fresh(config):
            load_initial_weights(config, backend, dataset.tokenizer)
        plan = plan_step(config, Position())
        batch = read_rank_batch(rows, plan, rank, backend.host_buffer((plan.rows, rows.planes, plan.seq_len)))
        backend.tune([(plan, batch.batch)], {})
        with backend.without_trace():
            loss = backend.step(batch.batch, batch.targets, plan).result().loss
            if backend.tuned().get("compile"):  # another step that is not timed: it may record CUDA graphs
                backend.step(batch.batch, batch.targets, plan).result()
            began = time.perf_counter()
            backend.step(batch.batch, batch.targets, plan).result()
            seconds = time.perf_counter() - began
        memory, _ = backend.peak_memory()
        backend.release()
    speed = report.config.training.tokens_per_step / seconds
    step = f"{seconds:.3f} s, about {speed:,.0f} tokens/s"
    report.runtime |= {"step": step, "loss": f"{loss:.4f}", "memory": _byte_count(memory)}
