"""One real step on this machine before a run: what the device is, whether it fits, and how fast it is. It leaves nothing behind.

Every rank takes the step by itself, with the rows it would have and without talking to the others, because a rank that runs out
of memory would leave them waiting; afterwards all of them agree whether it went well everywhere.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

from ingot.backends.open import find_device, open_backend, open_group
from ingot.config.schema import Config
from ingot.data.loading.reader import read_rank_batch
from ingot.errors import ConfigError, IngotError, Setting
from ingot.preflight.findings import Finding
from ingot.preflight.run_checks import byte_count, check_time
from ingot.preflight.validate import Report
from ingot.runtime.devices import Device
from ingot.runtime.ranks import Ranks, ranks_from_environment
from ingot.train.resume import begin_with_weights, begins_new
from ingot.train.start import open_data
from ingot.train.step_plan import Position, plan_step

DEVICE = Setting("training.device")
OUT_OF_MEMORY, FAILED = "runtime.probe.oom", "runtime.probe.failed"
SMALLER = "lower {0}, set {1} or take a smaller model"
SETTINGS = (Setting("training.micro_batch"), Setting("training.gradient_checkpointing"))


def add_probe(report: Report) -> None:
    """Take the step and add what came of it to a report."""
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
    except Exception as error:  # a model of one's own may raise anything
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
    """The config of a rank by itself, with the rows that it has of a step; shorter than the whole, it still records no graphs."""
    rows, t = -(-config.rows_per_step // world_size), config.training
    changes: dict[str, Any] = {"tokens_per_step": rows * config.data.seq_len, "stages": []}
    if t.cuda_graphs == "auto" and (world_size > 1 or t.stages):
        changes["cuda_graphs"] = False
    return config.model_copy(update={"training": config.training.model_copy(update=changes)})


def _step(config: Config, report: Report, alone: Ranks) -> tuple[float, float, str]:
    """The seconds of a step after those that compile and record, the loss of the first, and the most memory that was used."""
    dataset, rows = open_data(config, 1, report.data.dataset)
    with closing(open_backend(config, dataset.tokenizer.vocab_size, alone)) as backend:
        if config.training.weights is not None and begins_new(config):
            begin_with_weights(config, backend, dataset.tokenizer)
        plan = plan_step(config, Position())
        buffer = backend.host_buffer((plan.rows, rows.planes, plan.seq_len))
        batch = read_rank_batch(rows, plan, alone, buffer)
        backend.tune([(plan, batch.batch)], {})
        with backend.without_trace():
            result = backend.step(batch.batch, batch.targets, plan).result()
            if backend.tuned().get("compile"):  # a second time passes may be recorded
                backend.step(batch.batch, batch.targets, plan).result()
            began = time.perf_counter()
            backend.step(batch.batch, batch.targets, plan).result()
            seconds = time.perf_counter() - began
        used, _ = backend.peak_memory()
        backend.release()
    return seconds, result.loss, byte_count(used)


def _code(error: BaseException) -> str:
    """Whether it is for want of memory, as frameworks say it, that a step failed."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return OUT_OF_MEMORY if names & {"MemoryError", "OutOfMemoryError"} or "memory" in str(error) else FAILED
