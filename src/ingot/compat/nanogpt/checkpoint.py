"""nanoGPT's ckpt.pt, written so that nanoGPT and other tools read it, and read from whoever wrote it; also GPT-2 weights.

Exact resume never relies on ckpt.pt. Its key `ingot`, which nanoGPT does not have, names our checkpoint of the same state. The
file is only opened with torch's weights_only, so nothing in it can run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ingot.artifact.huggingface import CONFIG, cached_model, fetch_model, read_model
from ingot.backends.torch.state import adamw_memory, adamw_state, check_fits, load_saved, shared_tensor, state_records
from ingot.compat.nanogpt.keys import PRECISIONS, TRAIN, nanogpt_keys
from ingot.compat.nanogpt.translate import args_of
from ingot.compat.options import copied
from ingot.config.schema import Config
from ingot.errors import CheckpointError, ConfigError
from ingot.inference.model import Weights, as_checkpoint, scoring_of
from ingot.model.gpt2 import GPT2
from ingot.runs.checkpoints import Checkpoint
from ingot.runtime.files import replace_file, user_path
from ingot.runtime.tensors import TensorRecord

CKPT = "ckpt.pt"
OURS = "ingot"  # our key, which nanoGPT does not have
HEAD, EMBEDDING, POSITIONS = "lm_head.weight", "transformer.wte.weight", "transformer.wpe.weight"
NO_LOSS_YET = 1e9  # nanoGPT's initial best_val_loss


@dataclass(frozen=True)
class Ckpt:
    """The contents of a ckpt.pt by our names; `missing` names what a resumed run cannot take from it."""

    path: Path
    weights: dict[str, TensorRecord]
    optimizer: dict[str, TensorRecord]  # AdamW state by `parameter/key`
    settings: dict[str, Any]  # the `model` section
    iter_num: int
    best_val_loss: float | None
    config: dict[str, Any]  # nanoGPT's keys when it was written
    tokenizer: dict[str, Any] | None  # the tokenizer's spec, if we wrote the file
    scoring: dict[str, Any]  # how the model was scored, if we wrote the file
    checkpoint: Path | None  # our checkpoint of the same state, if it still exists
    missing: tuple[str, ...]


def write_ckpt(path: Path, checkpoint: Checkpoint, config: Mapping[str, Any], best_val_loss: float | None = None) -> None:
    """Write our checkpoint as a ckpt.pt, atomically; `config` are nanoGPT's 33 keys.

    Without a best_val_loss, the loss of the last evaluation is written.
    """
    progress = checkpoint.progress
    section = progress["config"]["model"]
    if section["family"] != "gpt2":
        raise ConfigError(f"nanoGPT's {CKPT} cannot hold {section['family']} models; export it with --format ingot")
    settings = {**section, **sizes(checkpoint.weights)}
    weights = {
        name: shared_tensor(record) for name, record in _in_order(checkpoint.weights, settings, str(checkpoint.path)).items()
    }
    loss = best_val_loss if best_val_loss is not None else progress.get("val_loss")
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
        "model_args": asdict(args_of(settings)),
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
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a full disk
        raise CheckpointError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from None


def read_ckpt(path: Path) -> Ckpt:
    """Read a ckpt.pt that nanoGPT or we wrote; CheckpointError says what is wrong with it."""
    contents = load_saved(path)
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path} is not a checkpoint of nanoGPT: it holds no dictionary")
    model, args = contents.get("model"), contents.get("model_args")
    if not isinstance(model, dict) or not isinstance(args, dict):
        raise CheckpointError(f"{path} is not a checkpoint of nanoGPT: it has no model and model_args")
    ours = contents[OURS] if isinstance(contents.get(OURS), dict) else {}
    weights = _weights(model, path)
    settings = _settings(args, weights, ours, path)
    weights = _in_order(weights, settings, str(path))
    config = contents["config"] if isinstance(contents.get("config"), dict) else {}
    iter_num, loss = contents.get("iter_num"), contents.get("best_val_loss")
    if type(iter_num) is not int or iter_num < 0:
        raise CheckpointError(f"{path}: iter_num is {iter_num!r:.60}, but must be a number of iterations")
    best = float(loss) if isinstance(loss, int | float) or (isinstance(loss, Tensor) and loss.numel() == 1) else None
    memory, problem = adamw_memory(contents.get("optimizer"), _orders(weights), weights)
    missing = [f"the optimizer state ({problem})"] if problem else []
    missing += ["the order of the data", "the random numbers"]
    if config.get("dtype") == "float16":
        missing.append("the scale of the gradients")
    return Ckpt(
        path=path,
        weights=weights,
        optimizer=memory,
        settings=settings,
        iter_num=iter_num,
        best_val_loss=best if best is not None and math.isfinite(best) and best < NO_LOSS_YET else None,
        config={str(key): value for key, value in config.items() if isinstance(value, int | float | str | None)},
        tokenizer=ours["tokenizer"] if isinstance(ours.get("tokenizer"), dict) else None,
        scoring=ours["scoring"] if isinstance(ours.get("scoring"), dict) else {},
        checkpoint=_named_checkpoint(path, ours.get("checkpoint")),
        missing=tuple(missing),
    )


def _weights(model: Mapping[Any, Any], path: Path) -> dict[str, TensorRecord]:
    """Return the tensors of a state dict without prefixes, masks and the head, which must be tied to the embedding."""
    weights = {
        name: record
        for name, record in state_records(model, path).items()
        if not name.endswith((".attn.bias", ".attn.masked_bias"))  # the causal mask in older files
    }
    head = weights.pop(HEAD, None)
    if any(name not in weights or len(weights[name].shape) != 2 for name in (EMBEDDING, POSITIONS)):
        raise CheckpointError(f"{path} has no {EMBEDDING} and {POSITIONS}; it is not one of nanoGPT's models")
    if head is not None and not (head.shape == weights[EMBEDDING].shape and _equal(head, weights[EMBEDDING])):
        raise CheckpointError(f"{path} has an untied output head; nanoGPT's models tie it to the token embedding")
    return weights


def _equal(first: TensorRecord, second: TensorRecord) -> bool:
    a, b = shared_tensor(first), shared_tensor(second)
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _settings(args: Mapping[Any, Any], weights: dict[str, TensorRecord], ours: Mapping[Any, Any], path: Path) -> dict[str, Any]:
    """Return the `model` section of model_args, checked against the tensors before a model is built."""
    settings: dict[str, Any] = {"family": "gpt2", **sizes(weights)}
    for name, value in (("layers", args.get("n_layer")), ("heads", args.get("n_head"))):
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{path}: n_{name.removesuffix('s')} is {value!r:.60}, but must be 1 or more")
        settings[name] = value
    theirs = {"width": "n_embd", "context": "block_size", "vocab_size": "vocab_size", "bias": "bias"}
    for ours_name, key in theirs.items():
        if args.get(key) not in (None, settings[ours_name]):
            raise CheckpointError(f"{path}: {key} is {args[key]!r:.60}, but its tensors say {settings[ours_name]}")
    dropout = args.get("dropout", 0.0)
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise CheckpointError(f"{path}: dropout is {dropout!r:.60}, but must be >= 0 and < 1")
    if settings["layers"] > len(weights) or settings["width"] % settings["heads"]:
        raise CheckpointError(f"{path}: n_layer or n_head does not fit its tensors; the file is damaged")
    # nanoGPT's models use the erf GELU; runs of ours that began with GPT-2 weights use the tanh form.
    settings |= {"dropout": float(dropout), "gelu": "tanh" if ours.get("gelu") == "tanh" else "erf"}
    return settings


def _in_order(weights: Mapping[str, TensorRecord], settings: Mapping[str, Any], where: str) -> dict[str, TensorRecord]:
    """Return the tensors in the order of the model's parameters, which is the optimizer's; each must exist and fit."""
    with torch.device("meta"):
        model = GPT2(**{name: value for name, value in settings.items() if name != "family"})
    return {record.name: record for _, record in check_fits(model, weights, where)}


def sizes(weights: Mapping[str, TensorRecord]) -> dict[str, Any]:
    """Return the model settings that follow from the weights' shapes."""
    (vocab_size, width), (context, _) = weights[EMBEDDING].shape, weights[POSITIONS].shape
    return {"vocab_size": vocab_size, "width": width, "context": context, "bias": "transformer.ln_f.bias" in weights}


