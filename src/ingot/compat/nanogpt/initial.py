"""Initial state of a train.py run: random weights, GPT-2 weights, our own checkpoint, or nanoGPT's ckpt.pt.

Our own run resumes exactly unless something that affects training has changed. Other weights are first saved in the folder as one
of our checkpoints, at their iteration, and training resumes from it. Existing files are moved aside, never overwritten.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

from ingot.backends.torch.state import DamagedFile
from ingot.compat.nanogpt import CKPT
from ingot.compat.nanogpt.checkpoint import POSITIONS, Ckpt, Say, read_ckpt, read_pretrained, sizes
from ingot.compat.nanogpt.keys import key_name
from ingot.compat.nanogpt.translate import data_path, fresh_settings, translate, vocabulary
from ingot.config.loading import ResolvedConfig
from ingot.config.schema import Config
from ingot.data.loading.data_path import open_dataset
from ingot.data.store.dataset import Dataset
from ingot.errors import CannotContinue, CheckpointError, ConfigError, DataError
from ingot.eval.evaluator import Evaluator
from ingot.runs.checkpoints import Checkpoint, load_checkpoint, newest_valid, save_checkpoint
from ingot.runs.claim import LOCK, RunLock
from ingot.runs.folder import DAMAGED, WANDB_ID, RunFolder, saved_steps
from ingot.runs.state import read_state
from ingot.runtime.files import fsync_dir, replace_folder, writing
from ingot.runtime.tensors import TensorRecord
from ingot.train.resume import Progress, check_fits, facts_of

PARTS = (
    "state.json", "checkpoints", "samples", "artifact", "config.yaml", "environment.json", "metrics.jsonl", "log.txt",
    "result.json", "wandb", "wandb.json",
)  # fmt: skip


def check_folder(out: Path) -> None:
    """Raise an error if out_dir is in use or holds files that are not ours."""
    if not (out / CKPT).exists() and not saved_steps(out / "checkpoints"):  # otherwise other files are moved aside
        RunFolder(out).check_ownership([WANDB_ID])
    if (out / LOCK).exists():
        with RunLock(out):
            pass


def find_start(values: Mapping[str, Any], say: Say, warn: Say) -> Ckpt:
    """Return the state that init_from selects, cropped to block_size; with eval_only nothing is written."""
    name, out = values["init_from"], Path(values["out_dir"])
    if name == "scratch":
        vocab_size = vocabulary(values)
        ids = f"vocab_size {vocab_size} of {data_path(values)}" if vocab_size else "GPT-2's 50,257 tokens, rounded up to 50,304"
        say(f"a new model from scratch, with {ids}")
        return Ckpt(out, fresh_settings(values, vocab_size))
    if name != "resume":
        weights, settings = read_pretrained(name)
        say(f"a model with the weights of {name}")
        start = Ckpt(Path(name), settings, weights)
    elif (ours := _own_checkpoint(out, warn, values["eval_only"])) is not None:
        say(f"resuming from {ours.path}")
        settings = ours.progress["config"]["model"]
        if settings["family"] != "gpt2":
            raise CheckpointError(f"{ours.path} is a model of the family {settings['family']}; continue it with: ingot train")
        settings = settings | sizes(ours.weights)  # `ingot train` infers these from the data
        start = Ckpt(ours.path, settings, ours.weights, ours.tensors["optimizer"], ours.step, ours=ours)
    else:
        start = read_ckpt(out / CKPT)
        say(f"resuming from {start.path} at iteration {start.iter_num}")
    context = start.settings["context"]
    size = values["block_size"] or context
    if size > context:
        raise ConfigError(f"block_size={size} is more than the {context} positions of {start.path}; give --block_size={context}")

    def crop(record: TensorRecord) -> TensorRecord:
        if record.name.partition("/")[0] != POSITIONS or len(record.shape) != 2 or record.shape[0] <= size:
            return record
        data = record.data.cast("B")
        return replace(record, shape=(size, record.shape[1]), data=data[: len(data) // record.shape[0] * size])

    weights, optimizer = ({n: crop(r) for n, r in records.items()} for records in (start.weights, start.optimizer))
    settings = {**start.settings, "context": size, "dropout": values["dropout"]}
    return replace(start, settings=settings, weights=weights, optimizer=optimizer)


def _own_checkpoint(out: Path, warn: Say, read_only: bool) -> Checkpoint | None:
    """Return our newest checkpoint in a folder, or None if the ckpt.pt there was copied from another run."""
    if not saved_steps(out / "checkpoints"):
        if not (out / CKPT).exists():
            raise CheckpointError(f"init_from=resume: there is no {out / CKPT}; train one with --init_from=scratch first")
        return None
    newest = newest_valid(out / "checkpoints", warn, read_only)
    if newest is None or not (out / CKPT).exists():
        return newest
    try:
        ckpt = read_ckpt(out / CKPT)
    except DamagedFile as error:
        warn(f"{error}; {newest.path} is used instead")
        if not read_only:
            (out / CKPT).replace(out / f"{CKPT}{DAMAGED}")
        return newest
    if ckpt.checkpoint is None:
        return None
    named = newest if ckpt.checkpoint.name == newest.path.name else load_checkpoint(ckpt.checkpoint)
    return newest if named.weights[POSITIONS].data == ckpt.weights[POSITIONS].data else None


def settle_folder(values: Mapping[str, Any], start: Ckpt, say: Say, warn: Say) -> ResolvedConfig:
    """Prepare the folder so that training begins or resumes from `start`; return the config."""
    out, resolved = Path(values["out_dir"]), translate(values, start.settings)
    dataset = open_fitting(resolved.config, values)
    facts = facts_of(resolved.config, dataset)
    if start.ours is not None:
        try:
            check_fits(start.ours, facts)
            return resolved
        except CannotContinue as error:
            changes = dict.fromkeys(change.render(key_name) for change in error.changes)  # two settings may have the same key
            warn(f"this is not an exact resume of {start.ours.path}: {'; '.join(changes)}")
    elif start.missing:
        missing = ", ".join(start.missing)
        warn(f"{start.path} does not hold {missing}: the run continues, but not exactly as an uninterrupted one would")
    if not start.weights:
        move_aside(out, (*PARTS, CKPT), say)
        return resolved
    progress = _progress(resolved.config, dataset, start)
    tensors = {"model": list(start.weights.values()), "optimizer": list(start.optimizer.values())}
    folder = RunFolder(out).checkpoints
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replace_folder(folder) as new:
            save_checkpoint(new, progress.step, tensors, {**asdict(progress), "choices": {}, **facts})
            aside = move_aside(out, PARTS, say)  # done last: if the disk is full, the old run is still in place
        if aside is not None and (out / CKPT).exists():  # moved last: if the process is killed here, a resume still finds it
            (out / CKPT).rename(aside / CKPT)
    return resolved


def open_fitting(config: Config, values: Mapping[str, Any]) -> Dataset:
    """Open the dataset; raise ConfigError, with nanoGPT's key names, if the model's vocabulary is smaller than the dataset's."""
    dataset = open_dataset(config.data.path, config.data.tokenizer, config.data.trust_tokens)
    tokens, rows = dataset.tokenizer.vocab_size, config.model.vocab_size or 0
    if tokens > rows:
        name = values["dataset"]
        raise ConfigError(f"dataset={name} has a vocabulary of {tokens:,} and the model one of {rows:,}; they do not fit")
    if dataset.split("val").tokens < 2:
        raise DataError(
            f"dataset={values['dataset']} has no val.bin, or an empty one; evaluations need it: prepare the data again"
        )
    return dataset


