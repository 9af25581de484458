"""Write nanoGPT's ckpt.pt so that nanoGPT and other tools can read it; read it whoever wrote it; read GPT-2 weights.

Exact resume never relies on ckpt.pt. Its extra key `ingot` points to our checkpoint of the same state. The file is only loaded
with weights_only=True, so it cannot execute code.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
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
from ingot.compat.nanogpt.keys import PRECISIONS, TRAIN, nanogpt_keys
from ingot.compat.nanogpt.translate import MODEL_ARGS
from ingot.compat.options import copied
from ingot.config.schema import GPT2_VOCAB_SIZE, Config
from ingot.data.formats.nanogpt_folder import META, char_tokenizer
from ingot.data.tokenizers import GPT2Tokenizer, Tokenizer, from_spec, open_tokenizer
from ingot.errors import CheckpointError, ConfigError, DataError
from ingot.inference.model import LoadedModel, foreign_weights, open_model, scoring_of
from ingot.model.gpt2 import GPT2
from ingot.model.settings import GPT2Settings
from ingot.runs.checkpoints import Checkpoint, newest_valid
from ingot.runs.folder import INDEX
from ingot.runtime.files import replace_file, user_path
from ingot.runtime.tensors import TensorRecord

OURS = "ingot"  # our extra key in ckpt.pt
HEAD, EMBEDDING, POSITIONS = "lm_head.weight", "transformer.wte.weight", "transformer.wpe.weight"
NO_LOSS_YET = 1e9  # initial best_val_loss in nanoGPT
Say = Callable[[str], None]


@dataclass(frozen=True)
class Ckpt:
    """A model and the state of its training: the contents of a ckpt.pt under our names, or another state to train from."""

    path: Path
    settings: dict[str, Any]  # the section `model`
    weights: Mapping[str, TensorRecord] = field(default_factory=dict)  # empty: random initialisation
    optimizer: Mapping[str, TensorRecord] = field(default_factory=dict)  # AdamW state by `parameter/key`
    iter_num: int = 0  # the next iteration to train
    best_val_loss: float | None = None
    config: dict[str, Any] = field(default_factory=dict)  # nanoGPT's keys at the time of writing
    tokenizer: dict[str, Any] | None = None  # the tokenizer's spec, if we wrote the file
    scoring: dict[str, Any] = field(default_factory=dict)  # evaluation settings, if we wrote the file
    checkpoint: Path | None = None  # our checkpoint of the same state, if it still exists
    missing: tuple[str, ...] = ()  # state that the file lacks for an exact resume
    ours: Checkpoint | None = None  # the checkpoint of ours that this was read from


def write_ckpt(path: Path, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Write our checkpoint as a ckpt.pt, atomically; `config` holds nanoGPT's 33 keys.

    best_val_loss is the loss of the last evaluation, as in nanoGPT: nanoGPT writes a file if that loss was the best, or with
    always_save_checkpoint, which overwrites the best loss too.
    """
    progress = checkpoint.progress
    if progress["config"]["model"]["family"] != "gpt2":
        raise ConfigError(f"nanoGPT's {CKPT} holds models of the gpt2 family only; export this one with --format ingot")
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
        raise CheckpointError(f"{path} is not a checkpoint of nanoGPT: it has no model and model_args")
    ours, config = (contents[key] if isinstance(contents.get(key), dict) else {} for key in (OURS, "config"))
    weights = {
        name: weight
        for name, weight in state_records(contents["model"], path).items()
        if not name.endswith((".attn.bias", ".attn.masked_bias"))  # the causal mask, a buffer in older files
    }
    head = weights.pop(HEAD, None)
    if any(name not in weights or len(weights[name].shape) != 2 for name in (EMBEDDING, POSITIONS)):
        raise CheckpointError(f"{path} has no {EMBEDDING} and {POSITIONS}; it is not one of nanoGPT's models")
    embedding = weights[EMBEDDING]
    if head is not None and not (
        head.shape == embedding.shape and torch.allclose(shared_tensor(head), shared_tensor(embedding), 0, 0, equal_nan=True)
    ):
        raise CheckpointError(f"{path} has an untied output head; nanoGPT's models tie it to the token embedding")
    settings = _settings(contents["model_args"], weights, ours, path)
    weights = _in_order(weights, settings, str(path))
    iter_num, loss = contents.get("iter_num"), contents.get("best_val_loss")
    if type(iter_num) is not int or iter_num < 0:
        raise CheckpointError(f"{path}: iter_num is {iter_num!r:.60}, but must be a number of iterations")
    best = float(loss) if isinstance(loss, int | float) or (isinstance(loss, Tensor) and loss.numel() == 1) else math.inf
    memory, problem = adamw_memory(contents.get("optimizer"), _orders(weights), weights)
    missing = [f"the optimizer state ({problem})"] if problem else []
    missing += ["the order of the data", "the random numbers"]
    if config.get("dtype") == "float16":
        missing.append("the scale of the gradients")
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
    """Return the section `model` for nanoGPT's model_args, checked against the tensor shapes before a model is built."""
    settings: dict[str, Any] = {
        "family": "gpt2",
        "layers": args.get("n_layer"),
        "heads": args.get("n_head"),
        **sizes(weights),
        "dropout": args.get("dropout", 0.0),
        # nanoGPT's models use the erf GELU; our runs that were initialised from GPT-2 weights use the tanh approximation.
        "gelu": "tanh" if ours.get("gelu") == "tanh" else "erf",
    }
    for theirs, name in MODEL_ARGS.items():
        if args.get(theirs) not in (None, settings[name]):
            raise CheckpointError(f"{path}: {theirs} is {args[theirs]!r:.60}, but its tensors say {settings[name]}")
    try:
        GPT2Settings(**settings)
    except ValidationError as error:
        wrong = error.errors()[0]
        key = next((theirs for theirs, name in MODEL_ARGS.items() if name in wrong["loc"]), "model_args")
        raise CheckpointError(f"{path}: {key}={args.get(key)!r:.60}: {wrong['msg']}") from None
    return settings