def _orders(weights: Mapping[str, Any]) -> Iterable[list[list[str]]]:
    """Yield the parameter names of the optimizer's groups: nanoGPT's order, and its order before 2023-06."""
    yield [list(group) for group in split_by_decay(weights)]
    matrices = sorted(name for name, value in weights.items() if len(value.shape) == 2 and name not in (EMBEDDING, POSITIONS))
    yield [matrices, sorted(weights.keys() - set(matrices))]


def _named_checkpoint(path: Path, name: Any) -> Path | None:
    """Return our checkpoint that a ckpt.pt names, if it lies in the same folder."""
    if not isinstance(name, str):
        return None
    folder = (path.parent / name).resolve()
    return folder if folder.is_relative_to(path.parent.resolve()) and folder.is_dir() else None


# `ingot export --format nanogpt`


def export_ckpt(source: Weights, path: Path) -> int:
    """Write any model of the gpt2 family as a ckpt.pt and return its size in bytes."""
    write_ckpt(path, as_checkpoint(source), keys_of(source.config))
    return path.stat().st_size


def keys_of(config: Config) -> dict[str, Any]:
    """Return the 33 keys of train.py for a config; keys that it says nothing about have their defaults."""
    c, t, o = config, config.training, config.optimizer
    keys = {name: TRAIN[name].default for name in nanogpt_keys(TRAIN)}
    for name, path in copied(TRAIN).items():
        section, _, field = path.partition(".")
        value = getattr(getattr(c, section), field, None)  # a family without such a setting is refused by write_ckpt
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
OWNER = "openai-community"  # owner of GPT-2 on the Hub; older caches store the models without an owner


def read_pretrained(name: str) -> tuple[dict[str, TensorRecord], dict[str, Any]]:
    """Return the weights of a GPT-2 size or of a folder, and their `model` section, with GPT-2's tanh GELU."""
    records, settings = read_model(pretrained_folder(name), ("gpt2",))
    return {record.name: record for record in records}, settings


def pretrained_folder(name: str) -> Path:
    """Return the folder of the weights: the given one, or one in the Hub's cache, downloaded if needed."""
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


def split_by_decay(parameters: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split parameters into those with weight decay and those without, in the order of nanoGPT's optimizer state."""
    decay = {name: p for name, p in parameters.items() if len(p.shape) >= 2}
    return decay, {name: p for name, p in parameters.items() if name not in decay}
