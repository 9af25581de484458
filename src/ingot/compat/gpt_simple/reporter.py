"""gpt-simple's log lines: steps, evaluations, checkpoints, phases, and the end of a run.

The numbers of a step line are means over the steps since the last line, its learning rate is the next step's, and its tokens are
the predicted ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.artifact.gpt_simple import FINAL, SHUTDOWN, saved_checkpoints
from ingot.compat.gpt_simple.config import GptSimpleConfig
from ingot.compat.gpt_simple.translate import cosine_steps
from ingot.config.schema import Config
from ingot.console.entry import warn
from ingot.data.loading.order import GO_ON_WITHOUT_BUCKET
from ingot.optim.schedules import learning_rate_scale
from ingot.runs.folder import Kind, named_path, saved_steps, step_of
from ingot.runs.reporter import BeginReport, EvaluationReport, Reporter, StepReport

RULE = "=" * 60
KINDS = {"regular": "Checkpoint", "shutdown": "Shutdown checkpoint", "final": "Final checkpoint"}
REASONS = {"stop_file": "flag_file"}  # gpt-simple's words for a stop reason
MAX_EXPONENT = 20.0  # a larger loss is reported as the perplexity of this one


@dataclass(frozen=True)
class Log:
    """Log lines on stderr: -q prints warnings only, -v also prints what the run is waiting for."""

    verbose: bool = False
    quiet: bool = False
    write: Callable[[str], None] = warn

    def info(self, line: str) -> None:
        """Print a line about progress."""
        if not self.quiet:
            self.write(line)

    def warn(self, line: str) -> None:
        """Print a warning."""
        self.write(line)

    def debug(self, line: str) -> None:
        """Print a line that only -v shows."""
        if self.verbose:
            self.write(line)


class GptSimpleReporter(Reporter):
    """Prints what `gpt-simple train` prints, after `files` has written gpt-simple's files.

    `messages` are warnings to print when the run begins: a run that does not start prints its error only. `interval_loss` is the
    mean of the last step line, None before the first; `checkpoint` is the newest checkpoint under gpt-simple's name.
    """

    def __init__(
        self, config: GptSimpleConfig, resolved: Config, log: Log, files: Reporter, messages: Sequence[str] = ()
    ) -> None:
        self._config, self._resolved, self._log, self._files, self._messages = config, resolved, log, files, messages
        self.interval_loss: float | None = None
        self.checkpoint: Path | None = None
        self._announced: set[Path] = set()
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._targets = 0
        self._numbers: dict[str, float] = {}  # values of the last step line
        self._seconds = 0.0

    def begin(self, report: BeginReport) -> None:
        self._files.begin(report)
        self._seconds = report.elapsed_seconds
        for line in self._messages:
            self._log.warn(line)
        for line in summary_lines(self._config, self._resolved, report):
            self._log.info(line)
        if report.resumed_at >= self._config.training.max_steps:
            self._log.info(
                f"Training already complete: step {report.resumed_at} of training.max_steps={self._config.training.max_steps}; "
                "raise max_steps to continue"
            )

    def step(self, report: StepReport, log: bool) -> None:
        self._files.step(report, log)
        self._losses.append(report.loss)
        self._norms.append(report.grad_norm)
        self._targets += report.targets
        if report.step % self._config.training.logging_steps:
            return
        steps, seconds = len(self._losses), report.elapsed_seconds - self._seconds
        self.interval_loss = sum(self._losses) / steps
        scale = learning_rate_scale(self._resolved, report.step, report.elapsed_seconds)
        self._numbers = {
            "train/loss": self.interval_loss,
            "train/learning_rate": self._resolved.optimizer.learning_rate * scale,
            "train/grad_norm": sum(self._norms) / steps,
            "throughput/tokens_per_sec": self._targets / seconds if seconds else 0.0,
            "throughput/time_per_step": seconds / steps,
            "throughput/total_tokens": report.tokens,
            "throughput/packing_efficiency": 100 * self._targets / (steps * self._resolved.training.tokens_per_step),
            **({"curriculum/phase": report.phase} if self._config.data.curriculum else {}),
        }
        self._log.info(step_line(report.step, self._numbers))
        self._losses, self._norms, self._targets, self._seconds = [], [], 0, report.elapsed_seconds

    def evaluation(self, report: EvaluationReport) -> None:
        self._log.info(f"Eval Loss: {report.val_loss:.4f}")

    def phase(self, number: int, tokens: int) -> None:
        self._log.info(f"Curriculum: advancing to phase {number} (at {tokens:,} total tokens)")

    def saved(self, path: Path, kind: Kind = "regular") -> None:
        began = time.monotonic()
        self._files.saved(path, kind)
        step, seconds = step_of(path), time.monotonic() - began
        # The last step may also be a multiple of save_steps. Unlike ours, the original saves nothing for a best evaluation.
        for name in ("regular", kind) if kind == "final" else (kind,):
            self.checkpoint = their_folder(path, name)
            if self.checkpoint != path and self.checkpoint not in self._announced:
                self._announced.add(self.checkpoint)
                self._log.info(f"{KINDS[name]} saved to {self.checkpoint} (step {step}, {seconds:.1f}s)")

    def tracked(self, report: StepReport | EvaluationReport) -> Mapping[str, float] | None:
        if isinstance(report, EvaluationReport):
            return {"eval/loss": report.val_loss, "eval/perplexity": math.exp(min(report.val_loss, MAX_EXPONENT))}
        return {} if report.step % self._config.training.logging_steps else self._numbers

    def tracked_config(self) -> Mapping[str, Any] | None:
        return self._config.to_dict()

    def waiting(self, what: str, done: int = 0, total: int = 0) -> None:
        if not done:
            self._log.debug(what)

    def message(self, text: str) -> None:
        self._log.warn(text.replace(GO_ON_WITHOUT_BUCKET, "add --allow-bucket-exhaustion"))

    def end(self, result: Any) -> None:
        self._files.end(result)
        if result.status == "completed":
            for line in (RULE, "TRAINING COMPLETE!", RULE):
                self._log.info(line)
            return
        reason = REASONS.get(result.stop_reason, result.stop_reason)
        where = self.checkpoint or result.checkpoint_path or self._config.training.output_dir
        ended = "Halted" if result.status == "halted" else "Stopped"
        self._log.info(f"{ended} at step {result.total_steps} ({reason}). Resume with: --training.resume {where}")


def their_folder(path: Path, kind: Kind) -> Path:
    """Return the gpt-simple folder that our checkpoint was written as; ours, if gpt-simple would not have written one."""
    step = step_of(path)
    names = {"regular": f"checkpoint-{step}", "shutdown": f"checkpoint-{step}{SHUTDOWN}", "final": FINAL}
    theirs = path.with_name(names[kind])
    return theirs if theirs.is_dir() else path


def newest_name(path: Path) -> Path:
    """Return the last gpt-simple folder of our checkpoint's step; ours, if there is none."""
    run = path.parent.parent
    return next((one.path for one in reversed(saved_checkpoints(run)) if one.step == step_of(path)), path)


