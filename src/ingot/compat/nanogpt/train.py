"""train.py: nanoGPT's training, by our loop.

The folder `out_dir` is a run folder of ours with nanoGPT's ckpt.pt in it, so every `ingot` command understands it too.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.compat.nanogpt.command_line import Given, enter
from ingot.compat.nanogpt.keys import key_name
from ingot.compat.nanogpt.mfu import RunningMfu, find_peak
from ingot.compat.nanogpt.translate import ModelArgs, check_data, record, settle, settle_tokenizer, translate
from ingot.console.entry import process_start, say, warn
from ingot.errors import IngotError, PeerLost
from ingot.runtime.devices import Device
from ingot.runtime.ranks import Ranks, ranks_from_environment

if TYPE_CHECKING:
    from ingot.config.loading import ResolvedConfig
    from ingot.runs.checkpoints import Checkpoint


def main(arguments: Sequence[str] | None = None) -> int:
    """Run train.py; returns the exit code."""
    return enter("train.py", train, arguments)


def train(given: Given) -> None:
    """Train, continue or evaluate as the keys say."""
    from ingot.backends.open import find_device
    from ingot.runs.tracking import check_installed

    ranks = ranks_from_environment()
    model = Path(sys.argv[0]).with_name("model.py")
    first_warns = warn if ranks.first else lambda line: None
    if is_edited(model):
        first_warns(
            f"train.py: warning: {model} has code of its own, which train.py does not run: it trains Ingot's GPT-2. A class "
            f"Model there is trained by: ingot train --recipe shakespeare-char --model.file {model}; docs/nanogpt.md shows how"
        )
    values = settle(given, ranks.world_size, first_warns)
    check_data(values)
    settle_tokenizer(values, first_warns)
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
        _tell_model(args, values)
    _run(values, resolved, args, ranks, device, elapsed)


def is_edited(model: Path) -> bool:
    """Whether a model.py beside train.py has a model of its own; ours only imports one."""
    try:
        tree = ast.parse(model.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    return any(isinstance(node, ast.ClassDef | ast.FunctionDef) for node in ast.walk(tree))


def _run(
    values: Mapping[str, Any],
    resolved: ResolvedConfig,
    args: ModelArgs,
    ranks: Ranks,
    device: Device,
    elapsed: float,
) -> None:
    from ingot.compat.nanogpt.checkpoint import CKPT, write_ckpt
    from ingot.compat.nanogpt.reporter import NanoGPTReporter
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

    reporter = NanoGPTReporter(values, resolved.config, mfu, say, warn, write, elapsed, unwritten=unwritten(path))
    run(resolved, reporter, began=process_start())
    if reporter.failure is not None:
        raise reporter.failure
    if not path.exists() and (newest := unwritten(path)) is not None:
        warn(
            f"there is no {path}: always_save_checkpoint=False, and no evaluation called for one; the weights are in {newest}, "
            f"and this makes one of them: ingot export {newest} --format nanogpt --output {path}"
        )


def unwritten(path: Path) -> Path | None:
    """The newest checkpoint of ours, if its ckpt.pt is older or gone: a kill may come before it is written."""
    from ingot.runs.folder import INDEX, saved_steps

    step, newest = max(saved_steps(path.parent / "checkpoints").items(), default=(0, None))
    if newest is None or not (step or path.exists()):  # nanoGPT writes none before its first iteration
        return None
    written = path.stat().st_mtime_ns if path.exists() else 0
    return newest if written < (newest / INDEX).stat().st_mtime_ns else None


def best_val_loss(progress: Mapping[str, Any]) -> float | None:
    """The lowest val loss so far, from the last one: both were found on the same rows."""
    loss, now, best = progress["val_loss"], progress["val_bpb"], progress["best_bpb"]
    return float(loss * best / now) if loss and now and best else None


def evaluate(values: Mapping[str, Any]) -> None:
    """Print the losses of what init_from names; nothing is written anywhere."""
    if values["wandb_log"]:
        warn("eval_only=True: nothing is sent to Weights & Biases")
    from ingot.compat.nanogpt.reporter import evaluation_line
    from ingot.compat.nanogpt.session import Session

    session = Session({name: value for name, value in values.items() if value is not None})
    _tell_tokens(session.config)
    losses = session.estimate_loss()
    say(evaluation_line(session.iteration, float(losses["train"]), float(losses["val"])))


def _agreed_start(values: Mapping[str, Any], ranks: Ranks, device: Device) -> tuple[ModelArgs, ResolvedConfig, float]:
    """What the run starts from: the first rank looks and tidies the folder, and tells the others."""
    from ingot.backends.open import open_group
    from ingot.compat.nanogpt.initial import check_folder, find_start, settle_folder
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
    told = json.loads(group.broadcast(""))
    if "exit_code" in told:
        raise PeerLost(told["exit_code"])
    args = ModelArgs(**told["args"])
    return args, translate(values, args, told["gelu"]), 0.0


def _tell_tokens(values: Mapping[str, Any]) -> None:
    tokens = values["gradient_accumulation_steps"] * values["batch_size"] * values["block_size"]
    say(f"tokens per iteration will be: {tokens:,}")


def _tell_model(args: ModelArgs, values: Mapping[str, Any]) -> None:
    _tell_tokens(values)
    say(f"number of parameters: {args.parameters / 1e6:.2f}M")
    for words, (tensors, parameters) in (("decayed", args.decayed), ("non-decayed", args.not_decayed)):
        say(f"num {words} parameter tensors: {tensors}, with {parameters:,} parameters")
    if values["compile"]:
        say("the first iteration compiles the model and takes about a minute")
