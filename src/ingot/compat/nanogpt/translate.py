"""Translate the keys of train.py to one Config.

nanoGPT counts iterations from 0 up to and including max_iters, so a run has max_iters + 1 steps. It evaluates before iteration N,
which is after N steps of our loop. gradient_accumulation_steps is the total over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ingot.backends.open import find_device
from ingot.compat.nanogpt.keys import PRECISIONS, TRAIN, Arguments, nanogpt_keys
from ingot.compat.options import copied
from ingot.config.loading import ResolvedConfig, load_config
from ingot.config.schema import GPT2_PADDED_VOCAB_SIZE
from ingot.errors import ConfigError, DataError
from ingot.runtime.devices import Device
from ingot.runtime.files import user_path

SEED = 1337
# nanoGPT's model_args, in its order, mapped to our names in the section `model`.
MODEL_ARGS = {
    "n_layer": "layers", "n_head": "heads", "n_embd": "width", "block_size": "context", "bias": "bias",
    "vocab_size": "vocab_size", "dropout": "dropout",
}  # fmt: skip


def settle(arguments: Arguments, world_size: int = 1, warn: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Return the validated value of every key, with device-dependent defaults filled in.

    block_size is None if it was not set and a model is loaded: the loaded model's block_size applies.
    """
    v = dict(arguments.values)
    if not v["out_dir"]:
        raise ConfigError("out_dir is empty; give a folder, such as . for this one")
    if v["n_embd"] % v["n_head"]:
        raise ConfigError(f"n_embd={v['n_embd']} is not divisible by n_head={v['n_head']}")
    if v["decay_lr"] and v["min_lr"] > v["learning_rate"]:
        raise ConfigError(
            f"min_lr={v['min_lr']} is above learning_rate={v['learning_rate']}, so the learning rate would rise instead of "
            "decaying; lower min_lr, usually to a tenth of learning_rate, or set decay_lr=False"
        )
    accumulation = v["gradient_accumulation_steps"]
    if accumulation % world_size:
        raise ConfigError(
            f"gradient_accumulation_steps={accumulation} cannot be shared by {world_size} ranks; set it to a multiple of "
            f"{world_size}, such as {-(-accumulation // world_size) * world_size}"
        )
    v["out_dir"] = str(user_path(v["out_dir"]))
    if v["device"].startswith("cuda") and world_size > 1:
        v["device"] = "cuda"  # each rank picks its own GPU
    device = device_named(v["device"])
    if v["dtype"] == "float16" and device.kind != "cuda":
        warn("dtype=float16 needs a GPU; computing in float32")
        v["dtype"] = "float32"
    if v["dtype"] is None:
        best = device.precision("auto")
        v["dtype"] = next(name for name, precision in PRECISIONS.items() if precision == best)
    if "compile" not in arguments.set_keys:
        v["compile"] = device.kind == "cuda"
    if "block_size" not in arguments.set_keys and v["init_from"] != "scratch":
        v["block_size"] = None
    return v


def record(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `config` of a ckpt.pt: nanoGPT's own keys."""
    return {name: values[name] for name in nanogpt_keys(TRAIN)}


def data_path(values: Mapping[str, Any]) -> Path:
    """Return the dataset's folder: data/NAME in the working directory, as in nanoGPT."""
    return Path("data") / values["dataset"]


def check_data(values: Mapping[str, Any]) -> None:
    """Raise DataError if the dataset does not exist; the message gives the command that prepares it."""
    folder = data_path(values)
    if not any((folder / name).is_file() for name in ("train.bin", "dataset.json")):
        script = folder / "prepare.py"
        advice = f"prepare it with: python {script}" if script.is_file() else "the folder needs train.bin and val.bin"
        raise DataError(f"dataset={values['dataset']} has no data in {folder}; {advice}")


def settle_tokenizer(values: dict[str, Any], warn: Callable[[str], None]) -> None:
    """Set the tokenizer to `number` if meta.pkl does not map tokens to characters: nanoGPT trains on any tokens."""
    from ingot.data.formats.nanogpt_folder import META, char_tokenizer

    meta = data_path(values) / META
    if values["tokenizer"] is None and meta.is_file() and char_tokenizer(meta) is None:
        warn(f"{meta} does not list single characters, so tokens are numbers; name their tokenizer with --tokenizer=FILE")
        values["tokenizer"] = "number"


def vocabulary(values: Mapping[str, Any]) -> int | None:
    """Return the vocabulary size of the dataset, or None for GPT-2's tokens."""
    from ingot.data.loading.data_path import open_dataset

    tokenizer = open_dataset(str(data_path(values)), values["tokenizer"], values["trust_tokens"]).tokenizer
    return None if tokenizer.kind == "gpt2" else tokenizer.vocab_size


def fresh_settings(values: Mapping[str, Any], vocab_size: int | None) -> dict[str, Any]:
    """Return the section `model` of a run that starts from random weights."""
    args = {**values, "vocab_size": vocab_size or GPT2_PADDED_VOCAB_SIZE}
    return {"family": "gpt2", **{ours: args[theirs] for theirs, ours in MODEL_ARGS.items()}, "gelu": "erf"}


def translate(values: Mapping[str, Any], model: Mapping[str, Any]) -> ResolvedConfig:
    """Return the config of a run with these keys and this section `model`."""
    v = {**values, "block_size": model["context"]}
    rows = v["gradient_accumulation_steps"] * v["batch_size"]
    evaluated = v["eval_iters"] * v["batch_size"]
    # If the decay ended with the warmup there would be no cosine phase; the rest of the run uses min_lr.
    decay_end = max(v["lr_decay_iters"], v["warmup_iters"] + 1)
    settings = {path: v[name] for name, path in copied(TRAIN).items()} | {
        **{f"model.{name}": value for name, value in model.items()},
        "data.path": str(data_path(v)),
        "data.sampling": "random",
        "data.seed": SEED,
        "optimizer.name": "adamw",
        "optimizer.epsilon": 1e-8,
        "optimizer.schedule": "cosine" if v["decay_lr"] else "constant",
        "optimizer.warmup_steps": v["warmup_iters"] if v["decay_lr"] else 0,
        "optimizer.decay_steps": decay_end if v["decay_lr"] else None,
        "optimizer.floor": v["min_lr"] / v["learning_rate"] if v["decay_lr"] and v["learning_rate"] else 0.0,
        "training.max_steps": v["max_iters"] + 1,
        "training.tokens_per_step": rows * v["block_size"],
        "training.seed": SEED,
        "training.precision": PRECISIONS[v["dtype"]],
        "training.priming_steps": 0,
        "training.save_every": v["eval_interval"] if v["always_save_checkpoint"] else 0,
        "evaluation.at_start": True,
        "evaluation.at_end": False,
        "evaluation.final_rows": None,
        "evaluation.rows": evaluated,
        "evaluation.train_rows": evaluated,
        "evaluation.micro_batch": v["batch_size"],
        "artifact.write": False,
        "tracking.wandb_project": v["wandb_project"] if v["wandb_log"] else None,
    }
    return load_config(python=settings, environment={})


def device_named(name: str, torch_only: str = "") -> Device:
    """Return the device for a `device` key; `torch_only` names a program that does not support mlx."""
    if name == "mlx" and torch_only:
        raise ConfigError(f"device=mlx is for train.py only; {torch_only} needs a torch device: use cpu, or mps on a Mac")
    if name.startswith("cuda") and find_device("auto").kind != "cuda":
        raise ConfigError(f"device={name}, but this machine has no CUDA GPU; add --device=cpu, or --device=mps on a Mac")
    return find_device(name)
