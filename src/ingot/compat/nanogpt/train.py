"""train.py: nanoGPT's training with our loop.

The folder `out_dir` is one of our run folders with nanoGPT's ckpt.pt in it, so every `ingot` command understands it too.
"""

from __future__ import annotations

import ast
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.compat.nanogpt.keys import Given, enter, key_name
from ingot.compat.nanogpt.translate import ModelArgs, check_data, learning_rate, record, settle, settle_tokenizer, translate
from ingot.console.entry import process_start, say, warn
from ingot.errors import CheckpointError, IngotError, PeerLost
from ingot.runs.checkpoints import Checkpoint, load_checkpoint
from ingot.runs.folder import INDEX, Kind, saved_steps
from ingot.runs.reporter import BeginReport, EvaluationReport, Reporter, StepReport
from ingot.runtime.devices import Device
from ingot.runtime.ranks import Ranks, ranks_from_environment

if TYPE_CHECKING:
    from ingot.backends.base import Inference
    from ingot.config.loading import ResolvedConfig
    from ingot.config.schema import Config

MFU_WARMUP_ITERATIONS = 5  # slow first iterations, which nanoGPT leaves out of the MFU
MFU_DECAY = 0.9  # decay of the running mean of the MFU per logged iteration


def main(arguments: Sequence[str] | None = None) -> int:
    """Run train.py; return the exit code."""
    return enter("train.py", train, arguments)


def train(given: Given) -> None:
    """Train, resume or evaluate, as the keys say."""
    from ingot.backends.open import find_device
    from ingot.runs.tracking import check_installed

    ranks = ranks_from_environment()
    model_file = Path(sys.argv[0]).with_name("model.py")
    warn_once = warn if ranks.first else lambda line: None
    if is_edited(model_file):
        warn_once(
            f"train.py: warning: {model_file} has code of its own, which train.py does not run: it trains Ingot's GPT-2. Train a "
            f"class Model there with: ingot train --recipe shakespeare-char --model.file {model_file} (see docs/nanogpt.md)"
        )
    values = settle(given, ranks.world_size, warn_once)
    check_data(values)
    settle_tokenizer(values, warn_once)
    if values["eval_only"]:
        if ranks.first:
            evaluate(values)
        return
    if values["wandb_log"]:
        check_installed("wandb_log=True")
    device = find_device(values["device"], ranks.local_rank)
    args, resolved, elapsed = _agreed_start(values, ranks, device)
    values["block_size"] = args.block_size
    if ranks.first:
        _print_model(args, values)
    _run(values, resolved, args, ranks, device, elapsed)


