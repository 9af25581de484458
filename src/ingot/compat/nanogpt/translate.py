"""Translate the keys of train.py to one Config.

nanoGPT counts iterations from 0 up to and including max_iters, so a run has max_iters + 1 steps. It evaluates before iteration N,
which is after N steps of our loop. gradient_accumulation_steps counts the micro-batches of all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ingot.backends.open import find_device
from ingot.compat.nanogpt.keys import PRECISIONS, TRAIN, Given, key_name, nanogpt_keys
from ingot.compat.options import copied
from ingot.config.loading import ResolvedConfig, load_config
from ingot.config.schema import GPT2_PADDED_VOCAB_SIZE, Config
from ingot.errors import ConfigError, DataError
from ingot.optim.schedules import learning_rate_scale
from ingot.runtime.devices import Device
from ingot.runtime.files import user_path

SEED = 1337


@dataclass(frozen=True)
class ModelArgs:
    """nanoGPT's model_args, in its order: everything its model is built from."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    bias: bool
    vocab_size: int
    dropout: float

    @property
    def decayed(self) -> tuple[int, int]:
        """The number of tensors and parameters with weight decay: the matrices."""
        matrices = 12 * self.n_layer * self.n_embd**2
        return 4 * self.n_layer + 2, (self.vocab_size + self.block_size) * self.n_embd + matrices

    @property
    def not_decayed(self) -> tuple[int, int]:
        """The number of tensors and parameters without weight decay: norm gains and biases."""
        norms = 2 * self.n_layer + 1
        biases = (norms + 4 * self.n_layer, (norms + 9 * self.n_layer) * self.n_embd) if self.bias else (0, 0)
        return norms + biases[0], norms * self.n_embd + biases[1]

    @property
    def parameters(self) -> int:
        """The parameter count that nanoGPT reports: all but the position embedding."""
        return self.decayed[1] + self.not_decayed[1] - self.block_size * self.n_embd

    @property
    def flops_per_token(self) -> int:
        """Training FLOPs per token: six per parameter, plus attention."""
        return 6 * self.parameters + 12 * self.n_layer * self.n_embd * self.block_size


def args_of(settings: Mapping[str, Any]) -> ModelArgs:
    """Return the model_args of a `model` section."""
    return ModelArgs(
        n_layer=settings["layers"],
        n_head=settings["heads"],
        n_embd=settings["width"],
        block_size=settings["context"],
        bias=settings["bias"],
        vocab_size=settings["vocab_size"],
        dropout=settings["dropout"],
    )


