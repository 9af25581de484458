"""The start of a run: random weights, GPT-2's, our own run, or nanoGPT's ckpt.pt; and models to sample from.

Our own run resumes exactly if nothing that matters has changed. Other weights are first written into the folder as our checkpoint
of their iteration, and the loop resumes from that. Files already in the folder are moved aside, never overwritten.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

from ingot.api import load
from ingot.artifact.hf_tokenizer import find_tokenizer
from ingot.backends.torch.state import DamagedFile
from ingot.compat.nanogpt import is_ckpt
from ingot.compat.nanogpt.checkpoint import CKPT, POSITIONS, Ckpt, pretrained_folder, read_ckpt, read_pretrained, sizes
from ingot.compat.nanogpt.keys import key_name
from ingot.compat.nanogpt.translate import ModelArgs, args_of, data_path, fresh_args, translate, vocabulary
from ingot.config.loading import ResolvedConfig
from ingot.config.schema import GPT2_VOCAB_SIZE, Config
from ingot.data.formats.nanogpt_folder import META, char_tokenizer
from ingot.data.loading.data_path import open_dataset
from ingot.data.store.dataset import Dataset
from ingot.data.tokenizers import GPT2Tokenizer, Tokenizer, from_spec, open_tokenizer
from ingot.errors import CannotContinue, CheckpointError, ConfigError, DataError
from ingot.eval.evaluator import Evaluator
from ingot.inference.model import LoadedModel, foreign_weights, open_model
from ingot.runs.checkpoints import Checkpoint, load_checkpoint, newest_valid, save_checkpoint
from ingot.runs.folder import DAMAGED, INDEX, WANDB_ID, RunFolder, saved_steps
from ingot.runs.lock import LOCK, RunLock
from ingot.runs.state import read_state
from ingot.runtime.files import fsync_dir, replace_folder, writing
from ingot.runtime.tensors import TensorRecord
from ingot.train.resume import Progress, check_fits, facts_of

ASIDE = "earlier"
UNKNOWN = ".unknown"  # suffix of a ckpt.pt that may belong to another run
PARTS = (
    "state.json", CKPT, "checkpoints", "samples", "artifact", "config.yaml", "environment.json", "metrics.jsonl", "log.txt",
    "result.json", "wandb", "wandb.json",
)  # fmt: skip
Say = Callable[[str], None]
Gelu = Literal["tanh", "erf"]


@dataclass(frozen=True)
class Start:
    """A model and the progress of its run. `weights` is None for random ones; `ours` is our checkpoint that holds everything."""

    args: ModelArgs
    gelu: Gelu
    iteration: int = 0  # the next iteration
    weights: Mapping[str, TensorRecord] | None = None
    optimizer: Mapping[str, TensorRecord] = field(default_factory=dict)
    best_val_loss: float | None = None
    ours: Checkpoint | None = None
    missing: str = ""  # what nanoGPT's ckpt.pt does not hold, for a warning


def check_folder(out: Path) -> None:
    """Raise an error for an out_dir that is a file, is in use, or holds files that are not ours."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out_dir={out} is a file; give a folder")
    if not (out / CKPT).exists() and not saved_steps(out / "checkpoints"):  # files beside these are moved aside
        RunFolder(out).check_ownership([WANDB_ID])
    if (out / LOCK).exists():
        with RunLock(out):
            pass


