"""What a run says while it goes on. A door chooses the words by giving the loop a reporter of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ingot.runs.folder import Kind

# What a line of a log says of tasks.


def task_metrics(task: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of a task, without their standard errors."""
    return {name: value for name, value in task.items() if name != "items" and not name.endswith("_stderr")}


def scored_tasks(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The tasks that a record of an evaluation tells, but for what is damaged."""
    found = record.get("tasks")
    return {name: task for name, task in found.items() if isinstance(task, dict)} if isinstance(found, dict) else {}


def tasks_line(step: int, tasks: Mapping[str, Mapping[str, Any]]) -> str:
    """The tasks of an evaluation as one line."""
    shown = {"perplexity": ".4g"}
    told = (
        " ".join([name, *(f"{metric} {value:{shown.get(metric, '.4f')}}" for metric, value in task_metrics(task).items())])
        for name, task in tasks.items()
    )
    return f"tasks {step}  {'  '.join(told)}"


QUIET_SECONDS = 30.0  # where lines are written, what takes long is heard of this often


@dataclass(frozen=True)
class BeginReport:
    """What is about to run, and on what."""

    run: str  # its folder
    device: str
    precision: str
    ranks: int
    parameters: int
    train_tokens: int
    tokens_per_step: int
    micro_batch: int
    attention: str  # the kernel that was chosen; default: whatever torch takes
    resumed_at: int  # the step it goes on from; 0 at the start of a run
    max_steps: int | None = None
    budget_seconds: float | None = None
    elapsed_seconds: float = 0.0  # trained by earlier sessions


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, over all ranks."""

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
    spent: float  # the used part of the budget, between 0 and 1
    targets: int = 0  # of this step; rows that are not full have fewer than tokens
    phase: int = 0  # of data.phases


@dataclass(frozen=True)
class EvaluationReport:
    """One look at the validation split."""

    step: int
    val_loss: float
    val_bpb: float
    tokens: int
    bytes: int
    seconds: float
    elapsed_seconds: float  # of training
    best: bool
    trained_tokens: int = 0
    train_loss: float | None = None  # of rows of the training split, where evaluation.train_rows asks for it
    other: dict[str, float] = field(default_factory=dict)  # val_bpb by the other count of bytes, where there are two
    rows: int = 0  # of the validation split that were scored
    rows_of: int = 0  # that it has
    stride: int | None = None  # of a sliding score: tokens from one row to the next, where rows overlap
    buckets: dict[str, dict[str, float]] = field(default_factory=dict)  # val_loss, val_bpb, tokens and bytes of each bucket
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)  # items, metrics and their standard errors of each task


class Reporter:
    """Listens to a run and says nothing."""

    def begin(self, report: BeginReport) -> None:
        """The run is about to take its first step of this session."""

    def primed(self, step: int, steps: int) -> None:
        """A priming step, which leaves no trace, is done."""

    def waiting(self, what: str, done: int = 0, total: int = 0) -> None:
        """Something other than a step goes on, until the next event; a total of 0 is not known."""

    def step(self, report: StepReport, log: bool) -> None:
        """A step is done; `log` where tracking.log_every asks for a line."""

    def evaluation(self, report: EvaluationReport) -> None:
        """The model was judged."""

    def sample(self, step: int, text: str) -> None:
        """The model wrote something."""

    def phase(self, number: int, tokens: int) -> None:
        """A phase of data.phases begins after so many tokens; the first, 0, is not told."""

    def saved(self, path: Path, kind: Kind = "regular") -> None:
        """A checkpoint is on the disk; called from another thread. A regular one may be told again with its last kind."""

    def tracked(self, report: StepReport | EvaluationReport) -> Mapping[str, float] | None:
        """What Weights & Biases, trackio and TensorBoard get of a report; None: the numbers under Ingot's names."""
        return None

    def tracked_config(self) -> Mapping[str, Any] | None:
        """What Weights & Biases and trackio show as the config of the run; None: Ingot's."""
        return None

    def message(self, text: str) -> None:
        """Something a reader of the log should know."""

    def end(self, result: Any) -> None:
        """The session is over; `result` is its TrainingResult."""


QUESTIONS = ("tracked", "tracked_config")  # every other public method of a Reporter is an event
EVENTS = [name for name in vars(Reporter) if not name.startswith("_") and name not in QUESTIONS]


