"""The keys of `train.py`, `sample.py` and `bench.py`, and the command lines that set them.

The first 33, 11 and 9 keys are nanoGPT's, with nanoGPT's defaults; those marked `added` are ours. A command line lists presets
and `--key=value` in any order; later ones win. A preset is the user's own Python file and is executed, as in nanoGPT.
"""

from __future__ import annotations

import ast
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.backends.sampling import MOST_TOKENS
from ingot.compat.options import Option, closest, defaults, help_lines, names_of_settings, table
from ingot.console.entry import explained, say
from ingot.errors import ConfigError, IngotError
from ingot.runtime.files import readable
from ingot.runtime.ranks import ranks_from_environment
from ingot.runtime.signals import listening_early

PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # nanoGPT's dtype -> training.precision
MISSPELT = 0.8  # an unknown name in a preset is reported as a typo if it is at least this similar to a key

_DEVICE = Option(
    "device", "str", "cuda", "cpu, cuda, cuda:N, mps or (train.py only) mlx; under torchrun each rank uses its own GPU",
    sets="training.device",
)  # fmt: skip
_DTYPE = Option(
    "dtype", "str", None, "None: float32 on a CPU, bfloat16 on GPUs that have it, else float16", tuple(PRECISIONS), null="None",
    sets="training.precision", computed=True,
)  # fmt: skip
_SEED = Option("seed", "int", 1337, "seed of all random numbers", low=0, high=2**62)
_MFU_PEAK = Option(
    "mfu_peak", "float", None, "peak FLOP/s per GPU for MFU; None: this GPU's own", low=0, null="None", added=True
)  # fmt: skip

TRAIN = table(
    Option("out_dir", "str", "out", "run folder, with ckpt.pt and all other files of the run", sets="training.output_dir"),
    Option("eval_interval", "int", 2000, "iterations between evaluations, which also save", low=1, sets="evaluation.every"),
    Option("log_interval", "int", 1, "iterations between log lines", low=1, sets="tracking.log_every"),
    Option("eval_iters", "int", 200, "batches per split in an evaluation", low=1),
    Option("eval_only", "bool", False, "evaluate once and exit; nothing is written"),
    Option("always_save_checkpoint", "bool", True, "ckpt.pt is the newest state; False: the one with the best val loss"),
    Option("init_from", "str", "scratch", "scratch, resume, gpt2, gpt2-medium, gpt2-large, gpt2-xl or a folder of GPT-2 weights"),
    Option("wandb_log", "bool", False, "send evaluations to Weights & Biases"),
    Option("wandb_project", "str", "owt", "W&B project"),
    Option("wandb_run_name", "str", "gpt2", "W&B run name", sets="tracking.wandb_run_name"),
    Option("dataset", "str", "openwebtext", "folder below data/ with train.bin and val.bin"),
    Option("gradient_accumulation_steps", "int", 5 * 8, "micro-batches per iteration, over all ranks", low=1),
    Option("batch_size", "int", 12, "rows per micro-batch", low=1, sets="training.micro_batch"),
    Option("block_size", "int", 1024, "tokens per row; a smaller value crops a loaded model", low=1, sets="data.seq_len"),
    Option("n_layer", "int", 12, "transformer blocks", low=1, sets="model.layers"),
    Option("n_head", "int", 12, "attention heads; must divide n_embd", low=1, sets="model.heads"),
    Option("n_embd", "int", 768, "width of the residual stream", low=1, sets="model.width"),
    Option("dropout", "float", 0.0, "dropout probability", low=0, below=1, sets="model.dropout"),
    Option("bias", "bool", False, "biases in linear layers and LayerNorms", sets="model.bias"),
    Option("learning_rate", "float", 6e-4, "peak learning rate of AdamW", low=0, sets="optimizer.learning_rate"),
    Option("max_iters", "int", 600000, "last iteration, counted from 0", low=0, sets="training.max_steps", computed=True),
    Option("weight_decay", "float", 1e-1, "weight decay of matrices and embeddings", low=0, sets="optimizer.weight_decay"),
    Option("beta1", "float", 0.9, "AdamW: decay of the first moment", low=0, below=1, sets="optimizer.beta1"),
    Option("beta2", "float", 0.95, "AdamW: decay of the second moment", low=0, below=1, sets="optimizer.beta2"),
    Option("grad_clip", "float", 1.0, "gradient norm to clip to; 0: no clipping", low=0, sets="optimizer.clip_norm"),
    Option("decay_lr", "bool", True, "warm up and decay the learning rate; False: constant"),
    Option("warmup_iters", "int", 2000, "iterations of linear warmup", low=0, sets="optimizer.warmup_steps"),
    Option("lr_decay_iters", "int", 600000, "iteration at which the cosine decay reaches min_lr", low=0),
    Option("min_lr", "float", 6e-5, "final learning rate", low=0),
    Option("backend", "str", "nccl", "how ranks exchange gradients; always gloo on CPUs", ("nccl", "gloo")),
    _DEVICE,
    _DTYPE,
    Option("compile", "bool", True, "torch.compile; on a CPU only if given explicitly", sets="training.compile"),
    Option(
        "deterministic", "bool", False, "same bits in every run on a GPU, resumed or not; slower",
        sets="training.deterministic", added=True,
    ),
    _MFU_PEAK,
    Option(
        "tokenizer", "str", None, "tokenizer file, if the tokens are neither meta.pkl's characters nor GPT-2's",
        null="None", sets="data.tokenizer", added=True,
    ),
    Option(
        "trust_tokens", "bool", False, "accept tokens that the tokenizer would not produce: random or lossy ones",
        sets="data.trust_tokens", added=True,
    ),
)  # fmt: skip

