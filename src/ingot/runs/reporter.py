"""Reporters receive the events of a run. Each command passes the training loop a reporter that determines the output format."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ingot.runs.folder import Kind


def task_metrics(task: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a task, without the number of items and the standard errors."""
    return {name: value for name, value in task.items() if name != "items" and not name.endswith("_stderr")}


PROGRESS_SECONDS = 30.0  # seconds between progress lines in plain logs


@dataclass(frozen=True)
class BeginReport:
    """A report at the start of a session: device, model size and settings."""

    run: str  # path of the run folder
    device: str
    precision: str
    ranks: int
    parameters: int
    train_tokens: int
    tokens_per_step: int
    micro_batch: int
    attention: str  # attention kernel; "default" lets torch choose
    resumed_at: int  # step that the session resumes from; 0 for a new run
    max_steps: int | None = None
    budget_seconds: float | None = None
    elapsed_seconds: float = 0.0  # training time of earlier sessions


@dataclass(frozen=True)
class StepReport:
    """A report on one optimizer step, over all ranks."""

    step: int
    max_steps: int | None
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    tokens_per_second: float
    elapsed_seconds: float
    budget_seconds: float | None
    epoch: int
    mfu: float | None
    spent: float  # fraction of the budget that is used up, 0 to 1
    targets: int = 0  # tokens predicted in this step; padded rows have fewer targets than tokens
    phase: int = 0  # index into data.phases


@dataclass(frozen=True)
class EvaluationReport:
    """A report on one evaluation on the validation split."""

    step: int
    val_loss: float
    val_bpb: float
    tokens: int
    bytes: int
    seconds: float
    elapsed_seconds: float  # training time so far
    best: bool
    trained_tokens: int = 0
    train_loss: float | None = None  # loss on evaluation.train_rows rows of the training split
    other: dict[str, float] = field(default_factory=dict)  # bpb for the byte count not selected by evaluation.bytes, if different
    rows: int = 0  # rows scored
    rows_of: int = 0  # rows in the whole validation split
    stride: int | None = None  # tokens between the starts of consecutive rows in a sliding evaluation
    buckets: dict[str, dict[str, float]] = field(default_factory=dict)  # per bucket: val_loss, val_bpb, tokens, bytes
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)  # per task: number of items, metrics, their standard errors


class Reporter:
    """The base class of reporters, which receive the events of a run; it ignores all events."""

    def begin(self, report: BeginReport) -> None:
        """Called before the first step of a session."""

    def primed(self, step: int, steps: int) -> None:
        """Called after each warm-up step; the effect of these steps on the weights is undone."""

    def waiting(self, what: str, done: int = 0, total: int = 0) -> None:
        """Called during slow work other than training steps; `total` is 0 if the amount of work is unknown."""

    def step(self, report: StepReport, log: bool) -> None:
        """Called after a step; `log` is True if the step is to be logged (see tracking.log_every)."""

    def evaluation(self, report: EvaluationReport) -> None:
        """Called after an evaluation."""

    def sample(self, step: int, text: str) -> None:
        """Called with a text sample from the model."""

    def phase(self, number: int, tokens: int) -> None:
        """Called when the second or a later phase of data.phases begins, after `tokens` training tokens."""

    def saved(self, path: Path, kind: Kind = "regular") -> None:
        """Called from the saving thread when a checkpoint is on disk, and again if its kind changes from regular."""

    def tracked(self, report: StepReport | EvaluationReport) -> Mapping[str, float] | None:
        """Return the metrics of a report to send to trackers, or None to send all metrics under Ingot's names."""
        return None

    def tracked_config(self) -> Mapping[str, Any] | None:
        """Return the config to show in trackers, or None to show Ingot's config."""
        return None

    def message(self, text: str) -> None:
        """Called with a message to show in the log."""

    def end(self, result: Any) -> None:
        """Called at the end of a session with its TrainingResult."""


QUERIES = ("tracked", "tracked_config")  # methods that return a value; every other public method receives an event
EVENTS = [name for name in vars(Reporter) if not name.startswith("_") and name not in QUERIES]


