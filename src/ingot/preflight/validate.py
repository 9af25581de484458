"""All checks of a run before it starts, in one list: `ingot validate` prints it and `train` refuses to start by it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ingot.config.schema import GPT2_ROWS, Config
from ingot.config.size import Size, model_size
from ingot.data.store.dataset import Dataset
from ingot.errors import CheckpointError, ConfigError, IngotError, Rename
from ingot.preflight.data_checks import DataFacts, look_at_data
from ingot.preflight.findings import Finding, Findings, refuse
from ingot.preflight.resume_checks import ResumeFacts, check_output, check_resume
from ingot.preflight.run_checks import (
    PlanFacts,
    check_buckets,
    check_device,
    check_files,
    check_memory,
    check_model_file,
    check_ranks,
    check_supply,
    check_time,
    check_vocabulary,
    gpu_bytes,
    has_gpu,
    least_bytes,
    needed_bytes,
    plan_of,
)
from ingot.runtime.machine import host_bytes
from ingot.train.evaluation import open_tasks
from ingot.train.resume import begins_new, check_weights
from ingot.train.start import open_data
from ingot.train.stop import find_walltime


@dataclass
class Report:
    """What was found out about a run, and what is wrong with it."""

    config: Config
    data: DataFacts
    plan: PlanFacts
    vocab_size: int
    size: Size | None = None
    memory: int | None = None  # bytes that a rank needs
    output: str = ""
    resume: ResumeFacts | None = None
    seconds: float | None = None  # of this session's wall clock; None: no end
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
    """Look at a run of so many ranks, whose session began at a unix time. Nothing is written, and no framework is loaded.

    A door says how many loader processes its users asked for, and whether phases may have other tokens than the steps. Without
    `thorough`, what training itself is about to find out is left to it: the order of the rows, and the memory of a GPU. `fresh`:
    an earlier run in the folder will be deleted and is not looked at.
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
        vocab_size = GPT2_ROWS
        message = f"nothing says how many ids there are; the size of the model is that with {GPT2_ROWS:,}"
        findings.add("model.vocab_unknown", "warning", message)
    report = Report(config, data, plan, vocab_size, output=str(output) if output is not None else "", findings=findings)
    report.size = model_size(config, vocab_size)
    _check_memory(report, ranks, thorough)
    report.resume = None if fresh else check_resume(config, output, data, findings)
    if thorough and config.training.weights is not None and (fresh or begins_new(config)):
        with findings.noting("resume.weights_unusable", CheckpointError):
            check_weights(config, data.tokenizer)
    if thorough and config.evaluation.tasks and data.tokenizer is not None:
        with findings.noting("evaluation.tasks_unusable"):
            open_tasks(config, data.tokenizer)
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
    """Refuse a run that cannot go well, by its first finding, and say the warnings; gives the data, if it had to be opened.

    Warnings have a door's names for settings and its advice; an error gets them where it is told.
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