def find_start(values: Mapping[str, Any], say: Say, warn: Say) -> Start:
    """Return what init_from names. Only damaged files are renamed, and with eval_only nothing is written."""
    name, out = values["init_from"], Path(values["out_dir"])
    if name == "scratch":
        vocab_size = vocabulary(data_path(values), values["tokenizer"], values["trust_tokens"])
        ids = f"vocab_size {vocab_size} of {data_path(values)}" if vocab_size else "GPT-2's 50,257 tokens, rounded up to 50,304"
        say(f"a new model from scratch, with {ids}")
        return Start(fresh_args(values, vocab_size), "erf")
    if name != "resume":
        weights, settings = read_pretrained(name)
        say(f"a model with the weights of {name}")
        return _fitted(Start(args_of(settings), settings["gelu"], weights=weights), values, name)
    ours = _own_checkpoint(out, warn, values["eval_only"])
    if ours is not None:
        say(f"resuming from {ours.path}")
        settings, tensors = ours.progress["config"]["model"], ours.tensors
        if settings["family"] != "gpt2":
            raise CheckpointError(f"{ours.path} is a model of the family {settings['family']}; continue it with: ingot train")
        settings = settings | sizes(tensors["model"])  # settings that `ingot train` fills in itself
        start = Start(args_of(settings), settings["gelu"], ours.step, tensors["model"], tensors["optimizer"], ours=ours)
        return _fitted(start, values, str(ours.path))
    ckpt = read_ckpt(out / CKPT)
    say(f"resuming from {ckpt.path} at iteration {ckpt.iter_num}")
    start = Start(args_of(ckpt.settings), ckpt.settings["gelu"], ckpt.iter_num, ckpt.weights, ckpt.optimizer, ckpt.best_val_loss)
    missing = f"{ckpt.path} does not hold {', '.join(ckpt.missing)}"
    return _fitted(replace(start, missing=missing), values, str(ckpt.path))


def settle_folder(values: Mapping[str, Any], start: Start, say: Say, warn: Say) -> tuple[ResolvedConfig, float]:
    """Prepare the folder so that the loop begins or resumes from `start`; return the config and the seconds trained before."""
    out, resolved = Path(values["out_dir"]), translate(values, start.args, start.gelu)
    data = resolved.config.data
    dataset = open_dataset(data.path, data.tokenizer, data.trust_tokens)
    check_dataset(dataset, values, start.args, warn)
    facts = facts_of(resolved.config, dataset)
    if start.ours is not None:
        try:
            check_fits(start.ours, facts)
            return resolved, float(start.ours.progress["elapsed_seconds"])
        except CannotContinue as error:
            changes = dict.fromkeys(change.render(key_name) for change in error.changes)  # two settings may have the same key
            warn(f"this is not an exact resume of {start.ours.path}: {'; '.join(changes)}")
    elif start.missing:
        warn(f"{start.missing}: the run continues, but not exactly as an uninterrupted one would")
    keep_ckpt = values["init_from"] == "resume"
    if start.weights is None:
        set_aside(out, say, keep_ckpt)
        return resolved, 0.0
    progress = _progress(resolved.config, dataset, start)
    tensors = {"model": list(start.weights.values()), "optimizer": list(start.optimizer.values())}
    folder = RunFolder(out).checkpoints
    record = {**asdict(progress), "choices": {}, **facts}
    with writing(folder):
        if _holds_run(out):
            with replace_folder(folder) as new:
                save_checkpoint(new, progress.step, tensors, record)
                set_aside(out, say, keep_ckpt)  # only now: if the disk is full, the old run is still in place
        else:
            folder.mkdir(parents=True, exist_ok=True)
            save_checkpoint(folder, progress.step, tensors, record)
    return resolved, progress.elapsed_seconds


def check_dataset(dataset: Dataset, values: Mapping[str, Any], args: ModelArgs, warn: Say) -> None:
    """Raise an error, in the words of the keys, for data that the run cannot use."""
    name, ids, tokens, val = values["dataset"], dataset.tokenizer.vocab_size, *(dataset.split(s).tokens for s in ("train", "val"))
    if ids > args.vocab_size:
        raise ConfigError(f"dataset={name} has a vocabulary of {ids:,} and the model one of {args.vocab_size:,}; they do not fit")
    if tokens <= args.block_size:
        raise DataError(f"dataset={name} has {tokens:,} tokens to train on, too few for rows of block_size={args.block_size:,}")
    if val < 2:
        raise DataError(f"dataset={name} has no val.bin, or an empty one; evaluations need it: prepare the data again")
    if val <= args.block_size:
        warn(f"dataset={name} has {val:,} tokens to evaluate on: one row, shorter than block_size={args.block_size:,}")


def set_aside(out: Path, say: Say, keep_ckpt: bool) -> Path | None:
    """Move the run in a folder into a numbered folder inside it; with `keep_ckpt`, a copy of its ckpt.pt stays."""
    if not _holds_run(out):
        return None
    with RunLock(out), writing(out):
        aside = next(path for number in count(1) if not (path := out / f"{ASIDE}-{number}").exists())
        aside.mkdir()
        for part in PARTS:
            if part == CKPT and keep_ckpt and (out / part).exists():
                _link(out / part, aside / part)
            elif (out / part).exists():
                (out / part).rename(aside / part)
        fsync_dir(out)
    say(f"the run that was in {out} is now in {aside}")
    return aside