def meta_model(settings: Mapping[str, Any]) -> GPT2:
    """Build the model of a section `model` on the meta device, to count parameters and check shapes."""
    with torch.device("meta"):
        return GPT2(**{name: value for name, value in settings.items() if name != "family"})


def count_parameters(model: torch.nn.Module) -> int:
    """Return the parameter count as nanoGPT reports it, without position embeddings."""
    return sum(p.numel() for name, p in model.named_parameters() if name != POSITIONS)


def _in_order(weights: Mapping[str, TensorRecord], settings: Mapping[str, Any], where: str) -> dict[str, TensorRecord]:
    """Return the tensors in the model's parameter order, which the optimizer state follows; check names and shapes."""
    return {weight.name: weight for _, weight in check_fits(meta_model(settings), weights, where)}


def sizes(weights: Mapping[str, TensorRecord]) -> dict[str, Any]:
    """Infer model settings from the weights' shapes."""
    (vocab_size, width), (context, _) = weights[EMBEDDING].shape, weights[POSITIONS].shape
    return {"vocab_size": vocab_size, "width": width, "context": context, "bias": "transformer.ln_f.bias" in weights}


def _orders(weights: Mapping[str, Any]) -> Iterable[list[list[str]]]:
    """Yield the possible parameter orders of the optimizer's groups: nanoGPT's, and nanoGPT's before 2023-06."""
    yield [list(group) for group in split_by_decay(weights)]
    matrices = sorted(name for name, value in weights.items() if len(value.shape) == 2 and name not in (EMBEDDING, POSITIONS))
    yield [matrices, sorted(weights.keys() - set(matrices))]


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


# Loading models to sample from


