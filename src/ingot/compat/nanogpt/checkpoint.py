"""Read and write nanoGPT's ckpt.pt, to exchange models with nanoGPT and its tools; find the state from which train.py starts.

A ckpt.pt lacks some of the state that an exact resume needs, so Ingot adds the key `ingot`, which names Ingot's checkpoint of the
same step. A ckpt.pt is always loaded with weights_only=True, so it cannot execute code.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from ingot.api import load
from ingot.artifact.hf_tokenizer import find_tokenizer
from ingot.artifact.huggingface import CONFIG, cached_model, fetch_model, read_model
from ingot.backends.torch.state import (
    DamagedFile,
    adamw_memory,
    adamw_state,
    check_fits,
    load_saved,
    shared_tensor,
    state_records,
)
from ingot.compat.nanogpt import CKPT, is_ckpt
from ingot.compat.nanogpt.keys import (
    MODEL_ARGS,
    PRECISIONS,
    TRAIN,
    Say,
    data_path,
    fresh_settings,
    key_name,
    nanogpt_keys,
    translate,
)
from ingot.compat.options import copied
from ingot.config.loading import ResolvedConfig
from ingot.config.schema import GPT2_VOCAB_SIZE, Config
from ingot.data.formats.nanogpt_folder import META, char_tokenizer
from ingot.data.loading.data_path import open_dataset
from ingot.data.store.dataset import Dataset
from ingot.data.tokenizers import GPT2Tokenizer, Tokenizer, from_spec, open_tokenizer
from ingot.errors import CannotContinue, CheckpointError, ConfigError, DataError
from ingot.eval.evaluator import evaluator_of
from ingot.inference.model import LoadedModel, foreign_weights, open_model, scoring_of
from ingot.model.gpt2 import GPT2
from ingot.model.settings import GPT2Settings
from ingot.runs.checkpoints import Checkpoint, load_checkpoint, newest_valid, save_checkpoint
from ingot.runs.folder import DAMAGED, RunFolder, saved_steps
from ingot.runs.state import RunLock, read_state
from ingot.runtime.files import fsync_dir, replace_file, replace_folder, user_path, writing
from ingot.runtime.tensors import TensorRecord
from ingot.train.resume import Progress, facts_of
from ingot.train.resume import check_fits as check_resume

OURS = "ingot"  # the key that Ingot adds to ckpt.pt
HEAD, EMBEDDING, POSITIONS = "lm_head.weight", "transformer.wte.weight", "transformer.wpe.weight"
NO_LOSS_YET = 1e9  # nanoGPT's best_val_loss before the first evaluation


@dataclass(frozen=True)
class Ckpt:
    """A model and its training state: a new one, or one read from a ckpt.pt, an Ingot checkpoint or GPT-2's files."""

    path: Path
    settings: dict[str, Any]  # the `model` section of the config
    weights: Mapping[str, TensorRecord] = field(default_factory=dict)  # empty: the model is initialised at random
    optimizer: Mapping[str, TensorRecord] = field(default_factory=dict)  # AdamW's state, keyed by `parameter/key`
    iter_num: int = 0  # the next iteration to train
    best_val_loss: float | None = None
    config: dict[str, Any] = field(default_factory=dict)  # values of nanoGPT's keys when the file was written
    tokenizer: dict[str, Any] | None = None  # the tokenizer's spec, if Ingot wrote the file
    scoring: dict[str, Any] = field(default_factory=dict)  # evaluation settings, if Ingot wrote the file
    checkpoint: Path | None = None  # Ingot's checkpoint of the same state, if it still exists
    missing: tuple[str, ...] = ()  # what an exact resume needs but the file lacks
    ours: Checkpoint | None = None  # the Ingot checkpoint from which this state was read, if any


