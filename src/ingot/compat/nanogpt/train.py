"""train.py: nanoGPT's training script on our training loop.

`out_dir` is one of our run folders with nanoGPT's ckpt.pt in it, so every `ingot` command works on it too.
"""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.compat.nanogpt.keys import Arguments, enter, key_name
from ingot.compat.nanogpt.translate import check_data, record, settle, settle_tokenizer, translate
from ingot.console.entry import process_start, say, warn
from ingot.errors import CheckpointError
from ingot.optim.schedules import learning_rate_scale
from ingot.runs.checkpoints import Checkpoint, load_checkpoint
from ingot.runs.folder import INDEX, Kind, saved_steps
from ingot.runs.reporter import BeginReport, EvaluationReport, Reporter, StepReport
from ingot.runtime.devices import Device
from ingot.runtime.ranks import Ranks, ranks_from_environment

if TYPE_CHECKING:
    from ingot.backends.base import Inference
    from ingot.config.schema import Config

MFU_WARMUP_ITERATIONS = 5  # the first iterations are slow; nanoGPT leaves them out of the MFU
MFU_DECAY = 0.9  # EMA decay of the MFU per logged iteration


def main(words: Sequence[str] | None = None) -> int:
    """Run train.py; return the exit code."""
    return enter("train.py", train, words)


def train(arguments: Arguments) -> None:
    """Train, resume or only evaluate, depending on the keys."""
    from ingot.backends.open import find_device, on_first_rank
    from ingot.compat.nanogpt.checkpoint import CKPT, flops_per_token, meta_model, write_ckpt
    from ingot.compat.nanogpt.initial import check_folder, find_start, settle_folder
    from ingot.preflight.validate import check_before_training
    from ingot.runs.tracking import check_installed
    from ingot.train.start import run

    ranks = ranks_from_environment()
    model_file = Path(sys.argv[0]).with_name("model.py")
    warn_once = warn if ranks.first else lambda line: None
    if is_edited(model_file):
        warn_once(
            f"train.py: warning: {model_file} has code of its own, which train.py does not run: it trains Ingot's GPT-2. Train a "
            f"class Model there with: ingot train --recipe shakespeare-char --model.file {model_file} (see docs/nanogpt.md)"
        )
    values = settle(arguments, ranks.world_size, warn_once)
    check_data(values)
    settle_tokenizer(values, warn_once)
    if values["eval_only"]:
        if ranks.first:
            evaluate(values)
        return
    if values["wandb_log"]:
        check_installed("wandb_log=True")
    device = find_device(values["device"], ranks.local_rank)

    def prepare() -> dict[str, Any]:
        check_folder(Path(values["out_dir"]))
        start = find_start(values, say, warn)
        resolved, elapsed = settle_folder(values, start, say, warn)
        check_before_training(resolved.config, ranks.world_size, warn, name=key_name)
        return {"settings": start.settings, "elapsed_seconds": elapsed}

    start = on_first_rank(device, ranks, prepare)
    settings, resolved = start["settings"], translate(values, start["settings"])
    values["block_size"] = settings["context"]
    if not ranks.first:
        run(resolved, began=process_start())
        return
    model = meta_model(settings)
    matrices = [p.numel() for p in model.parameters() if p.dim() >= 2]
    vectors = [p.numel() for p in model.parameters() if p.dim() < 2]
    parameters = sum(matrices) + sum(vectors) - settings["context"] * settings["width"]  # as nanoGPT counts
    say(f"tokens per iteration will be: {resolved.config.training.tokens_per_step:,}")
    say(f"number of parameters: {parameters / 1e6:.2f}M")
    say(f"num decayed parameter tensors: {len(matrices)}, with {sum(matrices):,} parameters")
    say(f"num non-decayed parameter tensors: {len(vectors)}, with {sum(vectors):,} parameters")
    if values["compile"]:
        say("the first iteration compiles the model and takes about a minute")
    flops, peak = flops_per_token(settings, parameters), peak_flops(values["mfu_peak"], device)
    mfu = RunningMfu(flops * resolved.config.training.tokens_per_step, peak * ranks.world_size)
    path = Path(values["out_dir"]) / CKPT

    def write(checkpoint: Checkpoint) -> None:
        write_ckpt(path, checkpoint, record(values))

    reporter = NanoGPTReporter(values, resolved.config, mfu, write, start["elapsed_seconds"], unwritten_checkpoint(path))
    run(resolved, reporter, began=process_start())
    if reporter.failure is not None:
        raise reporter.failure
    if not path.exists() and (newest := unwritten_checkpoint(path)) is not None:
        warn(
            f"there is no {path}: always_save_checkpoint=False, and no evaluation was the best so far; the weights are in "
            f"{newest}; write a ckpt.pt of them with: ingot export {newest} --format nanogpt --output {path}"
        )