def settle(given: Given, world_size: int = 1, warn: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Return the value of every key, checked, with the defaults that depend on the device filled in.

    block_size stays None if it was not given and the model is loaded: the loaded model's block_size applies.
    """
    v = dict(given.values)
    _check(v, world_size)
    v["out_dir"] = str(user_path(str(v["out_dir"]))) if v["out_dir"] else ""
    if str(v["device"]).startswith("cuda") and world_size > 1:
        v["device"] = "cuda"  # each rank picks its own GPU
    device = device_named(str(v["device"]))
    on_gpu = device.kind == "cuda"
    if v["dtype"] is None:
        best = device.precision("auto")
        v["dtype"] = next(name for name, precision in PRECISIONS.items() if precision == best)
    elif v["dtype"] == "float16" and not on_gpu:
        warn("dtype=float16 needs a GPU; computing in float32")
        v["dtype"] = "float32"
    if "compile" not in given.given:
        v["compile"] = on_gpu
    if "block_size" not in given.given and v["init_from"] != "scratch":
        v["block_size"] = None
    if v["backend"] == "gloo" and on_gpu and world_size > 1:
        warn("backend=gloo: GPUs exchange gradients over nccl, and ranks their messages over gloo")
    return v


def record(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `config` of a ckpt.pt: nanoGPT's own keys."""
    return {name: values[name] for name in nanogpt_keys(TRAIN)}


def data_path(values: Mapping[str, Any]) -> Path:
    """Return the dataset's folder, below data/ in the working directory as in nanoGPT."""
    return Path("data") / values["dataset"]


def check_data(values: Mapping[str, Any]) -> None:
    """Raise DataError if the dataset does not exist, with the command that prepares it."""
    folder = data_path(values)
    if not folder.is_dir() or not any((folder / name).is_file() for name in ("train.bin", "dataset.json")):
        script = folder / "prepare.py"
        advice = f"prepare it with: python {script}" if script.is_file() else "the folder needs train.bin and val.bin"
        raise DataError(f"dataset={values['dataset']} has no data in {folder}; {advice}")


def settle_tokenizer(values: dict[str, Any], warn: Callable[[str], None]) -> None:
    """Use the `number` tokenizer if meta.pkl does not map tokens to characters: nanoGPT trains on any tokens."""
    from ingot.data.formats.nanogpt_folder import META, char_tokenizer

    meta = data_path(values) / META
    if values["tokenizer"] is None and meta.is_file() and char_tokenizer(meta) is None:
        warn(f"{meta} does not list single characters, so tokens are numbers; name their tokenizer with --tokenizer=FILE")
        values["tokenizer"] = "number"


def vocabulary(folder: Path, tokenizer: str | None = None, trust_tokens: bool = False) -> int | None:
    """Return the vocabulary size of a data folder, nanoGPT's or ours; None for GPT-2's tokens."""
    from ingot.data.loading.data_path import open_dataset

    opened = open_dataset(str(folder), tokenizer, trust_tokens).tokenizer
    return None if opened.kind == "gpt2" else opened.vocab_size


def fresh_args(values: Mapping[str, Any], vocab_size: int | None) -> ModelArgs:
    """Return the model_args that the keys describe."""
    names = ("n_layer", "n_head", "n_embd", "block_size", "bias", "dropout")
    return ModelArgs(**{name: values[name] for name in names}, vocab_size=vocab_size or GPT2_PADDED_VOCAB_SIZE)


def translate(values: Mapping[str, Any], args: ModelArgs, gelu: str = "erf") -> ResolvedConfig:
    """Return the config of a run with these keys and this model; errors use the names of the keys."""
    v = {**values, **asdict(args)}
    settings = {path: v[name] for name, path in copied(TRAIN).items()} | _computed(v, args, gelu)
    try:
        return load_config(python=settings, environment={})
    except ConfigError as error:
        raise ConfigError(error.render(key_name)) from None


def learning_rate(config: Config, iteration: int) -> float:
    """Return the learning rate of an iteration."""
    return config.optimizer.learning_rate * learning_rate_scale(config, iteration, seconds=0.0)


def _computed(v: Mapping[str, Any], args: ModelArgs, gelu: str) -> dict[str, Any]:
    """Return the settings that depend on several keys or that nanoGPT fixes."""
    rows = v["gradient_accumulation_steps"] * v["batch_size"]
    # If the decay ends with the warmup, the cosine part is empty and the rest of the run uses min_lr.
    decay_end = max(v["lr_decay_iters"], v["warmup_iters"] + 1)
    return {
        "model.family": "gpt2",
        "model.context": args.block_size,
        "model.vocab_size": args.vocab_size,
        "model.gelu": gelu,
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
        "evaluation.rows": v["eval_iters"] * v["batch_size"],
        "evaluation.train_rows": v["eval_iters"] * v["batch_size"],
        "evaluation.micro_batch": v["batch_size"],
        "artifact.write": False,
        "tracking.wandb_project": v["wandb_project"] if v["wandb_log"] else None,
    }


def _check(v: Mapping[str, Any], world_size: int) -> None:
    """Raise ConfigError for keys that do not fit together."""
    if not v["out_dir"]:
        raise ConfigError("out_dir is empty; give a folder, such as . for this one")
    if v["n_embd"] % v["n_head"]:
        raise ConfigError(f"n_embd={v['n_embd']} is not divisible by n_head={v['n_head']}")
    if v["decay_lr"] and v["min_lr"] > v["learning_rate"]:
        raise ConfigError(
            f"min_lr={v['min_lr']} is above learning_rate={v['learning_rate']}, so the learning rate would rise instead of "
            "decaying; lower min_lr, usually to a tenth of learning_rate, or set decay_lr=False"
        )
    if v["gradient_accumulation_steps"] % world_size:
        below = v["gradient_accumulation_steps"] // world_size * world_size
        nearest = f"{below} or {below + world_size}" if below else f"{world_size}"
        raise ConfigError(
            f"gradient_accumulation_steps={v['gradient_accumulation_steps']} cannot be shared by {world_size} ranks; "
            f"set it to {nearest}, or use another number of ranks"
        )


def torch_device_named(name: str, who: str) -> Device:
    """Return the torch device that a key names."""
    if name == "mlx":
        raise ConfigError(f"device=mlx is for train.py only; {who} needs a torch device: use cpu, or mps on a Mac")
    return device_named(name)


def device_named(name: str) -> Device:
    """Return the device that a key names, or raise ConfigError if this machine does not have it."""
    if name.startswith("cuda") and find_device("auto").kind != "cuda":
        raise ConfigError(f"device={name}, but this machine has no CUDA GPU; add --device=cpu, or --device=mps on a Mac")
    try:
        return find_device(name)
    except ConfigError as error:
        raise ConfigError(error.render(key_name)) from None