def open_named(init_from: str, out_dir: Path, device: str, say: Say, warn: Say) -> LoadedModel:
    """Open the model selected by init_from and out_dir: a ckpt.pt or its folder, a run, a checkpoint, an artifact, or GPT-2."""
    if init_from != "resume":
        say(f"loading weights from pretrained gpt: {init_from}")
        records, settings = read_pretrained(init_from)
        folder = pretrained_folder(init_from)
        tokenizer = find_tokenizer(folder, settings["vocab_size"])
        return open_model(foreign_weights(folder, records.values(), settings, tokenizer), tokenizer, device)
    if is_ckpt(out_dir):
        return open_ckpt(out_dir, device, say)
    if (out_dir / CKPT).is_file():
        try:
            return open_ckpt(out_dir / CKPT, device, say)
        except DamagedFile as error:
            if (newest := newest_valid(out_dir / "checkpoints", warn, read_only=True)) is None:
                raise
            warn(f"{error}; {newest.path} is used instead")
            return load(newest.path, device=device)
    if not out_dir.is_file() and not (out_dir / "checkpoints").is_dir() and not (out_dir / INDEX).is_file():
        raise CheckpointError(f"there is no {out_dir / CKPT}; train first, or name its folder with --out_dir")
    return load(out_dir, device=device)


def open_ckpt(path: Path, device: str, say: Say, tokenizer: str | None = None) -> LoadedModel:
    """Load the model in a ckpt.pt, with its own tokenizer or the named one."""
    ckpt = read_ckpt(path)
    opened = ckpt_tokenizer(ckpt, say, tokenizer)
    return open_model(foreign_weights(path, ckpt.weights.values(), ckpt.settings, opened, scoring=ckpt.scoring), opened, device)


def ckpt_tokenizer(ckpt: Ckpt, say: Say, name: str | None = None) -> Tokenizer:
    """Return the tokenizer for a ckpt.pt: the named one, its own, its dataset's, or GPT-2's if the vocabulary is large enough."""
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
            raise DataError(f"{meta} does not list single characters in order, so text cannot be decoded with it")
    elif rows >= GPT2_VOCAB_SIZE:
        say("No meta.pkl found, assuming GPT-2 encodings...")
        tokenizer = GPT2Tokenizer()
    else:
        raise DataError(
            f"{ckpt.path} has a vocabulary of {rows:,}, smaller than GPT-2's, and its characters are not in {meta}; "
            "prepare its dataset again, and run in the folder that contains data/"
        )
    if tokenizer.vocab_size > rows:
        raise DataError(f"the tokenizer has {tokenizer.vocab_size:,} tokens and the model of {ckpt.path} only {rows:,}")
    return tokenizer


# `ingot export --format nanogpt`


def keys_of(config: Config) -> dict[str, Any]:
    """Return train.py's 33 keys for a config; keys without a matching setting keep their defaults."""
    c, t, o = config, config.training, config.optimizer
    keys = {name: TRAIN[name].default for name in nanogpt_keys(TRAIN)}
    for name, path in copied(TRAIN).items():
        section, _, field = path.partition(".")
        value = getattr(getattr(c, section), field, None)  # write_ckpt rejects other families
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
OWNER = "openai-community"  # current owner on the Hub; older caches store GPT-2 without an owner


def read_pretrained(name: str) -> tuple[dict[str, TensorRecord], dict[str, Any]]:
    """Return the weights of a GPT-2 size or local folder, and the section `model` for them, with GPT-2's tanh GELU."""
    records, settings = read_model(pretrained_folder(name), ("gpt2",))
    return {record.name: record for record in records}, settings


def pretrained_folder(name: str) -> Path:
    """Return the folder of GPT-2 weights: a local one, or one in the Hub's cache, downloaded if needed."""
    folder = user_path(name)
    if (folder / CONFIG).is_file():
        return folder
    if name in SIZES:
        return cached_model(f"{OWNER}/{name}") or cached_model(name) or fetch_model(f"{OWNER}/{name}")
    if folder.is_dir() or "/" in name:
        raise ConfigError(f"there is no {folder / CONFIG}; give a folder with GPT-2 weights, or one of {', '.join(SIZES)}")
    raise ConfigError(
        f"unknown weights {name!r}; give {', '.join(SIZES)}, or a folder with GPT-2 weights (or resume, and in train.py scratch)"
    )