def is_edited(model_file: Path) -> bool:
    """Return True if the model.py beside train.py defines classes or functions of its own; ours only imports them."""
    try:
        tree = ast.parse(model_file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    return any(isinstance(node, ast.ClassDef | ast.FunctionDef) for node in ast.walk(tree))


def evaluate(values: dict[str, Any]) -> None:
    """Print the losses of the model that init_from selects; write nothing."""
    from ingot.backends.open import open_backend, open_inference
    from ingot.compat.nanogpt.initial import find_start, open_fitting
    from ingot.eval.evaluator import Evaluator

    start = find_start(values, lambda line: None, warn)
    config = translate(values, start.settings).config
    say(f"tokens per iteration will be: {config.training.tokens_per_step:,}")
    dataset = open_fitting(config, values)
    model: Inference
    if start.weights is None:  # random initialisation, as in training
        model = open_backend(config, start.settings["vocab_size"], Ranks())
    else:
        model = open_inference(config, start.settings["vocab_size"])
        model.load_weights(start.weights, "the checkpoint")
    losses = []
    for split in ("train", "val"):
        evaluator = Evaluator.of(config, dataset.split(split), dataset.tokenizer)
        losses.append(evaluator.score(evaluator.rows(config.evaluation.rows), model.score).loss)
    say(evaluation_line(start.iteration, *losses))


def unwritten_checkpoint(ckpt: Path) -> Path | None:
    """Return our newest checkpoint if ckpt.pt is older or missing, which happens if a run is killed before writing ckpt.pt."""
    step, newest = max(saved_steps(ckpt.parent / "checkpoints").items(), default=(0, None))
    if newest is None or not (step or ckpt.exists()):  # nanoGPT writes no checkpoint before its first iteration
        return None
    written = ckpt.stat().st_mtime_ns if ckpt.exists() else 0
    return newest if written < (newest / INDEX).stat().st_mtime_ns else None


class NanoGPTReporter(Reporter):
    """Prints nanoGPT's log lines, and writes a ckpt.pt whenever nanoGPT would have written one.

    `write` converts a checkpoint to ckpt.pt, `elapsed` is the training time of earlier sessions in seconds, and `unwritten` is a
    checkpoint for which an earlier session was killed before writing ckpt.pt.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        config: Config,
        mfu: RunningMfu,
        write: Callable[[Checkpoint], None],
        elapsed: float = 0.0,
        unwritten: Path | None = None,
    ) -> None:
        self._values, self._config, self._mfu, self._write = values, config, mfu, write
        self._elapsed, self._unwritten = elapsed, unwritten
        self._session_iterations = 0
        self._announced_step: int | None = None
        self.failure: CheckpointError | None = None

    def begin(self, report: BeginReport) -> None:
        if report.device.startswith("cpu"):
            say(f"training on {report.device}")  # the thread count affects floating-point rounding
        if self._unwritten is not None:
            self.saved(self._unwritten)
        if report.resumed_at > self._values["max_iters"]:
            warn(f"iteration {report.resumed_at} is past max_iters={self._values['max_iters']}: nothing is left to do")

    def step(self, report: StepReport, log: bool) -> None:
        iteration, seconds = report.step - 1, report.elapsed_seconds - self._elapsed
        self._elapsed = report.elapsed_seconds
        if iteration % self._values["log_interval"] == 0:
            self._mfu.update(self._session_iterations, seconds)
            say(iteration_line(iteration, report.loss, seconds, self._mfu.value))
        self._session_iterations += 1

    def evaluation(self, report: EvaluationReport) -> None:
        self._elapsed = report.elapsed_seconds
        say(evaluation_line(report.step, _train_loss(report), report.val_loss))
        if report.step and (report.best or self._values["always_save_checkpoint"]):
            self._announce(report.step)

    def tracked(self, report: StepReport | EvaluationReport) -> Mapping[str, float]:
        if isinstance(report, StepReport):
            return {}
        return {
            "iter": report.step,
            "train/loss": _train_loss(report),
            "val/loss": report.val_loss,
            "lr": self._config.optimizer.learning_rate * learning_rate_scale(self._config, report.step, seconds=0.0),
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
        except (CheckpointError, OSError) as error:  # runs in a thread: the error is raised when training ends
            self.failure = error if isinstance(error, CheckpointError) else CheckpointError(f"cannot write ckpt.pt: {error}")
            warn(f"{self.failure}; training continues and the next save tries again")

    def message(self, text: str) -> None:
        warn(text)

    def end(self, result: Any) -> None:
        if result.status == "stopped":
            warn(f"stopped before iteration {result.total_steps}; resume with the same command and --init_from=resume")

    def _announce(self, step: int) -> None:
        if step != self._announced_step:
            self._announced_step = step
            say(f"saving checkpoint to {self._values['out_dir']}")


def _train_loss(report: EvaluationReport) -> float:
    return report.train_loss if report.train_loss is not None else math.nan


def iteration_line(iteration: int, loss: float, seconds: float, mfu: float) -> str:
    """Return nanoGPT's log line of an iteration."""
    return f"iter {iteration}: loss {loss:.4f}, time {seconds * 1000:.2f}ms, mfu {mfu * 100:.2f}%"


def evaluation_line(iteration: int, train_loss: float, val_loss: float) -> str:
    """Return nanoGPT's log line of an evaluation."""
    return f"step {iteration}: train loss {train_loss:.4f}, val loss {val_loss:.4f}"


def peak_flops(mfu_peak: float | None, device: Device) -> float:
    """Return and print a device's peak FLOP/s: as set, from its data sheet, or measured. nanoGPT assumes an A100."""
    from ingot.backends.open import measure_flops

    if mfu_peak:
        flops, source = mfu_peak, "as mfu_peak says"
    elif device.peak_flops:
        flops, source = device.peak_flops, f"the bf16 rate in the data sheet of {device.name}"
    else:
        flops, source = measure_flops(device), f"measured with large matrices on {device.name}"
    say(f"mfu is relative to {flops / 1e12:.4g} TFLOP/s, {source}")
    return flops


class RunningMfu:
    """Model FLOPs utilisation as nanoGPT prints it: -1 during warmup, then an EMA."""

    def __init__(self, flops_per_iteration: float, peak: float) -> None:
        self._flops, self._peak = flops_per_iteration, peak
        self.value = -1.0

    def update(self, iterations: int, seconds: float) -> None:
        """Add one iteration of this process; `iterations` is the number before it."""
        if iterations >= MFU_WARMUP_ITERATIONS and seconds > 0:
            mfu = self._flops / seconds / self._peak
            self.value = mfu if self.value < 0 else MFU_DECAY * self.value + (1 - MFU_DECAY) * mfu
