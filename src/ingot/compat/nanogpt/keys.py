"""The keys of `train.py`, `sample.py` and `bench.py`: parse them from a command line and translate them to a Config.

The keys from nanoGPT (33, 11 and 9, respectively) have nanoGPT's defaults; keys that only Ingot has are marked `added`. Presets
and `--key=value` arguments can be mixed; later values override earlier ones. A preset is a Python file, executed as in nanoGPT.
"""

from __future__ import annotations

import ast
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ingot.backends.open import find_device
from ingot.backends.sampling import MOST_TOKENS
from ingot.compat.options import Option, closest, copied, defaults, help_lines, names_of_settings, table
from ingot.config.loading import ResolvedConfig, load_config
from ingot.config.schema import GPT2_PADDED_VOCAB_SIZE
from ingot.console.entry import explained, say
from ingot.errors import ConfigError, DataError, IngotError
from ingot.runtime.devices import Device
from ingot.runtime.files import readable, user_path
from ingot.runtime.ranks import ranks_from_environment
from ingot.runtime.signals import listening_early

Say = Callable[[str], None]
SEED = 1337
# nanoGPT's model_args, in nanoGPT's order, mapped to the names in the `model` section of the config.
MODEL_ARGS = {
    "n_layer": "layers", "n_head": "heads", "n_embd": "width", "block_size": "context", "bias": "bias",
    "vocab_size": "vocab_size", "dropout": "dropout",
}  # fmt: skip
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # training.precision by nanoGPT's dtype
MISSPELT = 0.8  # an unknown name in a preset is reported as a typo if its similarity (0 to 1) to a key is at least this

TRAIN = table(
    Option("out_dir", "str", "out", "folder for ckpt.pt and all other files of the run", sets="training.output_dir"),
    Option("eval_interval", "int", 2000, "evaluate and save every this many iterations", low=1, sets="evaluation.every"),
    Option("log_interval", "int", 1, "iterations between log lines", low=1, sets="tracking.log_every"),
    Option("eval_iters", "int", 200, "batches per evaluation from each of train.bin and val.bin", low=1),
    Option("eval_only", "bool", False, "evaluate the model once and exit, without writing any file"),
    Option("always_save_checkpoint", "bool", True, "write ckpt.pt at every evaluation; False: only if it is the best"),
    Option("init_from", "str", "scratch",
           "model to start from: scratch, resume, gpt2, gpt2-medium, gpt2-large, gpt2-xl or a folder of GPT-2 weights"),
    Option("wandb_log", "bool", False, "log evaluation results to Weights & Biases"),
    Option("wandb_project", "str", "owt", "Weights & Biases project"),
    Option("wandb_run_name", "str", "gpt2", "name of the run in Weights & Biases", sets="tracking.wandb_run_name"),
    Option("dataset", "str", "openwebtext", "folder in data/ that contains train.bin and val.bin"),
    Option("gradient_accumulation_steps", "int", 5 * 8, "micro-batches per iteration, summed over all ranks", low=1),
    Option("batch_size", "int", 12, "rows per micro-batch", low=1, sets="training.micro_batch"),
    Option("block_size", "int", 1024, "context length in tokens; a loaded model is cropped to it", low=1, sets="data.seq_len"),
    Option("n_layer", "int", 12, "number of transformer blocks", low=1, sets="model.layers"),
    Option("n_head", "int", 12, "number of attention heads; must divide n_embd", low=1, sets="model.heads"),
    Option("n_embd", "int", 768, "width of the residual stream", low=1, sets="model.width"),
    Option("dropout", "float", 0.0, "dropout probability", low=0, below=1, sets="model.dropout"),
    Option("bias", "bool", False, "use biases in linear layers and LayerNorms", sets="model.bias"),
    Option("learning_rate", "float", 6e-4, "peak learning rate of AdamW", low=0, sets="optimizer.learning_rate"),
    Option("max_iters", "int", 600000, "0-based index of the last iteration", low=0, sets="training.max_steps", computed=True),
    Option("weight_decay", "float", 1e-1, "weight decay of matrices and embeddings", low=0, sets="optimizer.weight_decay"),
    Option("beta1", "float", 0.9, "decay rate of AdamW's first moment", low=0, below=1, sets="optimizer.beta1"),
    Option("beta2", "float", 0.95, "decay rate of AdamW's second moment", low=0, below=1, sets="optimizer.beta2"),
    Option("grad_clip", "float", 1.0, "clip the gradient to this norm; 0: no clipping", low=0, sets="optimizer.clip_norm"),
    Option("decay_lr", "bool", True, "warm up and decay the learning rate; False: keep it constant"),
    Option("warmup_iters", "int", 2000, "iterations of linear warmup", low=0, sets="optimizer.warmup_steps"),
    Option("lr_decay_iters", "int", 600000, "iteration at which the cosine decay reaches min_lr", low=0),
    Option("min_lr", "float", 6e-5, "final learning rate", low=0),
    Option("backend", "str", "nccl", "torch.distributed backend for several ranks; CPUs always use gloo", ("nccl", "gloo")),
    Option("device", "str", "cuda",
           "cpu, cuda, cuda:N, mps or, in train.py only, mlx; under torchrun each rank uses its own GPU", sets="training.device"),
    Option("dtype", "str", None, "None: float32 on a CPU, bfloat16 on GPUs that support it, else float16", tuple(PRECISIONS),
           null="None", sets="training.precision", computed=True),
    Option("compile", "bool", True, "use torch.compile; if this key is not set, only on CUDA GPUs", sets="training.compile"),
    Option("deterministic", "bool", False, "make GPU results bitwise reproducible, even after a resume; slower",
           sets="training.deterministic", added=True),
    Option("mfu_peak", "float", None, "peak FLOP/s per GPU, for MFU; None: look up or measure", low=0, null="None", added=True),
    Option("tokenizer", "str", None, "tokenizer file, needed if the tokens are neither meta.pkl's characters nor GPT-2's",
           null="None", sets="data.tokenizer", added=True),
    Option("trust_tokens", "bool", False, "accept tokens that the tokenizer would not produce, such as random ones",
           sets="data.trust_tokens", added=True),
)  # fmt: skip

