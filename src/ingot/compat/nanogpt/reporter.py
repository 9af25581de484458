"""The log lines of nanoGPT, and its ckpt.pt beside every checkpoint of ours that it would have written."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ingot.compat.nanogpt.mfu import RunningMfu
from ingot.compat.nanogpt.translate import learning_rate, record
from ingot.config.schema import Config
from ingot.errors import CheckpointError
from ingot.runs.checkpoints import Checkpoint, load_checkpoint
from ingot.runs.folder import Kind
from ingot.runs.reporter import BeginReport, EvaluationReport, Reporter, StepReport


class NanoGPTReporter(Reporter):
    """Prints what train.py prints.

    `write` makes a ckpt.pt of a checkpoint, `elapsed` are the seconds of earlier sessions, and `unwritten` is a checkpoint whose
    ckpt.pt an earlier session could not write any more.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        config: Config,
        mfu: RunningMfu,
        say: Callable[[str], None],
        warn: Callable[[str], None],
        write: Callable[[Checkpoint], None],
        elapsed: float = 0.0,
        unwritten: Path | None = None,
    ) -> None:
        self._values, self._config, self._mfu = values, config, mfu
        self._say, self._warn, self._write = say, warn, write
        self._elapsed, self._unwritten = elapsed, unwritten
        self._iterations = 0  # of this session
        self._announced: int | None = None
        self.failure: CheckpointError | None = None

    def begin(self, report: BeginReport) -> None:
        if report.device.startswith("cpu"):
            self._say(f"training on {report.device}")  # another number of them rounds differently
        if self._unwritten is not None:
            self.saved(self._unwritten)
        if report.resumed_at > self._values["max_iters"]:
            self._warn(f"iteration {report.resumed_at} is past max_iters={self._values['max_iters']}: nothing is left to do")

    def step(self, report: StepReport, log: bool) -> None:
        iteration, seconds = report.step - 1, report.elapsed_seconds - self._elapsed
        self._elapsed = report.elapsed_seconds
        if iteration % self._values["log_interval"] == 0:
            self._mfu.update(self._iterations, seconds)
            self._say(iteration_line(iteration, report.loss, seconds, self._mfu.value))
        self._iterations += 1

    def evaluation(self, report: EvaluationReport) -> None:
        self._elapsed = report.elapsed_seconds
        self._say(evaluation_line(report.step, _train_loss(report), report.val_loss))
        if report.step and (report.best or self._values["always_save_checkpoint"]):
            self._announce(report.step)

    def tracked(self, report: StepReport | EvaluationReport) -> Mapping[str, float]:
        if isinstance(report, StepReport):
            return {}
        return {
            "iter": report.step,
            "train/loss": _train_loss(report),
            "val/loss": report.val_loss,
            "lr": learning_rate(self._config, report.step),
            "mfu": 100 * self._mfu.value,
        }

    def tracked_config(self) -> Mapping[str, Any]:
        return record(self._values)

    def saved(self, path: Path, kind: Kind = "regular") -> None:
        try:
            checkpoint = load_checkpoint(path)
            if not self._values["always_save_checkpoint"] and checkpoint.progress["best_step"] != checkpoint.step:
                return
            self._announce(checkpoint.step)
            self._write(checkpoint)
            self.failure = None
        except (CheckpointError, OSError) as error:  # in a thread: training goes on, and the end of the run tells
            self.failure = error if isinstance(error, CheckpointError) else CheckpointError(f"cannot write ckpt.pt: {error}")
            self._warn(f"{self.failure}; training goes on and the next save tries again")

    def message(self, text: str) -> None:
        self._warn(text)

    def end(self, result: Any) -> None:
        if result.status == "stopped":
            self._warn(f"stopped before iteration {result.total_steps}; continue with the same command and --init_from=resume")

    def _announce(self, step: int) -> None:
        if step != self._announced:
            self._announced = step
            self._say(f"saving checkpoint to {self._values['out_dir']}")


def _train_loss(report: EvaluationReport) -> float:
    return report.train_loss if report.train_loss is not None else math.nan


def iteration_line(iteration: int, loss: float, seconds: float, mfu: float) -> str:
    """An iteration, as nanoGPT logs it."""
    return f"iter {iteration}: loss {loss:.4f}, time {seconds * 1000:.2f}ms, mfu {mfu * 100:.2f}%"


def evaluation_line(iteration: int, train_loss: float, val_loss: float) -> str:
    """An evaluation, as nanoGPT logs it."""
    return f"step {iteration}: train loss {train_loss:.4f}, val loss {val_loss:.4f}"