def step_line(step: int, n: Mapping[str, float]) -> str:
    """Return gpt-simple's step line, from the numbers it sends to Weights & Biases."""
    return (
        f"Step {step:6d} | Loss {n['train/loss']:.4f} | LR {n['train/learning_rate']:.2e} | "
        f"GradNorm {n['train/grad_norm']:.3f} | {n['throughput/time_per_step']:.2f}s/step | "
        f"{n['throughput/tokens_per_sec']:,.0f} tok/s | Packing {n['throughput/packing_efficiency']:.1f}%"
    )


def summary_lines(config: GptSimpleConfig, resolved: Config, report: BeginReport) -> list[str]:
    """Return gpt-simple's summary of the run at its start."""
    t, o = config.training, config.optimizer
    rows = resolved.training.tokens_per_step // config.data.max_length
    lines = [
        RULE,
        "GPT-SIMPLE TRAINING",
        RULE,
        f"Dataset:              {config.data.path}",
        f"Output:               {t.output_dir}",
        f"Devices:              {report.ranks}",
        f"Per-device batch size: {t.per_device_batch_size}",
        f"Gradient accumulation: {-(-rows // (t.per_device_batch_size * report.ranks))}",
        f"Effective batch size:  {rows}",
        f"Max steps:            {t.max_steps}",
        f"LR: {o.learning_rate}  (warmup={o.warmup_steps}, decay={cosine_steps(config)})",
    ]
    if report.resumed_at:
        theirs = [one.path for one in saved_checkpoints(Path(t.output_dir)) if one.step == report.resumed_at]
        # A stop and a regular save may be of one step; the summary then shows the one that was named.
        named = [path for path in theirs if path == named_path(t.resume, Path(t.output_dir))]
        ours = saved_steps(Path(t.output_dir) / "checkpoints").get(report.resumed_at, "")
        checkpoint = [ours, *theirs, *named][-1]
        lines.append(f"Resuming from step {report.resumed_at}  (checkpoint: {checkpoint})")
    return [*lines, RULE]