def move_aside(out: Path, parts: Sequence[str], say: Say) -> Path | None:
    """Move the run in a folder to a numbered subfolder and return that; None if there is no run."""
    state = read_state(out)  # state.json also lists checkpoints that were deleted
    had_checkpoint = state is not None and state.checkpoint is not None
    if not had_checkpoint and not (out / CKPT).exists() and not saved_steps(out / "checkpoints"):
        return None
    with RunLock(out), writing(out):
        aside = next(path for number in count(1) if not (path := out / f"earlier-{number}").exists())
        aside.mkdir()
        for part in parts:
            if (out / part).exists():
                (out / part).rename(aside / part)
        fsync_dir(out)
    say(f"the run that was in {out} is now in {aside}")
    return aside


def _progress(config: Config, dataset: Dataset, start: Ckpt) -> Progress:
    """Return the training progress at the start's iteration, with the best validation loss so far if it is known."""
    at = start.iter_num
    p = Progress(step=at, sample=at * config.rows_per_step, tokens=at * config.training.tokens_per_step)
    if start.ours is not None:
        earlier, before = start.ours.progress, start.ours.progress["config"]
        p = replace(p, **{name: earlier[name] for name in ("tokens", "elapsed_seconds", "loss")})
        if (earlier["data_fingerprint"], before["data"]["seq_len"]) == (dataset.fingerprint, config.data.seq_len):
            p = replace(p, **{name: earlier[name] for name in ("best_bpb", "val_loss", "val_bpb")})
            p = replace(p, best_step=at if earlier["best_step"] == at else None, best_by=earlier.get("best_by", []))
    elif start.missing:
        p = replace(p, best_step=at)  # kept as the best, and written as ckpt.pt, which the next resume recognises
    if start.best_val_loss is not None and at:
        evaluator = Evaluator.of(config, dataset.split("val"), dataset.tokenizer)
        sizes = evaluator.score(evaluator.rows(config.evaluation.rows), lambda batch: 0.0)
        best = start.best_val_loss / math.log(2) * sizes.tokens / sizes.bytes
        p = replace(p, best_bpb=best, val_loss=start.best_val_loss, val_bpb=best)
    return p