def _holds_run(out: Path) -> bool:
    state = read_state(out)  # it also records checkpoints that were deleted
    return (out / CKPT).exists() or bool(saved_steps(out / "checkpoints")) or (state is not None and state.checkpoint is not None)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)  # ckpt.pt is only ever replaced, so the linked file does not change
    except OSError:  # some file systems have no hard links
        shutil.copy2(source, target)  # keeps the mtime, by which _was_kept recognises the file


def _own_checkpoint(out: Path, warn: Say, read_only: bool) -> Checkpoint | None:
    """Return our newest checkpoint in a folder; None if its ckpt.pt belongs to another run and was copied there."""
    if not saved_steps(out / "checkpoints"):
        if not (out / CKPT).exists():
            raise CheckpointError(f"init_from=resume: there is no {out / CKPT}; train one with --init_from=scratch first")
        return None
    newest = newest_valid(out / "checkpoints", warn, read_only)
    if newest is None or not (out / CKPT).exists() or _was_kept(out):
        return newest

    def ignore_ckpt(why: str, suffix: str) -> Checkpoint:
        kept = "" if read_only else f"it is kept as {_keep(out / CKPT, suffix)}, and "
        warn(f"{why}; {kept}{newest.path} is used instead")
        return newest

    try:
        state = read_ckpt(out / CKPT)
    except DamagedFile as error:
        return ignore_ckpt(str(error), DAMAGED)
    if state.checkpoint is None:
        return None
    try:
        named = newest if state.checkpoint.name == newest.path.name else load_checkpoint(state.checkpoint)
    except CheckpointError as error:
        return ignore_ckpt(f"{out / CKPT} may belong to another run ({error})", UNKNOWN)
    return newest if named.weights[POSITIONS].data == state.weights[POSITIONS].data else None


def _was_kept(out: Path) -> bool:
    """Return True if ckpt.pt is the copy that stayed when the earlier run was moved aside; it is not one to resume from."""

    def identity(path: Path) -> tuple[int, int]:
        return path.stat().st_size, path.stat().st_mtime_ns

    return any(identity(path) == identity(out / CKPT) for path in out.glob(f"{ASIDE}-*/{CKPT}"))


def _keep(path: Path, suffix: str) -> str:
    """Rename a file to an unused name with a suffix, and return the name."""
    names = (f"{path.name}{suffix}{f'-{number}' if number > 1 else ''}" for number in count(1))
    with writing(path):
        kept = next(name for name in names if not path.with_name(name).exists())
        path.rename(path.with_name(kept))
    return kept


def _fitted(start: Start, values: Mapping[str, Any], where: str) -> Start:
    """Return the start cropped to block_size, with its optimizer state, and with the given dropout."""
    own = start.args.block_size
    size = values["block_size"] or own
    if size > own:
        raise ConfigError(f"block_size={size} is more than the {own} positions of {where}; give --block_size={own}")
    weights, optimizer = (_crop(records, size) for records in (start.weights or {}, start.optimizer))
    return replace(
        start, args=replace(start.args, block_size=size, dropout=values["dropout"]), weights=weights, optimizer=optimizer
    )