SAMPLE = table(
    Option("init_from", "str", "resume", "resume, gpt2, gpt2-medium, gpt2-large, gpt2-xl or a folder of GPT-2 weights"),
    Option("out_dir", "str", "out", "run folder, if init_from is resume"),
    Option("start", "str", "\n", "prompt, or FILE:path to read it from a file"),
    Option("num_samples", "int", 10, "completions to generate", low=0, high=10**6),
    Option("max_new_tokens", "int", 500, "tokens per completion", low=0, high=MOST_TOKENS),
    Option("temperature", "float", 0.8, "sampling temperature; 0: greedy", low=0),
    Option("top_k", "int", 200, "sample from the k most likely tokens; None or 0: from all", low=0, null="None"),
    _SEED,
    _DEVICE,
    _DTYPE,
    Option("compile", "bool", False, "torch.compile"),
    Option("top_p", "float", 1.0, "nucleus sampling: total probability of the candidate tokens", above=0, high=1, added=True),
    Option("stop", "str", None, "text after which a completion ends; None: after max_new_tokens", null="None", added=True),
)  # fmt: skip

BENCH = table(
    Option("batch_size", "int", 12, "rows per step", low=1),
    Option("block_size", "int", 1024, "tokens per row", low=1),
    Option("bias", "bool", False, "biases in linear layers and LayerNorms"),
    Option("real_data", "bool", True, "read data/openwebtext; False: random tokens"),
    _SEED,
    _DEVICE,
    _DTYPE,
    Option("compile", "bool", True, "torch.compile; on a CPU only if given explicitly"),
    Option("profile", "bool", False, "record a trace with torch's profiler instead"),
    Option("n_layer", "int", 12, "transformer blocks", low=1, added=True),
    Option("n_head", "int", 12, "attention heads; must divide n_embd", low=1, added=True),
    Option("n_embd", "int", 768, "width of the residual stream", low=1, added=True),
    Option("dataset", "str", "openwebtext", "folder below data/ with the real data", added=True),
    _MFU_PEAK,
)
PROGRAMS = {
    "train.py": ("Train a GPT, resume a run, or evaluate a model.", TRAIN),
    "sample.py": ("Generate text with a GPT.", SAMPLE),
    "bench.py": ("Measure the time of a training step.", BENCH),
}
ALL_KEYS = {**TRAIN, **SAMPLE, **BENCH}

key_name = names_of_settings(
    TRAIN,
    {
        "data.tokenizer": "--tokenizer",
        "data.trust_tokens": "--trust_tokens",
        "model.context": "block_size",
        "training.tokens_per_step": "tokens per iteration",
    },
)


