"""Where the numbers of a run go besides metrics.jsonl: Weights & Biases, trackio and TensorBoard, by one interface.

A failure there never ends training: it is told once, and the numbers go on to the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ingot.config.schema import TrackingSection
from ingot.errors import IngotError
from ingot.runs.folder import EVENTS
from ingot.runs.report import EvaluationReport, Reporter, StepReport
from ingot.runs.task_lines import task_metrics
from ingot.runs.tensorboard import EventFile
from ingot.runs.trackio import TrackioRun
from ingot.runs.wandb import WandbRun, check_installed

Report = StepReport | EvaluationReport
Words = Callable[[Report], Mapping[str, float] | None]  # what is sent of a report; None: what numbers_of says


class Sink(Protocol):
    """Something that takes numbers."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a step; steps never go back."""

    def close(self, failed: bool) -> None:
        """The session is over."""


class Tracking(Reporter):
    """A reporter that sends what it hears of to sinks, in the words of the door; a context that closes them."""

    def __init__(self, words: Words, warn: Callable[[str], None]) -> None:
        self._words, self._warn = words, warn
        self._sinks: dict[str, Sink] = {}
        self.wandb_id: str | None = None

    def add(self, name: str, sink: Sink) -> None:
        """Send to this one too."""
        self._sinks[name] = sink

    def step(self, report: StepReport, log: bool) -> None:
        if log:
            self._send(report)

    def evaluation(self, report: EvaluationReport) -> None:
        self._send(report)

    def _send(self, report: Report) -> None:
        chosen = self._words(report)
        values = numbers_of(report) if chosen is None else chosen
        for name, sink in list(self._sinks.items()) if values else []:
            try:
                sink.log(report.step, values)
            except Exception as error:  # theirs are of any kind
                del self._sinks[name]
                self._warn(f"{name} takes no more values: {' '.join(str(error).split())[:200]}; training goes on")

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        for name, sink in self._sinks.items():
            try:
                sink.close(failed=error is not None)
            except Exception as problem:
                self._warn(f"{name} did not end well: {' '.join(str(problem).split())[:200]}")


def open_tracking(
    settings: TrackingSection,
    folder: Path,
    step: int,
    wandb_id: str | None,
    config: Mapping[str, Any],
    words: Words,
    warn: Callable[[str], None],
) -> Tracking:
    """The sinks that the settings ask for, of a session that goes on after a step; one that cannot be had is told and omitted."""
    tracking, own_name = Tracking(words, warn), folder.resolve().name
    if settings.wandb_project is not None:
        try:
            check_installed(f"tracking.wandb_project={settings.wandb_project}")
            name = settings.wandb_run_name or own_name
            run = WandbRun(folder, settings.wandb_project, name, settings.wandb_mode, config, wandb_id)
        except IngotError as error:
            warn(f"{error}; training goes on without it")
        else:
            tracking.add("Weights & Biases", run)
            tracking.wandb_id = run.id
    if settings.trackio_project is not None:
        try:
            tracking.add("trackio", TrackioRun(folder, settings.trackio_project, config, goes_on=step > 0))
        except IngotError as error:
            warn(f"{error}; training goes on without it")
    if settings.tensorboard:
        try:
            tracking.add("TensorBoard", EventFile(folder / EVENTS, step))
        except OSError as error:
            warn(f"{folder / EVENTS} cannot be written: {error.strerror}; training goes on without TensorBoard")
    return tracking


def numbers_of(report: Report) -> dict[str, float]:
    """The numbers of a report under the names that dashboards get; those of gpt-simple, and more."""
    if isinstance(report, EvaluationReport):
        train = {"eval/train_loss": report.train_loss} if report.train_loss is not None else {}
        buckets = {f"eval/{name}/loss": found["val_loss"] for name, found in report.buckets.items() if "val_loss" in found}
        scores = {f"tasks/{name}/{metric}": v for name, task in report.tasks.items() for metric, v in task_metrics(task).items()}
        told = {"eval/loss": report.val_loss, "eval/perplexity": math.exp(min(report.val_loss, 20.0)), "eval/bpb": report.val_bpb}
        return {**told, **train, **buckets, **scores}
    return {
        "train/loss": report.loss,
        "train/learning_rate": report.learning_rate,
        "train/grad_norm": report.grad_norm,
        "train/epoch": report.epoch,
        "throughput/tokens_per_sec": report.tokens_per_second,
        "throughput/total_tokens": report.tokens,
        **({"throughput/mfu": report.mfu} if report.mfu is not None else {}),
    }