class LineReporter(Reporter):
    """A reporter that writes one plain line per event, for log files and pipes, and occasional lines during slow work."""

    def __init__(self, write: Callable[[str], None]):
        self._write, self._last_progress = write, time.monotonic()

    def begin(self, report: BeginReport) -> None:
        facts = {**asdict(report), "resumed_at": f"step {report.resumed_at}" if report.resumed_at else None}
        facts["elapsed_seconds"] = round(report.elapsed_seconds, 1) or None
        texts = [
            f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"
            for name, value in facts.items()
            if value is not None
        ]
        self._write("  ".join(texts))

    def primed(self, step: int, steps: int) -> None:
        if step == steps:
            self._write(f"primed with {steps} steps")

    def waiting(self, what: str, done: int = 0, total: int = 0) -> None:
        now = time.monotonic()
        if done == 0:
            self._last_progress = now  # the work has just begun: write the first progress line later
        elif now - self._last_progress >= PROGRESS_SECONDS:
            self._last_progress = now
            self._write(f"{what}: {done:,} of {total:,}")

    def step(self, report: StepReport, log: bool) -> None:
        if log:
            self._write(step_line(report))

    def evaluation(self, report: EvaluationReport) -> None:
        self._write(evaluation_line(report))
        if report.tasks:
            scores = []
            for name, task in report.tasks.items():
                metrics = (
                    f"{metric} {value:{'.4g' if metric == 'perplexity' else '.4f'}}"
                    for metric, value in task_metrics(task).items()
                )
                scores.append(" ".join([name, *metrics]))
            self._write(f"tasks {report.step}  {'  '.join(scores)}")

    def phase(self, number: int, tokens: int) -> None:
        self._write(f"phase {number} begins after {tokens:,} tokens")

    def saved(self, path: Path, kind: Kind = "regular") -> None:
        self._write(f"saved {path}" if kind == "regular" else f"saved {path} ({kind})")

    def message(self, text: str) -> None:
        self._write(text)

    def end(self, result: Any) -> None:
        why = f" ({result.stop_reason})" if result.stop_reason else ""
        self._write(f"{result.status} at step {result.total_steps}{why}")


class MultiReporter(Reporter):
    """A reporter that passes every event to several others; methods that return a value (QUERIES) are not forwarded."""

    def __init__(self, *reporters: Reporter):
        for name in EVENTS:
            setattr(self, name, partial(self._tell, [getattr(reporter, name) for reporter in reporters]))

    @staticmethod
    def _tell(listeners: list[Callable[..., None]], *args: Any, **kwargs: Any) -> None:
        for listener in listeners:
            listener(*args, **kwargs)


def step_line(report: StepReport) -> str:
    """Format a step as one line."""
    of = f"/{report.max_steps}" if report.max_steps else ""
    mfu = f"  mfu {100 * report.mfu:.1f}%" if report.mfu is not None else ""
    left = f" of {report.budget_seconds:g}" if report.budget_seconds else ""
    return (
        f"step {report.step}{of}  loss {report.loss:.4f}  grad {report.grad_norm:.3f}  lr {report.learning_rate:.2e}  "
        f"{report.tokens_per_second:,.0f} tok/s{mfu}  {report.elapsed_seconds:.1f}{left} s"
    )


def evaluation_line(report: EvaluationReport) -> str:
    """Format an evaluation as one line."""
    best = "  best so far" if report.best else ""
    other = "".join(f"  {name} {value:.4f}" for name, value in report.other.items())
    train = f"  train_loss {report.train_loss:.4f}" if report.train_loss is not None else ""
    score = f"val_loss {report.val_loss:.4f}  val_bpb {report.val_bpb:.4f}{other}"
    return (
        f"eval {report.step}{train}  {score}{by_rows(report.rows, report.rows_of, report.stride)}  ({report.seconds:.1f} s){best}"
    )


def by_rows(rows: int | None, rows_of: int | None, stride: int | None = None) -> str:
    """Return a suffix for a score whose rows overlap or cover only part of the validation split, otherwise an empty string."""
    sliding = f"  sliding by {stride:,}" if stride else ""
    return sliding + (f"  by {rows:,} of {rows_of:,} rows" if rows and rows_of and rows < rows_of else "")