class LineReporter(Reporter):
    """One plain line per event, for files and for terminals that are none; one now and then for what takes long."""

    def __init__(self, write: Callable[[str], None]):
        self._write, self._quiet_since = write, time.monotonic()

    def begin(self, report: BeginReport) -> None:
        self._write(begin_line(report))

    def primed(self, step: int, steps: int) -> None:
        if step == steps:
            self._write(f"primed with {steps} steps")

    def waiting(self, what: str, done: int = 0, total: int = 0) -> None:
        now = time.monotonic()
        if done == 0:
            self._quiet_since = now  # it begins
        elif now - self._quiet_since >= QUIET_SECONDS:
            self._quiet_since = now
            self._write(f"{what}: {done:,} of {total:,}")

    def step(self, report: StepReport, log: bool) -> None:
        if log:
            self._write(step_line(report))

    def evaluation(self, report: EvaluationReport) -> None:
        self._write(evaluation_line(report))
        if report.tasks:
            self._write(tasks_line(report.step, report.tasks))

    def phase(self, number: int, tokens: int) -> None:
        self._write(f"phase {number} begins after {tokens:,} tokens")

    def saved(self, path: Path, kind: Kind = "regular") -> None:
        self._write(saved_line(path, kind))

    def message(self, text: str) -> None:
        self._write(text)

    def end(self, result: Any) -> None:
        why = f" ({result.stop_reason})" if result.stop_reason else ""
        self._write(f"{result.status} at step {result.total_steps}{why}")


class MultiReporter(Reporter):
    """Several reporters as one: each hears every event. Questions are for a door's own reporter, and are not passed on."""

    def __init__(self, *reporters: Reporter):
        for name in EVENTS:
            setattr(self, name, _to_all([getattr(reporter, name) for reporter in reporters]))


def _to_all(listeners: list[Callable[..., None]]) -> Callable[..., None]:
    def call(*args: Any, **kwargs: Any) -> None:
        for listener in listeners:
            listener(*args, **kwargs)

    return call


def begin_line(report: BeginReport) -> str:
    """What is about to run as one line."""
    facts: dict[str, Any] = {**asdict(report), "resumed_at": f"step {report.resumed_at}" if report.resumed_at else None}
    facts["elapsed_seconds"] = round(report.elapsed_seconds, 1) or None
    told = {name: f"{value:,}" if isinstance(value, int) else value for name, value in facts.items() if value is not None}
    return "  ".join(f"{name} {value}" for name, value in told.items())


def saved_line(path: Path, kind: Kind) -> str:
    """A save as one line."""
    return f"saved {path}" if kind == "regular" else f"saved {path} ({kind})"


def step_line(report: StepReport) -> str:
    """A step as one line."""
    of = f"/{report.max_steps}" if report.max_steps else ""
    mfu = f"  mfu {100 * report.mfu:.1f}%" if report.mfu is not None else ""
    left = f" of {report.budget_seconds:g}" if report.budget_seconds else ""
    return (
        f"step {report.step}{of}  loss {report.loss:.4f}  grad {report.grad_norm:.3f}  lr {report.learning_rate:.2e}  "
        f"{report.tokens_per_second:,.0f} tok/s{mfu}  {report.elapsed_seconds:.1f}{left} s"
    )


def evaluation_line(report: EvaluationReport) -> str:
    """An evaluation as one line."""
    best = "  best so far" if report.best else ""
    other = "".join(f"  {name} {value:.4f}" for name, value in report.other.items())
    train = f"  train_loss {report.train_loss:.4f}" if report.train_loss is not None else ""
    score = f"val_loss {report.val_loss:.4f}  val_bpb {report.val_bpb:.4f}{other}"
    return (
        f"eval {report.step}{train}  {score}{by_rows(report.rows, report.rows_of, report.stride)}  ({report.seconds:.1f} s){best}"
    )


def by_rows(rows: int | None, rows_of: int | None, stride: int | None = None) -> str:
    """What is added to a score by rows that overlap, or of a part of the split."""
    sliding = f"  sliding by {stride:,}" if stride else ""
    return sliding + (f"  by {rows:,} of {rows_of:,} rows" if rows and rows_of and rows < rows_of else "")
