"""All checks of a run before it starts, in one list: `ingot validate` prints them, and `train` refuses to start on an error."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from ingot.backends.open import find_device, open_backend, open_group
from ingot.config.schema import GPT2_PADDED_VOCAB_SIZE, Config
from ingot.config.size import Size, model_size
from ingot.data.loading.reader import read_rank_batch
from ingot.data.store.dataset import Dataset
from ingot.errors import CheckpointError, ConfigError, IngotError, Rename, Setting
from ingot.preflight.checks import (
    PlanFacts,
    ResumeFacts,
    byte_count,
    check_buckets,
    check_device,
    check_files,
    check_memory,
    check_model_file,
    check_output,
    check_ranks,
    check_resume,
    check_supply,
    check_time,
    check_vocabulary,
    count,
    gpu_bytes,
    has_gpu,
    least_bytes,
    needed_bytes,
    plan_of,
)
from ingot.preflight.data_checks import DataFacts, look_at_data
from ingot.preflight.findings import Finding, Findings, exit_code, refuse
from ingot.runtime.devices import Device
from ingot.runtime.machine import host_bytes
from ingot.runtime.ranks import Ranks, ranks_from_environment
from ingot.train.evaluation import open_tasks
from ingot.train.resume import check_initial_weights, load_initial_weights, starts_fresh
from ingot.train.start import open_data
from ingot.train.step_plan import Position, plan_step
from ingot.train.stop import find_walltime


@dataclass
class Report:
    """The facts and findings about a run."""

    config: Config
    data: DataFacts
    plan: PlanFacts
    vocab_size: int
    size: Size | None = None
    memory: int | None = None  # bytes a rank needs
    output: str = ""
    resume: ResumeFacts | None = None
    seconds: float | None = None  # wall-clock limit of the session; None: no limit
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
    """Check a run of `world_size` ranks whose session began at a unix time. Nothing is written, and no framework is loaded.

    `workers`: loader processes requested in gpt-simple. `allow_mismatch`: phases may have other tokens than the steps. Without
    `thorough`, checks that training itself makes are left out: the order of the rows, and the memory of a GPU. `fresh`: an
    earlier run in the folder will be deleted, so it is not checked.
    """
    findings = Findings()
    check_ranks(config, world_size, findings)
    if thorough:
        check_device(config, world_size, findings)
        check_model_file(config, findings)
    ranks = max(1, world_size)
    data = look_at_data(config, findings)
    check_buckets(config, data, findings)
    check_files(data, ranks, workers, findings)
    check_vocabulary(config, data, findings)
    plan = plan_of(config, ranks)
    if not any(finding.blocks and finding.code.startswith("data.") for finding in findings):  # else the counts are wrong
        check_supply(config, data, plan, allow_mismatch, findings)
    output = check_output(config, findings)
    vocab_size = config.model.vocab_size or (data.tokenizer.vocab_size if data.tokenizer is not None else 0)
    if not vocab_size:
        vocab_size = GPT2_PADDED_VOCAB_SIZE
        message = f"nothing says how many ids there are; the size of the model is that with {GPT2_PADDED_VOCAB_SIZE:,}"
        findings.add("model.vocab_unknown", "warning", message)
    report = Report(config, data, plan, vocab_size, output=str(output) if output is not None else "", findings=findings)
    report.size = model_size(config, vocab_size)
    _check_memory(report, ranks, thorough)
    report.resume = None if fresh else check_resume(config, output, data, findings)
    if thorough and config.training.weights is not None and (fresh or starts_fresh(config)):
        with findings.noting("resume.weights_unusable", CheckpointError):
            check_initial_weights(config, data.tokenizer)
    if thorough and config.evaluation.tasks and data.tokenizer is not None:
        with findings.noting("evaluation.tasks_unusable"):
            open_tasks(config.evaluation, config.model.context or config.data.seq_len, data.tokenizer)
    report.seconds = _session_seconds(config, began, findings)
    if report.resume is not None and plan.total_tokens is not None:
        left = plan.total_tokens - (report.resume.tokens or 0)
        check_time(config, report.seconds, report.resume.tokens_per_second, left, findings)
    if thorough and data.dataset is not None and not findings.blocked:
        try:
            open_data(config, ranks, data.dataset)
        except IngotError as error:
            kind = {2: "training.unusable", 3: "data.unusable"}.get(error.exit_code, "training.unusable")
            findings.append(Finding.of(kind, error))
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

    Warnings use the names and advice that `name` and `advise` give; errors get them where they are printed.
    """
    report = validate(config, world_size, workers=workers, allow_mismatch=allow_mismatch, thorough=False, fresh=fresh)
    refuse(report.findings)
    for finding in report.findings:
        if finding.severity == "warning":
            say(f"{finding.code}: {finding.render(name, advise)}")
    return report.data.dataset


