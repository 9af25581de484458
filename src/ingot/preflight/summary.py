"""A report as readers and as programs get it: what the run is, section by section, with the findings that belong to each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ingot.errors import Rename
from ingot.preflight.findings import Finding, exit_code
from ingot.preflight.run_checks import byte_count, count
from ingot.preflight.validate import Report

MARKS = {"info": "i", "warning": "!", "error": "x", "budget": "$"}
# The sections, and what the codes begin with that belong to them.
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
    """The report for readers."""
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
    """A finding in one line, with its mark and its code."""
    return f"  [{MARKS[finding.severity]}] {finding.code}: {finding.render(name, advise)}"


def summary(findings: Sequence[Finding]) -> str:
    """How many findings of each kind."""
    counts = {kind: sum(finding.severity == kind for finding in findings) for kind in ("error", "budget", "warning", "info")}
    return f"{counts['error']} errors, {counts['budget']} over budget, {counts['warning']} warnings, {counts['info']} notes"


def report_record(report: Report, strict: bool, name: Rename = str, advise: Rename = str) -> dict[str, Any]:
    """The report for programs."""
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
    return [f"goes on from {found.path}, step {found.step:,}{tokens}{loss}"]
