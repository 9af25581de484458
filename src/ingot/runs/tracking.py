"""Send the metrics of a run to Weights & Biases, trackio and TensorBoard.

A failing tracker never stops training: the failure is reported once, and the other trackers still receive their metrics.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from ingot.config.schema import TrackingSection
from ingot.errors import ConfigError
from ingot.runs.folder import EVENTS, TRACKIO_ID, WANDB_ID
from ingot.runs.reporter import EvaluationReport, Reporter, StepReport, task_metrics
from ingot.runtime.files import read_dict, write_atomically, writing

Report = StepReport | EvaluationReport
ChooseValues = Callable[[Report], Mapping[str, float] | None]  # returns the values to send, or None to send those of `numbers_of`
Tracker = tuple[Callable[[int, Mapping[str, float]], None], Callable[[bool], None]]  # log(step, values), close(failed)


class Tracking(Reporter):
    """A reporter that sends logged steps and evaluations to trackers, and a context manager that closes the trackers."""

    def __init__(
        self,
        settings: TrackingSection,
        folder: Path,
        step: int,
        wandb_id: str | None,
        config: Mapping[str, Any],
        choose_values: ChooseValues,
        warn: Callable[[str], None],
    ) -> None:
        """Start the trackers enabled in `settings`, for a session that starts at `step`; warn about each one that fails."""
        self._choose_values, self._warn = choose_values, warn
        self.wandb_id: str | None = None
        self.trackers: dict[str, Tracker] = {}
        name, facts = folder.resolve().name, dict(config)

        def start_wandb(project: str) -> Tracker:
            wandb = check_installed(f"tracking.wandb_project={project}")
            self.wandb_id = wandb_id or read_id(folder / WANDB_ID) or secrets.token_hex(4)
            write_id(folder / WANDB_ID, self.wandb_id)
            place = {"dir": os.environ.get("WANDB_DIR") or str(folder), "mode": settings.wandb_mode}
            title = settings.wandb_run_name or name
            run = wandb.init(project=project, name=title, id=self.wandb_id, resume="allow", config=facts, **place)
            return (lambda step, values: run.log(dict(values), step=step)), (lambda failed: run.finish(exit_code=int(failed)))

        def start_trackio(project: str) -> Tracker:
            """Start a run in trackio's local database; a resumed run continues under the same name."""
            trackio = check_installed(f"tracking.trackio_project={project}", "trackio")
            before = read_id(folder / TRACKIO_ID) if step > 0 else None
            title = before or f"{name}-{secrets.token_hex(4)}"
            write_id(folder / TRACKIO_ID, title)
            resume, off = "never" if before is None else "allow", dict.fromkeys(("embed", "auto_log_gpu", "auto_log_cpu"), False)
            with redirect_stdout(io.StringIO()):  # trackio prints advertisements
                run = trackio.init(project=project, name=title, config=facts, resume=resume, **off)
            return (lambda step, values: run.log(dict(values), step=step)), (lambda failed: trackio.finish())

        def start_tensorboard(wanted: bool) -> Tracker:
            """Open a new event file; after a resume, TensorBoard ignores older events of the steps that are repeated."""
            package = check_installed("tracking.tensorboard=true", "tensorboardX")
            writer = package.SummaryWriter(str(folder / EVENTS), purge_step=step + 1 if step else None, flush_secs=5)

            def log(step: int, values: Mapping[str, float]) -> None:
                for key, value in values.items():
                    writer.add_scalar(key, value, step)

            return log, (lambda failed: writer.close())

        starts: dict[str, tuple[Any, Callable[[Any], Tracker], str]] = {
            "Weights & Biases": (settings.wandb_project, start_wandb, "log in with `wandb login` or set WANDB_MODE=offline; "),
            "trackio": (settings.trackio_project, start_trackio, ""),
            "TensorBoard": (settings.tensorboard, start_tensorboard, ""),
        }
        for tracker, (wanted, start, advice) in starts.items():
            try:
                if wanted:
                    self.trackers[tracker] = start(wanted)
            except ConfigError as error:
                warn(f"{error}; training continues without this tracker")
            except Exception as error:  # the exception classes differ between versions of the packages
                warn(f"{tracker} failed to start: {_reason(error)}; {advice}training continues without this tracker")

    def step(self, report: StepReport, log: bool) -> None:
        if log:
            self.evaluation(report)

    def evaluation(self, report: Report) -> None:
        chosen = self._choose_values(report)
        values = numbers_of(report) if chosen is None else chosen
        for name, (log, _) in list(self.trackers.items()) if values else []:
            try:
                log(report.step, values)
            except Exception as error:  # trackers raise exceptions of any class
                del self.trackers[name]
                self._warn(f"{name} failed and receives no more values: {_reason(error)}; training continues")

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        for name, (_, close) in self.trackers.items():
            try:
                with redirect_stdout(io.StringIO()):
                    close(error is not None)
            except Exception as problem:
                self._warn(f"{name} could not be closed: {_reason(problem)}")


def numbers_of(report: Report) -> dict[str, float]:
    """Return the metrics that trackers receive for a report, by name. Most names are those of gpt-simple."""
    if isinstance(report, EvaluationReport):
        perplexity = math.exp(min(report.val_loss, 20.0))
        values = {"eval/loss": report.val_loss, "eval/perplexity": perplexity, "eval/bpb": report.val_bpb}
        values |= {"eval/train_loss": report.train_loss} if report.train_loss is not None else {}
        values |= {f"eval/{name}/loss": scores["val_loss"] for name, scores in report.buckets.items() if "val_loss" in scores}
        return values | {f"tasks/{name}/{key}": v for name, task in report.tasks.items() for key, v in task_metrics(task).items()}
    return {
        "train/loss": report.loss,
        "train/learning_rate": report.learning_rate,
        "train/grad_norm": report.grad_norm,
        "train/epoch": report.epoch,
        "throughput/tokens_per_sec": report.tokens_per_second,
        "throughput/total_tokens": report.tokens,
        **({"throughput/mfu": report.mfu} if report.mfu is not None else {}),
    }


def read_id(path: Path) -> str | None:
    """Read the id of a run in W&B or trackio from a file; return None if the file is missing or damaged."""
    run_id = (read_dict(path) or {}).get("id")
    return run_id if isinstance(run_id, str) else None


def write_id(path: Path, run_id: str) -> None:
    """Write the id of a run in W&B or trackio to a file."""
    with writing(path):
        write_atomically(path, json.dumps({"id": run_id}))


def check_installed(setting: str, package: str = "wandb") -> Any:
    """Import and return a package that a setting needs; raise ConfigError if it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError:
        name = "Weights & Biases" if package == "wandb" else package
        extra = package.removesuffix("X").lower()
        raise ConfigError(f"{setting} needs {name}", advice=f"install it with: pip install 'ingot-lm[{extra}]'") from None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