def _session_seconds(config: Config, began: float | None, findings: Findings) -> float | None:
    walltime = None
    with findings.noting("training.walltime", ConfigError):
        began = time.time() if began is None else began
        walltime = find_walltime(config.training, began, warn=lambda text: findings.add("training.walltime", "warning", text))
    return walltime.ends_at - time.time() if walltime is not None else None


def _check_memory(report: Report, ranks: int, thorough: bool) -> None:
    if report.size is None:
        return
    config = report.config
    report.memory = needed_bytes(config, report.size, report.vocab_size, ranks)
    least, device = least_bytes(config, report.size, ranks), config.training.device
    on_gpu = device.startswith("cuda") or (device == "auto" and has_gpu())
    if on_gpu and thorough:
        check_memory("the GPU", report.memory, least, gpu_bytes(), report.findings)
    elif not on_gpu:
        check_memory("this machine", report.memory, least, host_bytes(), report.findings)


MARKS = {"info": "i", "warning": "!", "error": "x", "budget": "$"}
# The sections, and the prefixes of the codes that belong to them.
SECTIONS = {
    "Model": ("model.",),
    "Data": ("data.", "tokenizer."),
    "Curriculum": ("curriculum.",),
    "Training plan": ("training.", "preflight."),
    "Output": ("output.",),
    "Resume": ("resume.",),
    "Runtime": ("runtime.",),
}


def report_lines(report: Report, name: Rename = str, advise: Rename = str) -> list[str]:
    """Return the report as lines of text."""
    facts = {
        "Model": _model(report),
        "Data": _data(report),
        "Curriculum": _curriculum(report),
        "Training plan": _plan(report),
        "Output": [report.output or f"a new folder below runs/, because {name('training.output_dir')} is not set"],
        "Resume": _resume(report),
        "Runtime": [f"{what}: {told}" for what, told in report.runtime.items()],
    }
    lines = []
    for section, codes in SECTIONS.items():
        found = [finding for finding in report.findings if finding.code.startswith(codes)]
        if facts[section] or found:
            lines += [section, *(f"  {line}" for line in facts[section]), *(finding_line(one, name, advise) for one in found), ""]
    return [*lines, summary(report.findings)]


def finding_line(finding: Finding, name: Rename = str, advise: Rename = str) -> str:
    """Return a finding as one line, with its mark and code."""
    return f"  [{MARKS[finding.severity]}] {finding.code}: {finding.render(name, advise)}"


def summary(findings: Sequence[Finding]) -> str:
    """Return the number of findings of each kind as text."""
    counts = {kind: sum(finding.severity == kind for finding in findings) for kind in ("error", "budget", "warning", "info")}
    return f"{counts['error']} errors, {counts['budget']} over budget, {counts['warning']} warnings, {counts['info']} notes"


