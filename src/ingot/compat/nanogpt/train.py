"""train.py: nanoGPT's training script, executed by Ingot's training loop.

`out_dir` is an Ingot run folder that also contains nanoGPT's ckpt.pt, so every `ingot` command works on it too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.compat.nanogpt import CKPT
from ingot.compat.nanogpt.keys import Arguments, check_data, enter, key_name, record, settle, translate
from ingot.console.entry import process_start, say, warn
from ingot.errors import CheckpointError
from ingot.optim.schedules import learning_rate_scale
from ingot.runs.checkpoints import load_checkpoint
from ingot.runs.folder import INDEX, WANDB_ID, Kind, RunFolder, saved_steps
from ingot.runs.reporter import BeginReport, EvaluationReport, Reporter, StepReport
from ingot.runs.state import LOCK, RunLock
from ingot.runtime.devices import Device
from ingot.runtime.ranks import Ranks, ranks_from_environment

if TYPE_CHECKING:
    from ingot.backends.base import Inference
    from ingot.config.schema import Config

MFU_WARMUP_ITERATIONS = 5  # the first iterations are slow; nanoGPT leaves them out of the MFU
MFU_DECAY = 0.9  # decay of the moving average of the MFU, per logged iteration


def train(arguments: Arguments) -> None:
    """Train, resume or only evaluate, depending on the keys init_from and eval_only."""
    from ingot.backends.open import find_device, on_first_rank
    from ingot.backends.torch.build import flops_per_token
    from ingot.compat.nanogpt.checkpoint import count_parameters, find_start, group_lines, meta_model, settle_folder
    from ingot.preflight.validate import check_before_training
    from ingot.runs.tracking import check_installed
    from ingot.train.start import run

    ranks = ranks_from_environment()
    model_file = Path(sys.argv[0]).with_name("model.py")
    warn_once = warn if ranks.first else lambda line: None
    if is_edited(model_file):
        warn_once(
            f"train.py: warning: {model_file} has custom code, which train.py does not run; it trains Ingot's GPT-2. To train "
            f"the file's class Model, run: ingot train --recipe shakespeare-char --model.file {model_file} (see docs/nanogpt.md)"
        )
    values = settle(arguments, ranks.world_size, warn_once)
    check_data(values, warn_once)
    if values["eval_only"]:
        if ranks.first:
            evaluate(values)
        return
    if values["wandb_log"]:
        check_installed("wandb_log=True")
    device = find_device(values["device"], ranks.local_rank)

    def prepare() -> dict[str, Any]:
        out = Path(values["out_dir"])
        if not (out / CKPT).exists() and not saved_steps(out / "checkpoints"):  # otherwise the run is resumed or moved aside
            RunFolder(out).check_ownership([WANDB_ID])
        if (out / LOCK).exists():
            with RunLock(out):  # fails if another process is training there
                pass
        start = find_start(values, say, warn)
        check_before_training(settle_folder(values, start, say, warn).config, ranks.world_size, warn, name=key_name)
        return start.settings

    settings = on_first_rank(device, ranks, prepare)
    resolved = translate(values, settings)
    values["block_size"] = settings["context"]
    if not ranks.first:
        run(resolved, began=process_start())
        return
    model, tokens = meta_model(settings), resolved.config.training.tokens_per_step
    say(f"tokens per iteration will be: {tokens:,}")
    say(f"number of parameters: {count_parameters(model) / 1e6:.2f}M")
    say("\n".join(group_lines(dict(model.named_parameters()))))
    if values["compile"]:
        say("the first iteration compiles the model and takes about a minute")
    peak = peak_flops(values["mfu_peak"], device) * ranks.world_size
    reporter = NanoGPTReporter(values, resolved.config, flops_per_token(model, settings["context"]) * tokens / peak)
    run(resolved, reporter, began=process_start())
    if reporter.failure is not None:
        raise reporter.failure
    path = Path(values["out_dir"]) / CKPT
    if not path.exists() and (newest := reporter.unwritten_checkpoint()) is not None:
        warn(
            f"no evaluation improved on the best loss, so with always_save_checkpoint=False there is no {path}; to write the "
            f"newest weights to it, run: ingot export {newest} --format nanogpt --output {path}"
        )


def main(words: Sequence[str] | None = None) -> int:
    """Run train.py; return the exit code."""
    return enter("train.py", train, words)  # a function, because torchrun's launcher does not accept a functools.partial


def is_edited(model_file: Path) -> bool:
    """Return True if the model.py next to train.py defines classes or functions; Ingot's model.py only imports them."""
    return model_file.is_file() and re.search(rb"^\s*(class|def) ", model_file.read_bytes(), re.MULTILINE) is not None


def evaluate(values: dict[str, Any]) -> None:
    """Print the training and validation loss of the model that init_from selects, without writing files."""
    from ingot.backends.open import open_backend, open_inference
    from ingot.compat.nanogpt.checkpoint import find_start, open_fitting
    from ingot.eval.evaluator import evaluator_of

    start = find_start(values, lambda line: None, warn)
    config = translate(values, start.settings).config
    say(f"tokens per iteration will be: {config.training.tokens_per_step:,}")
    dataset = open_fitting(config, values)
    model: Inference
    if not start.weights:  # random initialisation, as in training
        model = open_backend(config, start.settings["vocab_size"], Ranks())
    else:
        model = open_inference(config, start.settings["vocab_size"])
        model.load_weights(start.weights, "the checkpoint")
    losses = []
    for split in ("train", "val"):
        evaluator = evaluator_of(config, dataset, split)
        losses.append(evaluator.score(evaluator.rows(config.evaluation.rows), model.score).loss)
    say(evaluation_line(start.iter_num, *losses))


