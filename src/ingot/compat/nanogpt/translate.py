"""From the keys of train.py to one Config: what only nanoGPT says is translated here and known nowhere else.

Its iterations count from 0 and include max_iters, so there is one more step than it says. It evaluates before an iteration, which
is where our loop stands after as many steps. Its accumulation is that of all ranks together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ingot.backends.open import find_device
from ingot.compat.nanogpt.command_line import Given
from ingot.compat.nanogpt.keys import PRECISIONS, SETTINGS, TRAIN, key_name, theirs
from ingot.config.loading import ResolvedConfig, load_config
from ingot.config.schema import GPT2_PADDED_VOCAB_SIZE, Config
from ingot.errors import ConfigError, DataError
from ingot.optim.schedules import learning_rate_scale
from ingot.runtime.devices import Device
from ingot.runtime.files import user_path

SEED = 1337
POSITIVE = (
    "eval_interval", "log_interval", "eval_iters", "gradient_accumulation_steps", "batch_size", "block_size",
    "n_layer", "n_head", "n_embd",
)  # fmt: skip
NOT_NEGATIVE = ("learning_rate", "max_iters", "weight_decay", "grad_clip", "warmup_iters", "lr_decay_iters", "min_lr", "mfu_peak")
BELOW_ONE = ("dropout", "beta1", "beta2")


@dataclass(frozen=True)
class ModelArgs:
    """What nanoGPT calls model_args, in its order: all that its model is built from."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    bias: bool
    vocab_size: int
    dropout: float

    @property
    def decayed(self) -> tuple[int, int]:
        """Tensors and parameters with weight decay: those of two dimensions."""
        matrices = 12 * self.n_layer * self.n_embd**2
        return 4 * self.n_layer + 2, (self.vocab_size + self.block_size) * self.n_embd + matrices

    @property
    def not_decayed(self) -> tuple[int, int]:
        """Tensors and parameters without: gains of norms, and biases."""
        norms = 2 * self.n_layer + 1
        biases = (norms + 4 * self.n_layer, (norms + 9 * self.n_layer) * self.n_embd) if self.bias else (0, 0)
        return norms + biases[0], norms * self.n_embd + biases[1]

    @property
    def parameters(self) -> int:
        """What nanoGPT reports: all but the table of positions."""
        return self.decayed[1] + self.not_decayed[1] - self.block_size * self.n_embd

    @property
    def flops_per_token(self) -> int:
        """FLOPs of a training step: six for each parameter, and attention."""
        return 6 * self.parameters + 12 * self.n_layer * self.n_embd * self.block_size


def args_of(settings: Mapping[str, Any]) -> ModelArgs:
    """The args of a `model` section of ours."""
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
    """The value of every key, checked, with those that depend on the device as this machine has it.

    A block_size that nobody gave is None where the model is loaded: `find_start` knows it.
    """
    v = dict(given.values)
    _check(v, world_size)
    v["out_dir"] = str(user_path(str(v["out_dir"]))) if v["out_dir"] else ""
    if str(v["device"]).startswith("cuda") and world_size > 1:
        v["device"] = "cuda"  # each rank has one of its own
    device = device_named(str(v["device"]))
    on_gpu = device.kind == "cuda"
    if v["dtype"] is None:
        best = device.precision("auto")
        v["dtype"] = next(name for name, precision in PRECISIONS.items() if precision == best)
    elif v["dtype"] == "float16" and not on_gpu:
        warn("dtype=float16 needs a GPU; computing in float32")
        v["dtype"] = "float32"
    if "compile" not in given.origins:
        v["compile"] = on_gpu
    if "block_size" not in given.origins and v["init_from"] != "scratch":
        v["block_size"] = None  # that of the loaded model
    if v["backend"] == "gloo" and on_gpu and world_size > 1:
        warn("backend=gloo: GPUs exchange gradients over nccl, and ranks their messages over gloo")
    return v


def record(values: Mapping[str, Any]) -> dict[str, Any]:
    """The `config` of a ckpt.pt: nanoGPT's own keys."""
    return {name: values[name] for name in theirs(TRAIN.values())}


def data_path(values: Mapping[str, Any]) -> Path:
    """The folder of the dataset, as nanoGPT finds it: below data/ of the folder one works in."""
    return Path("data") / values["dataset"]


def check_data(values: Mapping[str, Any]) -> None:
    """Refuse a dataset that is not there, with the command that makes it."""
    folder = data_path(values)
    if not folder.is_dir() or not any((folder / name).is_file() for name in ("train.bin", "dataset.json")):
        script = folder / "prepare.py"
        how = f"make it with: python {script}" if script.is_file() else "its folder needs train.bin and val.bin"
        raise DataError(f"there is no data of dataset={values['dataset']} in {folder}; {how}")