def report_record(report: Report, strict: bool, name: Rename = str, advise: Rename = str) -> dict[str, Any]:
    """Return the report as a JSON object."""
    size, plan, resume, data = report.size, report.plan, report.resume, report.data
    splits = {split: {bucket: vars(facts) for bucket, facts in buckets.items()} for split, buckets in data.splits.items()}
    tokenizer = data.tokenizer
    return {
        "exit_code": exit_code(report.findings, strict),
        "findings": [finding.record(name, advise) for finding in report.findings],
        "model": {
            "family": report.config.model.family,
            "vocab_size": report.vocab_size,
            "parameters": size.total if size is not None else None,
            "embedding": size.embedding if size is not None else None,
            "memory_bytes": report.memory,
        },
        "data": {
            "path": data.path,
            "format": data.format,
            "tokenizer": tokenizer.kind if tokenizer is not None else None,
            "splits": splits,
        },
        "curriculum": [{"tokens": one.tokens, "mix": one.mix, "taken": one.taken} for one in plan.phases],
        "training": {
            "world_size": plan.world_size,
            "tokens_per_step": plan.tokens_per_step,
            "max_steps": plan.max_steps,
            "total_tokens": plan.total_tokens,
        },
        "output": report.output or None,
        "resume": {"path": str(resume.path), "step": resume.step, "tokens": resume.tokens} if resume is not None else None,
        "runtime": report.runtime,
    }


def _model(report: Report) -> list[str]:
    model, size = report.config.model, report.size
    context = model.context or report.config.data.seq_len
    lines = [f"{model.family}: {model.layers} layers, width {model.width}, {model.heads} heads, context {context:,}"]
    if size is not None:
        lines.append(f"{size.total:,} parameters, {size.embedding:,} of them the embedding of {report.vocab_size:,} ids")
    if report.memory is not None:
        lines.append(f"a rank needs at least about {byte_count(report.memory)} to train it")
    return lines


def _data(report: Report) -> list[str]:
    data = report.data
    lines = [f"{data.path} ({data.format})" if data.format else data.path]
    if data.tokenizer is not None:
        lines.append(f"tokenizer {data.tokenizer.kind}, {data.tokenizer.vocab_size:,} ids")
    for split, buckets in data.splits.items():
        for name, one in buckets.items():
            told = "" if one.tokens is None else f", {count(one.tokens)} tokens"
            more = "" if one.documents is None or not one.documents else f", {one.documents:,} documents"
            lines.append(f"{split} {name}: {one.files} files{told}{more}")
    return lines


def _curriculum(report: Report) -> list[str]:
    mix = report.config.data.mix
    if not report.plan.phases:
        return [f"one mix for the whole run: {_shares(mix)}"] if mix else []
    lines, buckets = [], report.data.splits.get("train", {})
    for number, phase in enumerate(report.plan.phases, 1):
        lines.append(f"phase {number}, {count(phase.tokens)} tokens: {_shares(phase.mix)}")
        for name, taken in phase.taken.items():
            there = buckets[name].tokens if name in buckets else None
            of = "" if there is None else f" of {count(there)}"
            lines.append(f"  {name}: {count(taken)}{of} read by then")
    return lines


def _shares(mix: dict[str, float]) -> str:
    return ", ".join(f"{name} {weight:g}" for name, weight in mix.items())


def _plan(report: Report) -> list[str]:
    plan, o = report.plan, report.config.optimizer
    rows = report.config.rows_per_step
    lines = [
        f"{plan.tokens_per_step:,} tokens per step: {rows} rows of {report.config.data.seq_len:,} over {plan.world_size} ranks"
    ]
    if plan.max_steps is not None and plan.total_tokens is not None:
        lines.append(f"{plan.max_steps:,} steps, {count(plan.total_tokens)} tokens in all")
    if report.config.budget.seconds is not None:
        lines.append(f"{report.config.budget.seconds:g} s of training")
    rate = f"learning rate {o.learning_rate:g}, {o.schedule}, {o.warmup_steps} steps of warm-up"
    return [*lines, rate]


def _resume(report: Report) -> list[str]:
    found = report.resume
    if found is None:
        return []
    tokens = "" if found.tokens is None else f" after {count(found.tokens)} tokens"
    loss = "" if found.loss is None else f", loss {found.loss:.4f}"
    return [f"resumes from {found.path}, step {found.step:,}{tokens}{loss}"]


# One real step on this machine before a run: what the device is, whether it fits, and how fast it is. It leaves nothing behind.

DEVICE = Setting("training.device")
OUT_OF_MEMORY, FAILED = "runtime.probe.oom", "runtime.probe.failed"
SMALLER = "lower {0}, set {1} or take a smaller model"
SETTINGS = (Setting("training.micro_batch"), Setting("training.gradient_checkpointing"))


