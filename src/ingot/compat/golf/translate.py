"""Translate the environment variables of golf's scripts to a Config, applying the rules that are specific to golf."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.compat.golf.variables import VARIABLES, read_variables
from ingot.compat.options import Option, copied, names_of_settings
from ingot.config.loading import ResolvedConfig, load_config
from ingot.errors import ConfigError, Rename

SPANS = 8  # chunks per step; in golf's own script: ranks times accumulation steps
NEVER = 1 << 31  # step interval that disables a log line
SHAPE = ("VOCAB_SIZE", "NUM_LAYERS", "MODEL_DIM", "NUM_HEADS", "MODEL_FILE")  # variables that also apply to a custom model
BASELINE_ONLY = {
    name: option.sets for name, option in VARIABLES.items() if option.sets.startswith("model.") and name not in SHAPE
}
STILL_USED = ("TIE_EMBEDDINGS", "CONTROL_TENSOR_NAME_PATTERNS")  # the optimizer and the quantiser use these for custom models too
# Advice in Ingot's error messages that does not apply to golf's scripts, and what to show instead.
ADVICE = {
    "free disk space or choose another {0}": "free disk space or run in another folder",
    "make it writable or choose another {0}": "make it writable or run in another folder",
    "lower the learning rate, raise {0} or check the data, and start again": (
        "lower the learning rate, set GRAD_CLIP_NORM or check the data, and start again"
    ),
    "lower {0} or set {1}, and start again": "lower {0}, and start again",
    "lower {0} or set {1} or {2}, and start again": "lower {0}, and start again",
    "lower {0}, shrink the model or set {1}": "lower {0} or shrink the model",
}

variable: Rename = names_of_settings(VARIABLES, {"training.micro_batch": "TRAIN_BATCH_TOKENS"})


def advice(ours: str) -> str:
    """Return the advice of an error message unchanged, or a replacement if the advice does not apply to golf's scripts."""
    return ADVICE.get(ours, ours)


def accumulation(world_size: int) -> int:
    """Return the number of gradient accumulation steps in golf's script: 8 divided by the number of ranks, rounded up."""
    return -(-SPANS // world_size)


def translate(values: Mapping[str, Any], world_size: int = 1, on_gpu: bool = False, folder: Path | None = None) -> ResolvedConfig:
    """Return the config of a train_gpt.py run; error messages name environment variables instead of Ingot's settings."""
    length, batch, unit = values["TRAIN_SEQ_LEN"], values["TRAIN_BATCH_TOKENS"], SPANS * values["TRAIN_SEQ_LEN"]
    tokens = batch // SPANS * SPANS  # golf's own script drops the remainder too
    if tokens < unit or tokens % unit:
        below = batch // unit * unit
        nearest = f"{below} and {below + unit}" if below else f"{unit}"
        raise ConfigError(
            f"TRAIN_BATCH_TOKENS={batch} is not a multiple of {SPANS} x TRAIN_SEQ_LEN={length}; nearest valid: {nearest}"
        )
    steps, limit = accumulation(world_size), values["ARTIFACT_LIMIT_BYTES"]
    divisors = f"WORLD_SIZE={world_size} and GRAD_ACCUM_STEPS={steps}"
    settings = {
        "data.spans": SPANS,
        "training.tokens_per_step": tokens,
        "evaluation.micro_batch": rows_per_part(values, "VAL_BATCH_SIZE", world_size * steps, divisors),
        "budget.artifact_bytes": limit if limit > 0 else None,
    }
    return make_config(VARIABLES, values, settings, on_gpu, folder, variable)


def make_config(
    options: Mapping[str, Option],
    v: Mapping[str, Any],
    settings: Mapping[str, Any],
    on_gpu: bool,
    folder: Path | None,
    name: Rename,
) -> ResolvedConfig:
    """Build the config of a run from its variables, the settings that golf fixes, and `settings`, which differ by script."""
    if not v["TOKENIZER_PATH"].endswith(".model"):
        raise ConfigError(f"TOKENIZER_PATH={v['TOKENIZER_PATH']} must be a SentencePiece .model file")
    warmdown, cap, every = v["WARMDOWN_ITERS"], v["MAX_WALLCLOCK_SECONDS"], max(v["VAL_LOSS_EVERY"], 0)
    tree = {path: v[name] for name, path in copied(options).items()} | {
        "model.family": "golf",
        "model.embedding_dtype": v["EMBED_DTYPE"] if v["EMBED_DTYPE"] != "auto" else "bf16" if on_gpu else "fp32",
        "model.control": ",".join(v["CONTROL_TENSOR_NAME_PATTERNS"]),
        "data.sampling": "stream",
        "optimizer.name": "muon",
        "optimizer.embedding_learning_rate": v["TIED_EMBED_LR"] if v["TIE_EMBEDDINGS"] else v["EMBED_LR"],
        "optimizer.weight_decay": 0.0,
        "optimizer.muon_momentum_start": v["MUON_MOMENTUM_WARMUP_START"] if v["MUON_MOMENTUM_WARMUP_STEPS"] > 0 else None,
        "optimizer.muon_momentum_warmup_steps": max(v["MUON_MOMENTUM_WARMUP_STEPS"], 0),
        "optimizer.schedule": "warmdown" if warmdown > 0 else "constant",
        "optimizer.decay_steps": warmdown if warmdown > 0 else None,
        "optimizer.floor": 0.0,
        "training.priming_steps": max(v["WARMUP_STEPS"], 0),
        "optimizer.clip_norm": max(v["GRAD_CLIP_NORM"], 0.0),
        "budget.seconds": cap if 0 < cap < math.inf else None,
        "budget.overshoot": True,
        "evaluation.every": every,
        "evaluation.at_start": every > 0,
        "evaluation.final_rows": None,
        "evaluation.whole_rows": True,
        "evaluation.bytes": "pieces",
        "artifact.quantiser": "int8-golf" if v["INT8_RULE"] == "golf" else "int8",
        "artifact.codec": "zlib",
        "artifact.tokenizer": False,
        "tracking.log_every": v["TRAIN_LOG_EVERY"] if v["TRAIN_LOG_EVERY"] > 0 else NEVER,
        "training.output_dir": None if folder is None else str(folder),
        **settings,
    }
    if file := v.get("MODEL_FILE"):
        baseline = read_variables({})
        unused = [name for name in BASELINE_ONLY if v[name] != baseline[name] and name not in STILL_USED]
        if unused:
            raise ConfigError(
                f"{unused[0]} has no effect on the model of MODEL_FILE={file}; unset it and set the value in that file"
            )
        tree = {path: value for path, value in tree.items() if path not in BASELINE_ONLY.values()}
        tree |= {"model.family": "file", "model.file": file}
    try:
        return load_config(python=tree, environment={})
    except ConfigError as error:
        untied = {} if v["TIE_EMBEDDINGS"] else {"optimizer.embedding_learning_rate": "EMBED_LR"}
        raise ConfigError(error.render(lambda path: untied.get(path) or name(path))) from None


def rows_per_part(v: Mapping[str, Any], name: str, parts: int, divisors: str) -> int:
    """Split `v[name]` tokens into `parts` equal parts; return the number of whole sequences in each. Errors quote `divisors`."""
    length = v["TRAIN_SEQ_LEN"]
    if (rows := int(v[name] // parts // length)) < 1:
        least = f"one sequence of TRAIN_SEQ_LEN={length}; give at least {parts * length}"
        raise ConfigError(f"{name}={v[name]} divided by {divisors} is less than {least}")
    return rows