@dataclass(frozen=True)
class Arguments:
    """The value of every key, and the names of the keys set by a preset or on the command line."""

    values: dict[str, Any]
    set_keys: frozenset[str] = frozenset()


def nanogpt_keys(keys: Mapping[str, Option]) -> list[str]:
    """Return the names of nanoGPT's own keys."""
    return [name for name, key in keys.items() if not key.added]


def enter(program: str, body: Callable[[Arguments], None], words: Sequence[str] | None = None) -> int:
    """Parse a program's arguments and call `body` with them; return the exit code."""
    words = list(sys.argv[1:] if words is None else words)
    with explained(program, key_name) as outcome, listening_early(program == "train.py"):
        if "--help" in words or "-h" in words:
            about, keys = PROGRAMS[program]
            say(f"usage: python {program} [PRESET.py ...] [--key=value ...]\n\n{about}\n")
            say("Presets and keys are read from left to right; later ones win. The keys and their defaults:\n")
            say("\n".join(help_lines(keys.values())))
        else:
            body(read_arguments(program, words, say if ranks_from_environment().first else lambda line: None))
    return outcome.code


def read_arguments(program: str, words: Sequence[str], say: Callable[[str], None] = print) -> Arguments:
    """Parse a command line into values; `say` prints each override, as nanoGPT does."""
    keys = PROGRAMS[program][1]
    values, set_keys = defaults(keys), set[str]()
    for word in words:
        if not word.startswith("-") and ("=" not in word or (word.endswith(".py") and Path(word).is_file())):
            overrides = _run_preset(Path(word), keys, values, say)
        else:
            name, value = _read_flag(word, keys)
            say(f"Overriding: {name} = {value}")
            overrides = {name: value}
        values |= overrides
        set_keys |= overrides.keys()
    return Arguments(values, frozenset(set_keys))


def _run_preset(path: Path, keys: Mapping[str, Option], values: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Execute a preset and return the keys it sets. It can read all values so far, and `time`, which nanoGPT's presets use."""
    if not path.exists():
        raise ConfigError(f"there is no preset {path}; presets are files such as config/train_gpt2.py, keys are --key=value")
    with readable(path, ConfigError):
        text = path.read_bytes().decode("utf-8-sig")
    say(f"Overriding config with {path}:\n{text}")
    before = {**defaults(ALL_KEYS), **values, "time": time}
    try:
        after = runpy.run_path(str(path), before)
    except IngotError:
        raise
    except Exception as error:  # the user's code may raise anything
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        place = f"{path}, line {lines[-1]}" if lines else str(path)  # a SyntaxError already contains its line
        raise ConfigError(f"{place}: the preset failed with {type(error).__name__}: {error}") from None
    # A key counts as set even if the preset assigns the value it already has.
    nodes = ast.walk(ast.parse(text))
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for name in assigned - ALL_KEYS.keys():
        scalar = isinstance(after.get(name), int | float | str) and not name.startswith("_")
        if scalar and (near := closest(name, keys, MISSPELT)) is not None:
            raise ConfigError(f"{path}: unknown key {name}; did you mean {near}? Begin a name of your own with an underscore")
    return {
        name: key.check(after[name], str(path))
        for name, key in keys.items()
        if name in after and (name in assigned or after[name] != before[name])
    }


def _read_flag(word: str, keys: Mapping[str, Option]) -> tuple[str, Any]:
    flag, equals, text = word.partition("=")
    name = flag.removeprefix("--")
    if not flag.startswith("--"):
        raise ConfigError(f"{word}: keys begin with two dashes: --{word.lstrip('-')}")
    if name not in keys:
        near = closest(name.replace("-", "_").lower(), keys)
        raise ConfigError(f"unknown key {name} in {word}; {f'did you mean {near}?' if near else '--help lists the keys'}")
    if not equals:
        raise ConfigError(f"{word} has no value; write {word}=VALUE")
    key = keys[name]
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = text
    if key.kind == "str" and not isinstance(value, str) and not (value is None and key.null):
        value = text  # --out_dir=123
    elif key.kind != "str" and text.lower() in ("true", "false"):
        value = text.lower() == "true"
    return name, key.check(value, "command line")