def add_probe(report: Report) -> None:
    """Take one step on this machine and add the outcome to a report."""
    ranks = ranks_from_environment()
    try:
        device = find_device(report.config.training.device, ranks.local_rank)
    except IngotError as error:
        report.findings.append(Finding.of("runtime.no_cuda", error))
        return
    report.runtime["device"] = device.name
    _check_device(report, device)
    if not report.findings.blocked:
        _try(report, ranks)
    if ranks.world_size > 1:
        failed = report.findings.blocked
        group = open_group(device, ranks)
        if group.maximum([failed])[0] and not failed:
            report.findings.add(FAILED, "error", "another rank could not take a step")
        group.close()


def _check_device(report: Report, device: Device) -> None:
    training = report.config.training
    try:
        report.runtime["precision"] = device.precision(training.precision)
    except ConfigError as error:
        on_gpu = device.kind == "cuda"
        report.findings.append(Finding.of("runtime.bf16_unsupported" if on_gpu else "runtime.no_cuda", error))
        return
    if device.kind == "cpu" and training.device == "auto":
        message = f"no GPU was found: {device.name} trains"
        report.findings.add("runtime.cpu_only", "warning", message, DEVICE, advice="set {0} to cpu if that is meant")


def _try(report: Report, ranks: Ranks) -> None:
    config = _alone(report.config, max(ranks.world_size, report.plan.world_size))
    try:
        seconds, loss, memory = _step(config, report, Ranks(local_rank=ranks.local_rank))
    except IngotError as error:
        report.findings.append(Finding.of(_code(error), error))
    except Exception as error:  # a custom model may raise anything
        told = f"a step failed: {type(error).__name__}: {error}"
        advice = SMALLER if _code(error) == OUT_OF_MEMORY else ""
        report.findings.add(_code(error), "error", told, *SETTINGS, advice=advice)
    else:
        speed = report.plan.tokens_per_step / seconds
        report.runtime |= {"step": f"{seconds:.3f} s, about {speed:,.0f} tokens/s", "loss": f"{loss:.4f}", "memory": memory}
        done = (report.resume.tokens or 0) if report.resume is not None else 0
        left = None if report.plan.total_tokens is None else report.plan.total_tokens - done
        check_time(report.config, report.seconds, speed, left, report.findings)


def _alone(config: Config, world_size: int) -> Config:
    """Return the config of a single rank with its share of a step; cuda_graphs stays off if the whole step would not use it."""
    rows, t = -(-config.rows_per_step // world_size), config.training
    changes: dict[str, Any] = {"tokens_per_step": rows * config.data.seq_len, "stages": []}
    if t.cuda_graphs == "auto" and (world_size > 1 or t.stages):
        changes["cuda_graphs"] = False
    return config.model_copy(update={"training": config.training.model_copy(update=changes)})


def _step(config: Config, report: Report, alone: Ranks) -> tuple[float, float, str]:
    """Return the seconds of a step after compilation, the loss of the first step, and the peak memory."""
    dataset, rows = open_data(config, 1, report.data.dataset)
    with closing(open_backend(config, dataset.tokenizer.vocab_size, alone)) as backend:
        if config.training.weights is not None and starts_fresh(config):
            load_initial_weights(config, backend, dataset.tokenizer)
        plan = plan_step(config, Position())
        buffer = backend.host_buffer((plan.rows, rows.planes, plan.seq_len))
        batch = read_rank_batch(rows, plan, alone, buffer)
        backend.tune([(plan, batch.batch)], {})
        with backend.without_trace():
            result = backend.step(batch.batch, batch.targets, plan).result()
            if backend.tuned().get("compile"):  # the second step may record CUDA graphs
                backend.step(batch.batch, batch.targets, plan).result()
            began = time.perf_counter()
            backend.step(batch.batch, batch.targets, plan).result()
            seconds = time.perf_counter() - began
        used, _ = backend.peak_memory()
        backend.release()
    return seconds, result.loss, byte_count(used)


def _code(error: BaseException) -> str:
    """Return the code of a failed step: out of memory, as frameworks report it, or failed."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return OUT_OF_MEMORY if names & {"MemoryError", "OutOfMemoryError"} or "memory" in str(error) else FAILED