def write_ckpt(path: Path, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Write an Ingot checkpoint as a ckpt.pt, atomically; `config` holds nanoGPT's 33 keys.

    As in nanoGPT, the file's `best_val_loss` is the validation loss of the last evaluation before the file was written.
    """
    progress = checkpoint.progress
    if progress["config"]["model"]["family"] != "gpt2":
        raise ConfigError(f"nanoGPT's {CKPT} holds models of the gpt2 family only; export this model with --format ingot")
    settings = {**progress["config"]["model"], **sizes(checkpoint.weights)}
    records = _in_order(checkpoint.weights, settings, str(checkpoint.path))
    weights = {name: shared_tensor(record) for name, record in records.items()}
    loss = progress.get("val_loss")
    folder = path.parent.resolve()
    inside = checkpoint.path.resolve().is_relative_to(folder)
    contents = {
        "model": {**weights, HEAD: weights[EMBEDDING]},
        "optimizer": adamw_state(
            *split_by_decay(weights),
            checkpoint.tensors.get("optimizer", {}),
            config["weight_decay"],
            lr=config["learning_rate"],
            betas=(config["beta1"], config["beta2"]),
            fused="cuda" in str(config.get("device")) or None,
        ),
        "model_args": {theirs: settings[ours] for theirs, ours in MODEL_ARGS.items()},
        "iter_num": checkpoint.step,
        "best_val_loss": torch.tensor(NO_LOSS_YET if loss is None else loss),
        "config": dict(config),
        OURS: {
            "version": 1,
            "checkpoint": os.path.relpath(checkpoint.path.resolve(), folder) if inside else None,
            "gelu": settings["gelu"],
            "tokenizer": progress.get("tokenizer"),
            "scoring": scoring_of(progress["config"]),
        },
    }
    try:
        with replace_file(path) as file:
            torch.save(contents, file)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError on a full disk
        raise CheckpointError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from None


def read_ckpt(path: Path) -> Ckpt:
    """Read a ckpt.pt that nanoGPT or Ingot wrote; raise CheckpointError if it is invalid."""
    contents = load_saved(path)
    if not isinstance(contents, dict) or not all(isinstance(contents.get(key), dict) for key in ("model", "model_args")):
        raise CheckpointError(f"{path} is not a nanoGPT checkpoint: it lacks the key model or model_args")
    ours, config = (contents[key] if isinstance(contents.get(key), dict) else {} for key in (OURS, "config"))
    weights = {
        name: weight
        for name, weight in state_records(contents["model"], path).items()
        if not name.endswith((".attn.bias", ".attn.masked_bias"))  # the causal mask, which older files contain
    }
    head = weights.pop(HEAD, None)
    if any(name not in weights or len(weights[name].shape) != 2 for name in (EMBEDDING, POSITIONS)):
        raise CheckpointError(f"{path} is not a nanoGPT model: it lacks {EMBEDDING} or {POSITIONS}")
    if head is not None and (head.shape, head.data) != (weights[EMBEDDING].shape, weights[EMBEDDING].data):
        raise CheckpointError(f"{path} has an untied output head; nanoGPT's models tie it to the token embedding")
    settings = _settings(contents["model_args"], weights, ours, path)
    weights = _in_order(weights, settings, str(path))
    iter_num, loss = contents.get("iter_num"), contents.get("best_val_loss")
    if type(iter_num) is not int or iter_num < 0:
        raise CheckpointError(f"{path}: iter_num is {iter_num!r:.60}, but must be a whole number >= 0")
    best = float(loss) if isinstance(loss, int | float) or (isinstance(loss, Tensor) and loss.numel() == 1) else math.inf
    memory, problem = adamw_memory(contents.get("optimizer"), [[list(group) for group in split_by_decay(weights)]], weights)
    missing = [f"the optimizer state ({problem})"] if problem else []
    missing += ["the order of the data", "the random states"]
    if config.get("dtype") == "float16":
        missing.append("the gradient scale")
    checkpoint = (path.parent / str(ours.get("checkpoint") or path)).resolve()
    named = checkpoint.is_dir() and path.parent.resolve() in checkpoint.parents
    return Ckpt(
        path=path,
        weights=weights,
        optimizer=memory,
        settings=settings,
        iter_num=iter_num,
        best_val_loss=best if math.isfinite(best) and best < NO_LOSS_YET else None,
        config={str(key): value for key, value in config.items() if isinstance(value, int | float | str | None)},
        tokenizer=ours["tokenizer"] if isinstance(ours.get("tokenizer"), dict) else None,
        scoring=ours["scoring"] if isinstance(ours.get("scoring"), dict) else {},
        checkpoint=checkpoint if named else None,
        missing=tuple(missing),
    )


def _settings(args: Mapping[Any, Any], weights: dict[str, TensorRecord], ours: Mapping[Any, Any], path: Path) -> dict[str, Any]:
    """Convert nanoGPT's model_args to the config's `model` section; raise CheckpointError if they do not match the weights."""
    settings: dict[str, Any] = {
        "family": "gpt2",
        "layers": args.get("n_layer"),
        "heads": args.get("n_head"),
        **sizes(weights),
        "dropout": args.get("dropout", 0.0),
        # nanoGPT's models use the erf GELU; Ingot's runs initialised from GPT-2 weights use the tanh approximation.
        "gelu": "tanh" if ours.get("gelu") == "tanh" else "erf",
    }
    for theirs, name in MODEL_ARGS.items():
        if args.get(theirs) not in (None, settings[name]):
            raise CheckpointError(f"{path}: {theirs} is {args[theirs]!r:.60}, but the tensors' shapes imply {settings[name]}")
    try:
        GPT2Settings(**settings)
    except ValidationError as error:
        wrong = error.errors()[0]
        key = next((theirs for theirs, name in MODEL_ARGS.items() if name in wrong["loc"]), "model_args")
        raise CheckpointError(f"{path}: {key}={args.get(key)!r:.60}: {wrong['msg']}") from None
    return settings


def meta_model(settings: Mapping[str, Any]) -> GPT2:
    """Build a model on the meta device from a config's `model` section, to count its parameters and check tensor shapes."""
    with torch.device("meta"):
        return GPT2(**{name: value for name, value in settings.items() if name != "family"})


def count_parameters(model: torch.nn.Module) -> int:
    """Return the parameter count without position embeddings, as nanoGPT reports it."""
    return sum(p.numel() for name, p in model.named_parameters() if name != POSITIONS)


def _in_order(weights: Mapping[str, TensorRecord], settings: Mapping[str, Any], where: str) -> dict[str, TensorRecord]:
    """Check the tensors' names and shapes; return the tensors in the parameter order of the model and the optimizer."""
    return {weight.name: weight for _, weight in check_fits(meta_model(settings), weights, where)}


def sizes(weights: Mapping[str, TensorRecord]) -> dict[str, Any]:
    """Return the model settings that the weights imply: vocab_size, width, context and bias."""
    (vocab_size, width), (context, _) = weights[EMBEDDING].shape, weights[POSITIONS].shape
    return {"vocab_size": vocab_size, "width": width, "context": context, "bias": "transformer.ln_f.bias" in weights}


def split_by_decay(parameters: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split parameters into those with and without weight decay, in the order of nanoGPT's optimizer state."""
    decay = {name: p for name, p in parameters.items() if len(p.shape) >= 2}
    return decay, {name: p for name, p in parameters.items() if name not in decay}


def group_lines(parameters: Mapping[str, Tensor]) -> list[str]:
    """Return nanoGPT's log lines about the two groups of its optimizer."""
    groups = zip(("decayed", "non-decayed"), split_by_decay(parameters), strict=True)
    return [
        f"num {words} parameter tensors: {len(group)}, with {sum(p.numel() for p in group.values()):,} parameters"
        for words, group in groups
    ]


def open_named(init_from: str, out_dir: Path, device: str, say: Say, warn: Say) -> LoadedModel:
    """Open the model selected by init_from and out_dir: a ckpt.pt or its folder, a run, a checkpoint, an artifact, or GPT-2."""
    if init_from != "resume":
        say(f"loading weights from pretrained gpt: {init_from}")
        ckpt = read_pretrained(init_from)
        tokenizer = find_tokenizer(ckpt.path, ckpt.settings["vocab_size"])
        return open_model(foreign_weights(ckpt.path, ckpt.weights.values(), ckpt.settings, tokenizer), tokenizer, device)
    path = out_dir / CKPT if (out_dir / CKPT).is_file() else out_dir
    if not path.exists():
        raise CheckpointError(f"there is no {out_dir / CKPT}; train a model first, or name the folder of its run with --out_dir")
    if not is_ckpt(path):
        return load(path, device=device)
    try:
        return open_ckpt(path, device, say)
    except DamagedFile as error:
        if (newest := newest_valid(path.parent / "checkpoints", warn, read_only=True)) is None:
            raise
        warn(f"{error}; {newest.path} is used instead")
        return load(newest.path, device=device)


def open_ckpt(path: Path, device: str, say: Say, tokenizer: str | None = None) -> LoadedModel:
    """Load the model in a ckpt.pt; `tokenizer`, if given, is used instead of the model's own tokenizer."""
    ckpt = read_ckpt(path)
    opened = ckpt_tokenizer(ckpt, say, tokenizer)
    return open_model(foreign_weights(path, ckpt.weights.values(), ckpt.settings, opened, scoring=ckpt.scoring), opened, device)


def ckpt_tokenizer(ckpt: Ckpt, say: Say, name: str | None = None) -> Tokenizer:
    """Return the tokenizer `name`, else the one in ckpt.pt, else that of its dataset, else GPT-2's; DataError if none fits."""
    rows = ckpt.settings["vocab_size"]
    meta = Path("data") / str(ckpt.config.get("dataset", "")) / META
    tokenizer: Tokenizer | None
    if name is not None:
        tokenizer = open_tokenizer(name)
    elif ckpt.tokenizer is not None:
        tokenizer = from_spec(ckpt.tokenizer)
    elif meta.is_file():
        say(f"Loading meta from {meta}...")
        tokenizer = char_tokenizer(meta)
        if tokenizer is None:
            raise DataError(f"{meta} does not list single characters in sorted order, so it cannot be used to decode tokens")
    elif rows >= GPT2_VOCAB_SIZE:
        say("No meta.pkl found, assuming GPT-2 encodings...")
        tokenizer = GPT2Tokenizer()
    else:
        raise DataError(
            f"{ckpt.path} has a vocabulary of {rows:,}, smaller than GPT-2's, and there is no {meta} to list its characters; "
            "prepare its dataset again, and run this command in the folder that contains data/"
        )
    if tokenizer.vocab_size > rows:
        raise DataError(f"the tokenizer has {tokenizer.vocab_size:,} tokens, but the model in {ckpt.path} has only {rows:,}")
    return tokenizer


def keys_of(config: Config) -> dict[str, Any]:
    """Translate a config to train.py's 33 keys; keys without a matching setting get their defaults."""
    c, t, o = config, config.training, config.optimizer
    keys = {name: TRAIN[name].default for name in nanogpt_keys(TRAIN)}
    for name, path in copied(TRAIN).items():
        section, _, field = path.partition(".")
        value = getattr(getattr(c, section), field, None)  # None if the model family lacks it; write_ckpt rejects such models
        if name in keys and value not in (None, "auto"):
            keys[name] = float(value) if TRAIN[name].kind == "float" else value
    rows = c.rows_per_step
    micro_batch = rows if t.micro_batch == "auto" else min(t.micro_batch, rows)
    steps = t.max_steps or 1
    names = {precision: dtype for dtype, precision in PRECISIONS.items()}
    return keys | {
        "dataset": Path(c.data.path).name,
        "batch_size": micro_batch,
        "gradient_accumulation_steps": -(-rows // micro_batch),
        "max_iters": steps - 1,
        "decay_lr": o.schedule != "constant",
        "lr_decay_iters": o.decay_steps or steps,
        "min_lr": o.learning_rate * o.floor,
        "dtype": names.get(t.precision, "bfloat16"),
    }


# GPT-2 weights

SIZES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
OWNER = "openai-community"  # owner of GPT-2 on the Hugging Face hub; older caches store GPT-2 without an owner


def read_pretrained(name: str) -> Ckpt:
    """Read GPT-2's weights from a local folder or, given a name such as gpt2-medium, from the Hugging Face hub or its cache."""
    folder = user_path(name)
    if not (folder / CONFIG).is_file():
        if name not in SIZES:
            known = f"{', '.join(SIZES)}, or a folder with {CONFIG} (init_from can also be resume or, in train.py, scratch)"
            raise ConfigError(f"unknown weights {name!r}; give {known}")
        folder = cached_model(f"{OWNER}/{name}") or cached_model(name) or fetch_model(f"{OWNER}/{name}")
    records, settings = read_model(folder, ("gpt2",))
    return Ckpt(folder, settings, {record.name: record for record in records})


# train.py starts from random weights, GPT-2's weights, a ckpt.pt or an Ingot checkpoint.
# Training resumes exactly from an Ingot checkpoint, unless a setting that affects training has changed.
# In all other cases, the starting weights are first saved as an Ingot checkpoint in the run folder; old files are moved aside.

PARTS = (
    "state.json", "checkpoints", "samples", "artifact", "config.yaml", "environment.json", "metrics.jsonl", "log.txt",
    "result.json", "wandb", "wandb.json",
)  # fmt: skip


def find_start(values: Mapping[str, Any], say: Say, warn: Say) -> Ckpt:
    """Return the model state selected by init_from, cropped to block_size; if eval_only is set, do not modify any files."""
    name, out = values["init_from"], Path(values["out_dir"])
    if name == "scratch":
        tokenizer = open_dataset(str(data_path(values)), values["tokenizer"], values["trust_tokens"]).tokenizer
        vocab_size = None if tokenizer.kind == "gpt2" else tokenizer.vocab_size
        ids = f"vocab_size {vocab_size} of {data_path(values)}" if vocab_size else "GPT-2's 50,257 tokens, padded to 50,304"
        say(f"starting a new model from scratch, with {ids}")
        return Ckpt(out, fresh_settings(values, vocab_size))
    if name != "resume":
        start = read_pretrained(name)
        say(f"starting from the weights of {name}")
    else:
        start = _resumed(out, warn, values["eval_only"])
        say(f"resuming from {start.path}" + ("" if start.ours else f" at iteration {start.iter_num}"))
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


def _resumed(out: Path, warn: Say, read_only: bool) -> Ckpt:
    """Return the newest Ingot checkpoint in a folder, or ckpt.pt if its weights match none of the folder's Ingot checkpoints."""
    path, newest = out / CKPT, None
    if saved_steps(out / "checkpoints"):
        newest = newest_valid(out / "checkpoints", warn, read_only)
    elif not path.exists():
        raise CheckpointError(f"init_from=resume: there is no {path}; train a model with --init_from=scratch first")
    if newest is None or path.exists():
        try:
            ckpt = read_ckpt(path)
            if newest is None or ckpt.checkpoint is None:
                return ckpt
            named = newest if ckpt.checkpoint.name == newest.path.name else load_checkpoint(ckpt.checkpoint)
            if named.weights[POSITIONS].data != ckpt.weights[POSITIONS].data:
                return ckpt
        except DamagedFile as error:
            if newest is None:
                raise
            warn(f"{error}; {newest.path} is used instead")
            if not read_only:
                path.replace(out / f"{CKPT}{DAMAGED}")
    settings = newest.progress["config"]["model"]
    if settings["family"] != "gpt2":
        raise CheckpointError(f"{newest.path} holds a model of the family {settings['family']}; resume its run with: ingot train")
    settings = settings | sizes(newest.weights)  # a config of `ingot train` may leave these sizes unset
    return Ckpt(newest.path, settings, newest.weights, newest.tensors["optimizer"], newest.step, ours=newest)


def settle_folder(values: Mapping[str, Any], start: Ckpt, say: Say, warn: Say) -> ResolvedConfig:
    """Prepare the run folder so that training begins or resumes from `start`; return the config."""
    out, resolved = Path(values["out_dir"]), translate(values, start.settings)
    dataset = open_fitting(resolved.config, values)
    facts = facts_of(resolved.config, dataset)
    if start.ours is not None:
        try:
            check_resume(start.ours, facts)
            return resolved
        except CannotContinue as error:
            changes = dict.fromkeys(change.render(key_name) for change in error.changes)  # several settings can share a key
            warn(f"this is not an exact resume of {start.ours.path}: {'; '.join(changes)}")
    elif start.missing:
        missing = ", ".join(start.missing)
        warn(f"{start.path} lacks {missing}: training continues, but will not exactly match an uninterrupted run")
    if not start.weights:
        move_aside(out, (*PARTS, CKPT), say)
        return resolved
    # The progress at the starting iteration, with the best validation loss so far if it is recorded.
    config, at = resolved.config, start.iter_num
    p = Progress(step=at, sample=at * config.rows_per_step, tokens=at * config.training.tokens_per_step)
    if start.ours is not None:
        earlier, before = start.ours.progress, start.ours.progress["config"]
        p = replace(p, **{name: earlier[name] for name in ("tokens", "elapsed_seconds", "loss")})
        if (earlier["data_fingerprint"], before["data"]["seq_len"]) == (dataset.fingerprint, config.data.seq_len):
            p = replace(p, **{name: earlier[name] for name in ("best_bpb", "val_loss", "val_bpb")})
            p = replace(p, best_step=at if earlier["best_step"] == at else None, best_by=earlier.get("best_by", []))
    elif start.missing:
        p = replace(p, best_step=at)  # marked as the best, so that the checkpoint is kept and also written as ckpt.pt
    if start.best_val_loss is not None and at:
        evaluator = evaluator_of(config, dataset, "val")
        evaluated = evaluator.score(evaluator.rows(config.evaluation.rows), lambda batch: 0.0)
        best = start.best_val_loss / math.log(2) * evaluated.tokens / evaluated.bytes
        p = replace(p, best_bpb=best, val_loss=start.best_val_loss, val_bpb=best)
    tensors = {"model": list(start.weights.values()), "optimizer": list(start.optimizer.values())}
    folder = RunFolder(out).checkpoints
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replace_folder(folder) as new:
            save_checkpoint(new, p.step, tensors, {**asdict(p), "choices": {}, **facts})
            aside = move_aside(out, PARTS, say)  # done last, so that the old run stays in place if the disk is full
        if aside is not None and (out / CKPT).exists():  # moved last, so a resume finds it if the process is killed earlier
            (out / CKPT).rename(aside / CKPT)
    return resolved


def open_fitting(config: Config, values: Mapping[str, Any]) -> Dataset:
    """Open the dataset; raise an error if its vocabulary is larger than the model's or if it has no validation data."""
    dataset = open_dataset(config.data.path, config.data.tokenizer, config.data.trust_tokens)
    tokens, rows = dataset.tokenizer.vocab_size, config.model.vocab_size or 0
    if tokens > rows:
        name = values["dataset"]
        raise ConfigError(f"dataset={name} has a vocabulary of {tokens:,}, which is more than the model's {rows:,}")
    if dataset.split("val").tokens < 2:
        raise DataError(
            f"dataset={values['dataset']} has no validation data: val.bin is missing or empty; prepare the data again"
        )
    return dataset


def move_aside(out: Path, parts: Sequence[str], say: Say) -> Path | None:
    """Move the run in a folder to a numbered subfolder and return the subfolder; return None if there is no run."""
    state = read_state(out)  # state.json names the newest checkpoint even if the checkpoint was deleted
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
