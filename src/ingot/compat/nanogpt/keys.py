"""Every key of `train.py`, `sample.py` and `bench.py`: its type, default and meaning.

The first 33, 11 and 9 are nanoGPT's, with nanoGPT's defaults; the few after them, marked `ours`, are additions. A key without a
default (None) is settled when the device is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ingot.errors import ConfigError

Value = int | float | bool | str | None
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # values of dtype, and what they are called here
WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}


@dataclass(frozen=True)
class Key:
    """One key. `optional`: None may be given too."""

    name: str
    type: type[int] | type[float] | type[bool] | type[str]
    default: Value
    meaning: str
    optional: bool = False
    ours: bool = False

    @property
    def allowed(self) -> str:
        """What a value may be, in words."""
        return WORDS[self.type] + (" or None" if self.optional else "")

    def of(self, value: object, where: str) -> Value:
        """The value as this key has it: a whole number does for a float, and a float without a fraction for an int."""
        if value is None and self.optional:
            return None
        if self.type is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if self.type is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not self.type or (isinstance(value, float) and not math.isfinite(value)):
            raise ConfigError(f"{where}: {self.name} = {value!r} is not {self.allowed}")
        return value


def _keys(*keys: Key) -> dict[str, Key]:
    return {key.name: key for key in keys}


_DEVICE = Key("device", str, "cuda", "cpu, cuda, cuda:N, mps or (train.py) mlx; under torchrun each rank has a GPU of its own")
_DTYPE = Key(
    "dtype", str, None, "float32, bfloat16 or float16; None: bfloat16 where the GPU has it, else float16; float32 on a CPU", True
)
_SEED = Key("seed", int, 1337, "decides every random number")

TRAIN = _keys(
    Key("out_dir", str, "out", "folder of the run: ckpt.pt and all that the run leaves behind"),
    Key("eval_interval", int, 2000, "iterations between evaluations, which also save"),
    Key("log_interval", int, 1, "iterations between lines"),
    Key("eval_iters", int, 200, "batches of each split that an evaluation reads"),
    Key("eval_only", bool, False, "evaluate once and end; nothing is written"),
    Key("always_save_checkpoint", bool, True, "ckpt.pt is the newest state; False: the one with the best val loss"),
    Key("init_from", str, "scratch", "scratch, resume, gpt2, gpt2-medium, gpt2-large or gpt2-xl; or a folder with GPT-2 weights"),
    Key("wandb_log", bool, False, "send evaluations to Weights & Biases"),
    Key("wandb_project", str, "owt", "its project"),
    Key("wandb_run_name", str, "gpt2", "and the name of the run there"),
    Key("dataset", str, "openwebtext", "folder below data/ with train.bin and val.bin"),
    Key("gradient_accumulation_steps", int, 5 * 8, "micro-batches in an iteration, over all ranks"),
    Key("batch_size", int, 12, "rows in a micro-batch"),
    Key("block_size", int, 1024, "tokens in a row; a loaded model has its own, and less than that crops it"),
    Key("n_layer", int, 12, "transformer blocks"),
    Key("n_head", int, 12, "attention heads; they divide n_embd"),
    Key("n_embd", int, 768, "width of the residual stream"),
    Key("dropout", float, 0.0, "part of the activations dropped in training"),
    Key("bias", bool, False, "biases in linear layers and LayerNorms"),
    Key("learning_rate", float, 6e-4, "peak learning rate of AdamW"),
    Key("max_iters", int, 600000, "last iteration; counting from 0 there is one more of them"),
    Key("weight_decay", float, 1e-1, "of tensors with two or more dimensions"),
    Key("beta1", float, 0.9, "AdamW: decay of the mean of gradients"),
    Key("beta2", float, 0.95, "AdamW: decay of the mean of squared gradients"),
    Key("grad_clip", float, 1.0, "largest norm of the gradient; 0: not clipped"),
    Key("decay_lr", bool, True, "warm up and decay the learning rate; False: constant"),
    Key("warmup_iters", int, 2000, "iterations over which it rises"),
    Key("lr_decay_iters", int, 600000, "iteration at which it has fallen to min_lr, along a cosine"),
    Key("min_lr", float, 6e-5, "where it ends"),
    Key("backend", str, "nccl", "nccl or gloo: how ranks exchange gradients; on CPUs always gloo"),
    _DEVICE,
    _DTYPE,
    Key("compile", bool, True, "torch.compile; on a CPU only if it is asked for"),
    Key("deterministic", bool, False, "a GPU computes the same bits each time, resumed or not; slower", ours=True),
    Key("mfu_peak", float, None, "FLOP/s that mfu is a percentage of, per GPU; None: this GPU's own", True, ours=True),
    Key("tokenizer", str, None, "what made the ids, where neither characters in meta.pkl nor GPT-2 did: a file", True, ours=True),
    Key("trust_tokens", bool, False, "take ids that the tokenizer would not have made: random or lossy ones", ours=True),
)

SAMPLE = _keys(
    Key("init_from", str, "resume", "resume, gpt2, gpt2-medium, gpt2-large or gpt2-xl; or a folder with GPT-2 weights"),
    Key("out_dir", str, "out", "folder of the run, where init_from is resume"),
    Key("start", str, "\n", "what the text begins with, or FILE:path of it"),
    Key("num_samples", int, 10, "texts to write"),
    Key("max_new_tokens", int, 500, "tokens in each, after the start"),
    Key("temperature", float, 0.8, "below 1: likelier tokens are drawn more often, above: less; 0: always the likeliest"),
    Key("top_k", int, 200, "only so many likeliest tokens are drawn; None or 0: all", True),
    _SEED,
    _DEVICE,
    _DTYPE,
    Key("compile", bool, False, "torch.compile"),
    Key("top_p", float, 1.0, "only the likeliest tokens that make up this probability are drawn", ours=True),
    Key("stop", str, None, "a text ends after this; None: after max_new_tokens", True, ours=True),
)

BENCH = _keys(
    Key("batch_size", int, 12, "rows in a step"),
    Key("block_size", int, 1024, "tokens in a row"),
    Key("bias", bool, False, "biases in linear layers and LayerNorms"),
    Key("real_data", bool, True, "read data/openwebtext; False: random tokens"),
    _SEED,
    _DEVICE,
    _DTYPE,
    Key("compile", bool, True, "torch.compile; on a CPU only if it is asked for"),
    Key("profile", bool, False, "record a trace with torch's profiler instead"),
    Key("n_layer", int, 12, "transformer blocks", ours=True),
    Key("n_head", int, 12, "attention heads", ours=True),
    Key("n_embd", int, 768, "width of the residual stream", ours=True),
    Key("dataset", str, "openwebtext", "folder below data/ of the real data", ours=True),
    Key("mfu_peak", float, None, "FLOP/s that MFU is a percentage of; None: this GPU's own", True, ours=True),
)

# Keys that are settings of ours under another name.
SETTINGS = {
    "out_dir": "training.output_dir", "batch_size": "training.micro_batch", "block_size": "data.seq_len",
    "learning_rate": "optimizer.learning_rate", "weight_decay": "optimizer.weight_decay", "beta1": "optimizer.beta1",
    "beta2": "optimizer.beta2", "grad_clip": "optimizer.clip_norm", "warmup_iters": "optimizer.warmup_steps",
    "device": "training.device", "compile": "training.compile", "eval_interval": "evaluation.every",
    "log_interval": "tracking.log_every", "n_head": "model.heads", "n_embd": "model.width", "n_layer": "model.layers",
    "dropout": "model.dropout", "bias": "model.bias", "tokenizer": "data.tokenizer", "trust_tokens": "data.trust_tokens",
    "deterministic": "training.deterministic", "wandb_run_name": "tracking.wandb_run_name",
}  # fmt: skip
NAMES = {path: name for name, path in SETTINGS.items()} | {
    "data.tokenizer": "--tokenizer", "data.trust_tokens": "--trust_tokens",
    "model.context": "block_size", "training.max_steps": "max_iters", "training.tokens_per_step": "tokens per iteration",
}  # fmt: skip


def key_name(path: str) -> str:
    """What nanoGPT's users know a setting of ours as."""
    return NAMES.get(path, path)


def defaults(keys: Mapping[str, Key]) -> dict[str, Value]:
    """Every key with its default."""
    return {key.name: key.default for key in keys.values()}


def theirs(keys: Iterable[Key]) -> list[str]:
    """The names that nanoGPT has."""
    return [key.name for key in keys if not key.ours]
