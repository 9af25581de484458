"""All checks of a run before it starts, in one list: `ingot validate` prints them, and `train` refuses to start on an error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.backends.open import find_device, open_backend, open_group
from ingot.config.memory import Size, model_size
from ingot.config.schema import GPT2_PADDED_VOCAB_SIZE, Config
from ingot.data.loading.reader import read_rank_batch
from ingot.data.store.dataset import Dataset
from ingot.data.tokenizers.by_name import BPE, bpe_size
from ingot.errors import CheckpointError, ConfigError, IngotError, Rename, Setting
from ingot.preflight.checks import (
    CHECKPOINTING,
    MICRO_BATCH,
    ResumeFacts,
    byte_count,
    check_device,
    check_memory,
    check_model_file,
    check_output,
    check_ranks,
    check_resume,
)
from ingot.preflight.data_checks import (
    RunData,
    check_buckets,
    check_files,
    check_supply,
    check_vocabulary,
    look_at_data,
    phases_of,
    total_tokens,
)
from ingot.preflight.findings import Finding, Findings
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
    world_size: int
    data: RunData
    vocab_size: int
    total_tokens: int | None  # None if the clock ends the run
    phases: list[dict[str, Any]]
    output: Path | None
    size: Size | None
    memory: int | None = None  # bytes a rank needs
    resume: ResumeFacts | None = None
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

    `workers`: loader processes requested in gpt-simple. `allow_mismatch`: the tokens of the phases may differ from those of the
    steps. Without `thorough`, checks that training repeats anyway are skipped. `fresh`: an earlier run in the folder will be
    deleted, so it is not checked.
    """
    findings, ranks, total = Findings(), max(1, world_size), total_tokens(config)
    check_ranks(config, world_size, findings)
    if thorough:
        check_device(config, world_size, findings)
        check_model_file(config, findings)
    data = look_at_data(config, findings)
    check_buckets(config, data, findings)
    check_files(data, ranks, workers, findings)
    check_vocabulary(config, data, findings)
    if not any(
        finding.blocks and finding.code.startswith("data.") for finding in findings
    ):  # with such errors the token counts are wrong
        check_supply(config, data, total, allow_mismatch, findings)
    output = check_output(config, findings)
    vocab_size = config.model.vocab_size or (data.tokenizer.vocab_size if data.tokenizer is not None else 0)
    if not vocab_size and (config.data.tokenizer or "").startswith(BPE):
        vocab_size = bpe_size(config.data.tokenizer or "")  # training will learn this tokenizer
    if not vocab_size:
        vocab_size = GPT2_PADDED_VOCAB_SIZE
        message = f"the vocabulary size is unknown; the size of the model assumes {GPT2_PADDED_VOCAB_SIZE:,} ids"
        findings.add("model.vocab_unknown", "warning", message)
    size, phases = model_size(config, vocab_size), phases_of(config)
    report = Report(config, ranks, data, vocab_size, total, phases, output, size, findings=findings)
    if size is not None:
        report.memory = check_memory(config, size, vocab_size, ranks, findings)
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


# The report as JSON and as text.

MARKS = {"error": "x", "budget": "$", "warning": "!", "info": "i"}
SECTIONS = {  # part of the record, and prefixes of the codes that belong to it
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
    config, size, resume, data = report.config, report.size, report.resume, report.data
    splits = {split: {bucket: vars(facts) for bucket, facts in buckets.items()} for split, buckets in data.splits.items()}
    return {
        "exit_code": report.findings.exit_code(strict),
        "findings": [finding.record(name, advise) for finding in report.findings],
        "model": {
            "family": config.model.family,
            "layers": config.model.layers,
            "width": config.model.width,
            "heads": config.model.heads,
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
        "curriculum": report.phases,
        "training": {
            "world_size": report.world_size,
            "tokens_per_step": config.training.tokens_per_step,
            "max_steps": config.training.max_steps,
            "total_tokens": report.total_tokens,
            "budget_seconds": config.budget.seconds,
        },
        "output": str(report.output) if report.output is not None else None,
        "resume": {"path": str(resume.path), "step": resume.step, "tokens": resume.tokens} if resume is not None else None,
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
    """Yield a part of the record as lines; a mapping inside others, such as a bucket's, is one line."""
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


# A trial step on this machine before a run reports the device, memory use and speed. It writes no files.

OUT_OF_MEMORY, FAILED = "runtime.probe.oom", "runtime.probe.failed"


def add_probe(report: Report) -> None:
    """Take one step on this machine and add the outcome to a report."""
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
            names = {kind.__name__ for kind in type(error).__mro__}
            full = names & {"MemoryError", "OutOfMemoryError"} or "memory" in str(
                error
            )  # frameworks report a full GPU in several ways
            code, advice = (OUT_OF_MEMORY, "lower {0}, set {1} or use a smaller model") if full else (FAILED, "")
            if isinstance(error, IngotError):
                findings.append(Finding(code, "error", error))
            else:
                message = f"a step failed: {type(error).__name__}: {error}"
                findings.add(code, "error", message, MICRO_BATCH, CHECKPOINTING, advice=advice)
    if ranks.world_size > 1:
        failed = findings.blocked
        group = open_group(device, ranks)
        if group.maximum([failed])[0] and not failed:
            findings.add(FAILED, "error", "another rank could not take a step")
        group.close()


def alone(config: Config, world_size: int) -> Config:
    """Return the config for a single rank with its share of a step; cuda_graphs stays off if the full run would not use them."""
    rows, t = -(-config.rows_per_step // world_size), config.training
    changes: dict[str, Any] = {"tokens_per_step": rows * config.data.seq_len, "stages": []}
    if t.cuda_graphs == "auto" and (world_size > 1 or t.stages):
        changes["cuda_graphs"] = False
    return config.model_copy(update={"training": config.training.model_copy(update=changes)})


def _take_step(report: Report, ranks: Ranks) -> None:
    """Add the time of a step after compilation, the loss of the first one, and the peak memory."""
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
            if backend.tuned().get("compile"):  # the second step may record CUDA graphs
                backend.step(batch.batch, batch.targets, plan).result()
            began = time.perf_counter()
            backend.step(batch.batch, batch.targets, plan).result()
            seconds = time.perf_counter() - began
        memory, _ = backend.peak_memory()
        backend.release()
    speed = report.config.training.tokens_per_step / seconds
    step = f"{seconds:.3f} s, about {speed:,.0f} tokens/s"
    report.runtime |= {"step": step, "loss": f"{loss:.4f}", "memory": byte_count(memory)}