def is_edited(model_file: Path) -> bool:
    """Return True if the model.py beside train.py defines classes or functions; ours only imports them."""
    try:
        tree = ast.parse(model_file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    return any(isinstance(node, ast.ClassDef | ast.FunctionDef) for node in ast.walk(tree))


def evaluate(values: dict[str, Any]) -> None:
    """Print the losses of the model that init_from names; nothing is written."""
    from ingot.backends.open import open_backend, open_inference
    from ingot.compat.nanogpt.start import check_dataset, find_start
    from ingot.data.loading.data_path import open_dataset
    from ingot.eval.evaluator import Evaluator

    if values["wandb_log"]:
        warn("eval_only=True: nothing is sent to Weights & Biases")
    start = find_start(values, lambda line: None, warn)
    values["block_size"] = start.args.block_size
    _print_tokens(values)
    config = translate(values, start.args, start.gelu).config
    dataset = open_dataset(config.data.path, config.data.tokenizer, config.data.trust_tokens)
    check_dataset(dataset, values, start.args, warn)
    model: Inference
    if start.weights is None:  # random weights, as training would begin with
        model = open_backend(config, start.args.vocab_size, Ranks())
    else:
        model = open_inference(config, start.args.vocab_size)
        model.load_weights(start.weights, "the checkpoint")
    losses = []
    for split in ("train", "val"):
        evaluator = Evaluator.of(config, dataset.split(split), dataset.tokenizer)
        losses.append(evaluator.score(evaluator.rows(config.evaluation.rows), model.score).loss)
    say(evaluation_line(start.iteration, *losses))


def _agreed_start(values: Mapping[str, Any], ranks: Ranks, device: Device) -> tuple[ModelArgs, ResolvedConfig, float]:
    """Find what the run starts from and prepare its folder, on the first rank, and broadcast it to the others."""
    from ingot.backends.open import open_group
    from ingot.compat.nanogpt.start import check_folder, find_start, settle_folder
    from ingot.preflight.validate import check_before_training

    group = open_group(device, ranks)
    if ranks.first:
        try:
            check_folder(Path(values["out_dir"]))
            start = find_start(values, say, warn)
            resolved, elapsed = settle_folder(values, start, say, warn)
            check_before_training(resolved.config, ranks.world_size, warn, name=key_name)
        except IngotError as error:
            group.broadcast(json.dumps({"exit_code": error.exit_code}))
            raise
        group.broadcast(json.dumps({"args": asdict(start.args), "gelu": start.gelu}))
        return start.args, resolved, elapsed
    message = json.loads(group.broadcast(""))
    if "exit_code" in message:
        raise PeerLost(message["exit_code"])
    args = ModelArgs(**message["args"])
    return args, translate(values, args, message["gelu"]), 0.0


def _print_tokens(values: Mapping[str, Any]) -> None:
    tokens = values["gradient_accumulation_steps"] * values["batch_size"] * values["block_size"]
    say(f"tokens per iteration will be: {tokens:,}")


def _print_model(args: ModelArgs, values: Mapping[str, Any]) -> None:
    _print_tokens(values)
    say(f"number of parameters: {args.parameters / 1e6:.2f}M")
    for words, (tensors, parameters) in (("decayed", args.decayed), ("non-decayed", args.not_decayed)):
        say(f"num {words} parameter tensors: {tensors}, with {parameters:,} parameters")
    if values["compile"]:
        say("the first iteration compiles the model and takes about a minute")


def _run(
    values: Mapping[str, Any], resolved: ResolvedConfig, args: ModelArgs, ranks: Ranks, device: Device, elapsed: float
) -> None:
    from ingot.compat.nanogpt.checkpoint import CKPT, write_ckpt
    from ingot.train.start import run

    if not ranks.first:
        run(resolved, began=process_start())
        return
    peak = find_peak(values["mfu_peak"], device)
    say(str(peak))
    flops = args.flops_per_token * resolved.config.training.tokens_per_step
    mfu = RunningMfu(flops, peak.flops * ranks.world_size)
    path = Path(values["out_dir"]) / CKPT

    def write(checkpoint: Checkpoint) -> None:
        write_ckpt(path, checkpoint, record(values), best_val_loss(checkpoint.progress))

    reporter = NanoGPTReporter(values, resolved.config, mfu, write, elapsed, unwritten_checkpoint(path))
    run(resolved, reporter, began=process_start())
    if reporter.failure is not None:
        raise reporter.failure
    if not path.exists() and (newest := unwritten_checkpoint(path)) is not None:
        warn(
            f"there is no {path}: always_save_checkpoint=False, and no evaluation was the best so far; the weights are in "
            f"{newest}; write a ckpt.pt of them with: ingot export {newest} --format nanogpt --output {path}"
        )


def unwritten_checkpoint(ckpt: Path) -> Path | None:
    """Return our newest checkpoint if ckpt.pt is older or missing: a run may be killed before it writes ckpt.pt."""
    step, newest = max(saved_steps(ckpt.parent / "checkpoints").items(), default=(0, None))
    if newest is None or not (step or ckpt.exists()):  # nanoGPT writes none before its first iteration
        return None
    written = ckpt.stat().st_mtime_ns if ckpt.exists() else 0
    return newest if written < (newest / INDEX).stat().st_mtime_ns else None


def best_val_loss(progress: Mapping[str, Any]) -> float | None:
    """Return the lowest val loss so far, scaled from the last one: both were measured on the same rows."""
    loss, bpb, best_bpb = progress["val_loss"], progress["val_bpb"], progress["best_bpb"]
    return float(loss * best_bpb / bpb) if loss and bpb and best_bpb else None


class NanoGPTReporter(Reporter):
    """Prints nanoGPT's log lines, and writes a ckpt.pt for every checkpoint that nanoGPT would have written.

    `write` writes a checkpoint as ckpt.pt, `elapsed` are the seconds of earlier sessions, and `unwritten` is a checkpoint whose
    ckpt.pt an earlier session did not get to write.
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
            say(f"training on {report.device}")  # the number of threads changes how sums are rounded
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
        except (CheckpointError, OSError) as error:  # this runs in a thread: training continues, and the run ends with the error
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


@dataclass(frozen=True)
class Peak:
    """The peak FLOP/s of one device, and where the number comes from."""

    flops: float
    source: str

    def __str__(self) -> str:
        return f"mfu is relative to {self.flops / 1e12:.4g} TFLOP/s, {self.source}"


def find_peak(given: float | None, device: Device) -> Peak:
    """Return a device's peak FLOP/s: as given, by its data sheet, or measured. nanoGPT uses an A100's 312e12 on every device."""
    from ingot.backends.open import measure_flops

    if given:
        return Peak(given, "as mfu_peak says")
    if device.peak_flops:
        return Peak(device.peak_flops, f"the bf16 rate in the data sheet of {device.name}")
    return Peak(measure_flops(device), f"measured with large matrices on {device.name}")


class RunningMfu:
    """Model FLOPs utilisation as nanoGPT prints it: -1 during warmup, then a running mean."""

    def __init__(self, flops_per_iteration: float, peak: float) -> None:
        self._flops, self._peak = flops_per_iteration, peak
        self.value = -1.0

    def update(self, iterations: int, seconds: float) -> None:
        """Add an iteration of this process; `iterations` ran before it."""
        if iterations >= MFU_WARMUP_ITERATIONS and seconds > 0:
            mfu = self._flops / seconds / self._peak
            self.value = mfu if self.value < 0 else MFU_DECAY * self.value + (1 - MFU_DECAY) * mfu