SAMPLE = table(
    Option("init_from", "str", "resume",
           "model to load: resume (from out_dir), gpt2, gpt2-medium, gpt2-large, gpt2-xl or a folder of GPT-2 weights"),
    Option("out_dir", "str", "out", "run folder that contains the model, if init_from is resume"),
    Option("start", "str", "\n", "prompt, or FILE:PATH to read the prompt from a file"),
    Option("num_samples", "int", 10, "number of completions", low=0, high=10**6),
    Option("max_new_tokens", "int", 500, "tokens per completion", low=0, high=MOST_TOKENS),
    Option("temperature", "float", 0.8, "sampling temperature; 0: always the most likely token", low=0),
    Option("top_k", "int", 200, "sample from the k most likely tokens; None or 0: from all tokens", low=0, null="None"),
    Option("seed", "int", 1337, "random seed", low=0, high=2**62),
    TRAIN["device"],
    TRAIN["dtype"],
    Option("compile", "bool", False, "accepted, but has no effect: sample.py does not compile the model"),
)  # fmt: skip

BENCH = table(
    Option("batch_size", "int", 12, "rows per step", low=1),
    Option("block_size", "int", 1024, "tokens per row", low=1),
    TRAIN["bias"],
    Option("real_data", "bool", True, "train on the tokens of the dataset; False: on random tokens"),
    SAMPLE["seed"],
    TRAIN["device"],
    TRAIN["dtype"],
    TRAIN["compile"],
    Option("profile", "bool", False, "record a trace with torch's profiler instead of measuring the time"),
    *(replace(TRAIN[name], added=True) for name in ("n_layer", "n_head", "n_embd", "dataset")),
    TRAIN["mfu_peak"],
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
    """Return the names of the keys that also exist in nanoGPT."""
    return [name for name, key in keys.items() if not key.added]


def enter(program: str, body: Callable[[Arguments], None], words: Sequence[str] | None = None) -> int:
    """Parse a program's arguments and call `body` with them; return the exit code."""
    words = list(sys.argv[1:] if words is None else words)
    with explained(program, key_name) as outcome, listening_early(program == "train.py"):
        if "--help" in words or "-h" in words:
            about, keys = PROGRAMS[program]
            say(f"usage: python {program} [PRESET.py ...] [--key=value ...]\n\n{about}\n")
            say("Presets and keys are read from left to right; later values replace earlier ones. The keys and their defaults:\n")
            say("\n".join(help_lines(keys.values())))
        else:
            body(read_arguments(program, words, say if ranks_from_environment().first else lambda line: None))
    return outcome.code


def read_arguments(program: str, words: Sequence[str], say: Say = print) -> Arguments:
    """Parse presets and `--key=value` arguments from left to right; `say` prints each override, as nanoGPT does."""
    keys = PROGRAMS[program][1]
    values, set_keys = defaults(keys), set[str]()
    for word in words:
        if not word.startswith("-") and ("=" not in word or (word.endswith(".py") and Path(word).is_file())):
            overrides = _run_preset(Path(word), keys, values, say)
            values |= overrides
            set_keys |= overrides.keys()
            continue
        flag, equals, text = word.partition("=")
        name = flag.removeprefix("--")
        if not flag.startswith("--"):
            raise ConfigError(f"{word}: keys begin with two dashes; write --{word.lstrip('-')}")
        if name not in keys:
            near = closest(name.replace("-", "_").lower(), keys)
            raise ConfigError(f"unknown key {name} in {word}; {f'did you mean {near}?' if near else '--help lists the keys'}")
        if not equals:
            raise ConfigError(f"{word} has no value; write {word}=VALUE")
        key: Option = keys[name]
        value: Any = text
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            value = ast.literal_eval(text.strip())
        if key.kind == "str" and not isinstance(value, str) and not (value is None and key.null):
            value = text  # --out_dir=123 means the text "123"
        elif key.kind != "str" and text.lower() in ("true", "false"):
            value = text.lower() == "true"
        values[name] = key.check(value, "command line")
        set_keys.add(name)
        say(f"Overriding: {name} = {values[name]}")
    return Arguments(values, frozenset(set_keys))


def _run_preset(path: Path, keys: Mapping[str, Option], values: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Execute a preset and return the values it sets, by key. The preset can read the values set so far and the module `time`."""
    if not path.exists():
        raise ConfigError(f"there is no preset {path}; give a file such as config/train_gpt2.py, or keys as --key=value")
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
        place = f"{path}, line {lines[-1]}" if lines else str(path)  # the message of a SyntaxError gives the line
        raise ConfigError(f"{place}: the preset failed with {type(error).__name__}: {error}") from None
    # A key counts as set even if the preset assigns the value it already has.
    nodes = ast.walk(ast.parse(text))
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for name in assigned - ALL_KEYS.keys():
        scalar = isinstance(after.get(name), int | float | str) and not name.startswith("_")
        if scalar and (near := closest(name, keys, MISSPELT)) is not None:
            raise ConfigError(f"{path}: unknown key {name}; did you mean {near}? If not, begin the name with an underscore")
    return {
        name: key.check(after[name], str(path))
        for name, key in keys.items()
        if name in after and (name in assigned or after[name] != before[name])
    }


# Translate the keys of train.py to a Config. A run has max_iters + 1 steps, because nanoGPT runs iterations 0 to max_iters.
# nanoGPT evaluates before iteration N, that is, after N steps of Ingot's training loop.


def settle(arguments: Arguments, world_size: int = 1, warn: Say = lambda line: None) -> dict[str, Any]:
    """Return the validated value of every key, with device-dependent defaults filled in.

    If block_size was not set and a model is loaded, block_size is None, because the model's own block_size applies.
    """
    v = dict(arguments.values)
    if not v["out_dir"]:
        raise ConfigError("out_dir is empty; give a folder, such as . for the current folder")
    if v["decay_lr"] and v["min_lr"] > v["learning_rate"]:
        raise ConfigError(
            f"min_lr={v['min_lr']} is above learning_rate={v['learning_rate']}, so the learning rate would rise instead of "
            "decaying; lower min_lr, usually to a tenth of learning_rate, or set decay_lr=False"
        )
    accumulation = v["gradient_accumulation_steps"]
    if accumulation % world_size:
        raise ConfigError(
            f"gradient_accumulation_steps={accumulation} cannot be divided among {world_size} ranks; set it to a multiple of "
            f"{world_size}, such as {-(-accumulation // world_size) * world_size}"
        )
    v["out_dir"] = str(user_path(v["out_dir"]))
    if v["device"].startswith("cuda") and world_size > 1:
        v["device"] = "cuda"  # each rank picks its own GPU
    device = device_named(v["device"])
    if v["dtype"] == "float16" and device.kind != "cuda":
        warn("dtype=float16 needs a CUDA GPU; computing in float32")
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
    """Return the values of nanoGPT's own keys, which a ckpt.pt stores as `config`."""
    return {name: values[name] for name in nanogpt_keys(TRAIN)}


def data_path(values: Mapping[str, Any]) -> Path:
    """Return the dataset's folder: data/NAME in the working directory, as in nanoGPT."""
    return Path("data") / values["dataset"]


def check_data(values: dict[str, Any], warn: Say = lambda line: None) -> None:
    """Raise DataError if the dataset does not exist; the message gives the command that prepares it.

    If no tokenizer is given and meta.pkl does not map ids to characters, use the tokenizer `number`: nanoGPT accepts such data.
    """
    from ingot.data.formats.nanogpt_folder import META, char_tokenizer

    folder = data_path(values)
    meta = folder / META
    if not any((folder / name).is_file() for name in ("train.bin", "dataset.json")):
        script = folder / "prepare.py"
        advice = f"prepare it with: python {script}" if script.is_file() else "the folder needs train.bin and val.bin"
        raise DataError(f"dataset={values['dataset']} has no data in {folder}; {advice}")
    if values["tokenizer"] is None and meta.is_file() and char_tokenizer(meta) is None:
        warn(f"{meta} does not list single characters, so tokens are shown as ids; name the tokenizer with --tokenizer=FILE")
        values["tokenizer"] = "number"


def fresh_settings(values: Mapping[str, Any], vocab_size: int | None) -> dict[str, Any]:
    """Return the config's `model` section for a run that starts from random weights."""
    args = {**values, "vocab_size": vocab_size or GPT2_PADDED_VOCAB_SIZE}
    return {"family": "gpt2", **{ours: args[theirs] for theirs, ours in MODEL_ARGS.items()}, "gelu": "erf"}


def translate(values: Mapping[str, Any], model: Mapping[str, Any]) -> ResolvedConfig:
    """Return the config of a run with these keys; `model` becomes the config's `model` section."""
    v = {**values, "block_size": model["context"]}
    rows = v["gradient_accumulation_steps"] * v["batch_size"]
    evaluated = v["eval_iters"] * v["batch_size"]
    # Decay for at least one iteration, even if lr_decay_iters lies within the warmup; after the decay the run uses min_lr.
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
    """Return the device selected by the key `device`; reject mlx if `torch_only` names a program that needs torch."""
    if name == "mlx" and torch_only:
        raise ConfigError(f"device=mlx is for train.py only; {torch_only} needs a torch device: use cpu, or mps on a Mac")
    if name.startswith("cuda") and find_device("auto").kind != "cuda":
        raise ConfigError(f"device={name}, but this machine has no CUDA GPU; add --device=cpu, or --device=mps on a Mac")
    return find_device(name)