def _crop(records: Mapping[str, TensorRecord], rows: int) -> dict[str, TensorRecord]:
    """Crop the position embedding, and the optimizer state that belongs to it, to its first rows."""

    def crop(record: TensorRecord) -> TensorRecord:
        if record.name.partition("/")[0] != POSITIONS or len(record.shape) != 2 or record.shape[0] <= rows:
            return record
        data = record.data.cast("B")
        return replace(record, shape=(rows, record.shape[1]), data=data[: len(data) // record.shape[0] * rows])

    return {name: crop(record) for name, record in records.items()}


def _progress(config: Config, dataset: Dataset, start: Start) -> Progress:
    """Return the loop's progress at the start's iteration, with the best score so far if it is known."""
    at = start.iteration
    p = Progress(step=at, sample=at * config.rows_per_step, tokens=at * config.training.tokens_per_step)
    if start.ours is not None:
        earlier, before = start.ours.progress, start.ours.progress["config"]
        p = replace(p, **{name: earlier[name] for name in ("tokens", "elapsed_seconds", "loss")})
        if (earlier["data_fingerprint"], before["data"]["seq_len"]) == (dataset.fingerprint, config.data.seq_len):
            p = replace(p, **{name: earlier[name] for name in ("best_bpb", "val_loss", "val_bpb")})
            p = replace(p, best_step=at if earlier["best_step"] == at else None, best_by=earlier.get("best_by", []))
    elif start.missing:
        p = replace(p, best_step=at)  # keeps it, and writes it as our ckpt.pt, which the next resume recognises
    if start.best_val_loss is not None and at:
        evaluator = Evaluator.of(config, dataset.split("val"), dataset.tokenizer)
        sizes = evaluator.score(evaluator.rows(config.evaluation.rows), lambda batch: 0.0)
        best = start.best_val_loss / math.log(2) * sizes.tokens / sizes.bytes
        p = replace(p, best_bpb=best, val_loss=start.best_val_loss, val_bpb=best)
    return p


# Models to sample from


def open_named(init_from: str, out_dir: Path, device: str, say: Say, warn: Say) -> LoadedModel:
    """Open what init_from and out_dir name: a ckpt.pt or its folder, a run folder, a checkpoint, an artifact, or GPT-2."""
    if init_from != "resume":
        say(f"loading weights from pretrained gpt: {init_from}")
        records, settings = read_pretrained(init_from)
        folder = pretrained_folder(init_from)
        tokenizer = find_tokenizer(folder, settings["vocab_size"])
        return open_model(foreign_weights(folder, records.values(), settings, tokenizer), tokenizer, device)
    if (out_dir / CKPT).is_file() or is_ckpt(out_dir):
        try:
            return open_ckpt(out_dir / CKPT if out_dir.is_dir() else out_dir, device, say)
        except DamagedFile as error:
            if (newest := newest_valid(out_dir / "checkpoints", warn, read_only=True)) is None:
                raise
            warn(f"{error}; {newest.path} is used instead")
            return load(newest.path, device=device)
    if not out_dir.is_file() and not (out_dir / "checkpoints").is_dir() and not (out_dir / INDEX).is_file():
        raise CheckpointError(f"there is no {out_dir / CKPT}; train first, or name its folder with --out_dir")
    return load(out_dir, device=device)


def open_ckpt(path: Path, device: str, say: Say, tokenizer: str | None = None) -> LoadedModel:
    """Open the model of a ckpt.pt, with its own tokenizer or the named one."""
    ckpt = read_ckpt(path)
    opened = ckpt_tokenizer(ckpt, say, tokenizer)
    return open_model(foreign_weights(path, ckpt.weights.values(), ckpt.settings, opened, scoring=ckpt.scoring), opened, device)


def ckpt_tokenizer(ckpt: Ckpt, say: Say, name: str | None = None) -> Tokenizer:
    """Return a ckpt.pt's tokenizer: the named one, its own, its dataset's, or GPT-2's if the vocabulary is large enough."""
    rows, dataset = ckpt.settings["vocab_size"], str(ckpt.config.get("dataset") or "")
    meta = Path("data") / dataset / META
    tokenizer: Tokenizer
    if name is not None:
        tokenizer = open_tokenizer(name)
    elif ckpt.tokenizer is not None:
        tokenizer = from_spec(ckpt.tokenizer)
    elif dataset and meta.is_file():
        say(f"Loading meta from {meta}...")
        characters = char_tokenizer(meta)
        if characters is None:
            raise DataError(f"{meta} does not list single characters in order, so text cannot be decoded with it")
        tokenizer = characters
    elif rows >= GPT2_VOCAB_SIZE:
        say("No meta.pkl found, assuming GPT-2 encodings...")
        tokenizer = GPT2Tokenizer()
    else:
        raise DataError(
            f"{ckpt.path} has a vocabulary of {rows:,}, smaller than GPT-2's, and its characters are not in {meta}; "
            "prepare its dataset again, and run in the folder that contains data/"
        )
    if tokenizer.vocab_size > rows:
        size = f"{tokenizer.vocab_size:,}"
        raise DataError(f"the {tokenizer.kind} tokenizer has {size} tokens and the model of {ckpt.path} only {rows:,}")
    return tokenizer