def settle_tokenizer(values: dict[str, Any], warn: Callable[[str], None]) -> None:
    """Let ids be numbers where meta.pkl does not say what they stand for: nanoGPT trains on any."""
    from ingot.data.formats.nanogpt_folder import META, char_tokenizer

    meta = data_path(values) / META
    if values["tokenizer"] is None and meta.is_file() and char_tokenizer(meta) is None:
        warn(f"{meta} lists no single characters, so ids are numbers; --tokenizer=FILE names what made them, if they are text")
        values["tokenizer"] = "number"


def vocabulary(folder: Path, tokenizer: str | None = None, trust_tokens: bool = False) -> int | None:
    """The size of the vocabulary of a data folder, nanoGPT's or ours; None where the ids are GPT-2's."""
    from ingot.data.loading.data_path import open_dataset

    found = open_dataset(str(folder), tokenizer, trust_tokens).tokenizer
    return None if found.kind == "gpt2" else found.vocab_size


def fresh_args(values: Mapping[str, Any], vocab_size: int | None) -> ModelArgs:
    """The model that the keys describe."""
    names = ("n_layer", "n_head", "n_embd", "block_size", "bias", "dropout")
    return ModelArgs(**{name: values[name] for name in names}, vocab_size=vocab_size or GPT2_PADDED_VOCAB_SIZE)


def translate(values: Mapping[str, Any], args: ModelArgs, gelu: str = "erf") -> ResolvedConfig:
    """The config of a run with these keys and this model; a mistake is told in the words of the keys."""
    v = {**values, **asdict(args)}
    settings = {path: v[name] for name, path in SETTINGS.items()} | _computed(v, args, gelu)
    try:
        return load_config(python=settings, environment={})
    except ConfigError as error:
        raise ConfigError(error.render(key_name)) from None


def learning_rate(config: Config, iteration: int) -> float:
    """The learning rate of an iteration."""
    return config.optimizer.learning_rate * learning_rate_scale(config, iteration, seconds=0.0)


def _computed(v: Mapping[str, Any], args: ModelArgs, gelu: str) -> dict[str, Any]:
    """The settings that say what several keys say, or what nanoGPT never lets anybody choose."""
    rows = v["gradient_accumulation_steps"] * v["batch_size"]
    # An end at or before the warm-up's leaves no room for a cosine: what is left of the run then has min_lr.
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
    """The mistakes that can be made with single keys, in their words."""
    for names, low, high in ((POSITIVE, 1, math.inf), (NOT_NEGATIVE, 0, math.inf), (BELOW_ONE, 0, 1)):
        for name in names:
            if v[name] is not None and not low <= v[name] < high:
                below = " and below 1" if high == 1 else ""
                raise ConfigError(f"{name}={v[name]} must be {low} or more{below}")
    if v["dtype"] not in (None, *PRECISIONS):
        raise ConfigError(f"dtype={v['dtype']} must be {', '.join(PRECISIONS)} or None")
    if not v["out_dir"]:
        raise ConfigError("out_dir is empty; give a folder, such as . for this one")
    if v["backend"] not in ("nccl", "gloo"):
        raise ConfigError(f"backend={v['backend']} must be nccl or gloo")
    if v["n_embd"] % v["n_head"]:
        raise ConfigError(f"n_embd={v['n_embd']} is not divisible by n_head={v['n_head']}")
    if v["decay_lr"] and v["min_lr"] > v["learning_rate"]:
        raise ConfigError(
            f"min_lr={v['min_lr']} is above learning_rate={v['learning_rate']}, so the learning rate would rise where it should "
            "decay; lower min_lr, usually to a tenth of learning_rate, or set decay_lr=False"
        )
    if v["gradient_accumulation_steps"] % world_size:
        below = v["gradient_accumulation_steps"] // world_size * world_size
        nearest = f"{below} or {below + world_size}" if below else f"{world_size}"
        raise ConfigError(
            f"gradient_accumulation_steps={v['gradient_accumulation_steps']} cannot be shared by {world_size} ranks; "
            f"set it to {nearest}, or use another number of ranks"
        )


def torch_device_named(name: str, who: str) -> Device:
    """The device that a key names, where only torch's will do."""
    if name == "mlx":
        raise ConfigError(f"device=mlx is for train.py, and {who} needs one of torch's; use cpu, or mps on a Mac")
    return device_named(name)


def device_named(name: str) -> Device:
    """The device that a key names, if this machine has it."""
    if name.startswith("cuda") and find_device("auto").kind != "cuda":
        raise ConfigError(f"device={name} and this machine has no CUDA GPU; add --device=cpu, or --device=mps on a Mac")
    try:
        return find_device(name)
    except ConfigError as error:
        raise ConfigError(error.render(key_name)) from None