class NanoGPTReporter(Reporter):
    """A reporter that prints nanoGPT's log lines, and writes a ckpt.pt whenever nanoGPT would have written one.

    `ideal_seconds` is the time per iteration if all ranks ran at peak FLOP/s. As in nanoGPT, the first MFU printed is -100%.
    """

    def __init__(self, values: Mapping[str, Any], config: Config, ideal_seconds: float) -> None:
        self._values, self._config, self._ideal_seconds = values, config, ideal_seconds
        self._ckpt = Path(values["out_dir"]) / CKPT
        self._elapsed, self._session_iterations, self._mfu = 0.0, 0, -1.0
        self._announced_step: int | None = None
        self.failure: CheckpointError | None = None

    def begin(self, report: BeginReport) -> None:
        self._elapsed = report.elapsed_seconds
        if report.device.startswith("cpu"):
            say(f"training on {report.device}")  # report.device includes the number of threads, which affects rounding
        if (unwritten := self.unwritten_checkpoint()) is not None:  # an earlier session was killed before writing ckpt.pt
            self.saved(unwritten)
        if report.resumed_at > self._values["max_iters"]:
            warn(f"iteration {report.resumed_at} is past max_iters={self._values['max_iters']}: nothing is left to do")

    def unwritten_checkpoint(self) -> Path | None:
        """Return Ingot's newest checkpoint if ckpt.pt is older or missing, else None."""
        step, newest = max(saved_steps(self._ckpt.parent / "checkpoints").items(), default=(0, None))
        if newest is None or not (step or self._ckpt.exists()):  # nanoGPT writes no checkpoint before its first iteration
            return None
        written = self._ckpt.stat().st_mtime_ns if self._ckpt.exists() else 0
        return newest if written < (newest / INDEX).stat().st_mtime_ns else None

    def step(self, report: StepReport, log: bool) -> None:
        iteration, seconds = report.step - 1, report.elapsed_seconds - self._elapsed
        self._elapsed = report.elapsed_seconds
        if iteration % self._values["log_interval"] == 0:
            if self._session_iterations >= MFU_WARMUP_ITERATIONS and seconds > 0:
                mfu = self._ideal_seconds / seconds
                self._mfu = mfu if self._mfu < 0 else MFU_DECAY * self._mfu + (1 - MFU_DECAY) * mfu
            say(f"iter {iteration}: loss {report.loss:.4f}, time {seconds * 1000:.2f}ms, mfu {self._mfu * 100:.2f}%")
        self._session_iterations += 1

    def evaluation(self, report: EvaluationReport) -> None:
        self._elapsed = report.elapsed_seconds
        say(evaluation_line(report.step, report.train_loss, report.val_loss))
        if report.step and (report.best or self._values["always_save_checkpoint"]):
            self._announce(report.step)

    def tracked(self, report: StepReport | EvaluationReport) -> Mapping[str, float]:
        if isinstance(report, StepReport):
            return {}
        assert report.train_loss is not None  # not None, because translate() sets evaluation.train_rows
        return {
            "iter": report.step,
            "train/loss": report.train_loss,
            "val/loss": report.val_loss,
            "lr": self._config.optimizer.learning_rate * learning_rate_scale(self._config, report.step, seconds=0.0),
            "mfu": 100 * self._mfu,
        }

    def tracked_config(self) -> Mapping[str, Any]:
        return record(self._values)

    def saved(self, path: Path, kind: Kind = "regular") -> None:
        from ingot.compat.nanogpt.checkpoint import write_ckpt

        try:
            checkpoint = load_checkpoint(path)
            if not self._values["always_save_checkpoint"] and checkpoint.progress["best_step"] != checkpoint.step:
                return
            self._announce(checkpoint.step)
            write_ckpt(self._ckpt, checkpoint, record(self._values))
            self.failure = None
        except (CheckpointError, OSError) as error:  # this is the saving thread; the error is raised when training ends
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


def evaluation_line(iteration: int, train_loss: float | None, val_loss: float) -> str:
    """Return nanoGPT's log line for an evaluation."""
    return f"step {iteration}: train loss {train_loss:.4f}, val loss {val_loss:.4f}"


def peak_flops(mfu_peak: float | None, device: Device) -> float:
    """Print and return the peak FLOP/s of a device, taken from the key mfu_peak, the device's data sheet or a measurement."""
    from ingot.backends.open import measure_flops

    if mfu_peak:
        flops, source = mfu_peak, "set by mfu_peak"
    elif device.peak_flops:
        flops, source = device.peak_flops, f"the bf16 rate in the data sheet of {device.name}"
    else:
        flops, source = measure_flops(device), f"measured with large matrices on {device.name}"
    say(f"mfu is relative to {flops / 1e12:.4g} TFLOP/s, {source}")
    return flops
