"""From the variables of train_gpt.py to one Config: what only golf says is translated here and known nowhere else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.compat.golf.variables import read_variables
from ingot.config.loading import ResolvedConfig, load_config
from ingot.errors import ConfigError, Rename

SPANS = 8  # parts in which a step is read, whatever the ranks: the original's ranks times its accumulation steps
HEARD = ("TIE_EMBEDDINGS", "CONTROL_TENSOR_NAME_PATTERNS")  # by the optimizer and the quantiser too
NEVER = 1 << 31  # steps between lines that are not wanted

# Variables that are settings of ours under another name.
SETTINGS = {
    "DATA_PATH": "data.path", "TOKENIZER_PATH": "data.tokenizer", "TRUST_TOKENS": "data.trust_tokens",
    "TRAIN_SEQ_LEN": "data.seq_len", "SEED": "training.seed",
    "ITERATIONS": "training.max_steps", "TRAIN_BATCH_TOKENS": "training.tokens_per_step", "QK_GAIN_INIT": "model.qk_gain",
    "VOCAB_SIZE": "model.vocab_size", "NUM_LAYERS": "model.layers", "NUM_KV_HEADS": "model.kv_heads", "MODEL_DIM": "model.width",
    "NUM_HEADS": "model.heads", "MLP_MULT": "model.mlp_multiple", "TIE_EMBEDDINGS": "model.tied", "ROPE_BASE": "model.rope_base",
    "LOGIT_SOFTCAP": "model.softcap", "TIED_EMBED_INIT_STD": "model.embedding_std",
    "TIED_EMBED_LR": "optimizer.embedding_learning_rate",
    "HEAD_LR": "optimizer.head_learning_rate", "MATRIX_LR": "optimizer.muon_learning_rate",
    "SCALAR_LR": "optimizer.learning_rate", "MUON_MOMENTUM": "optimizer.muon_momentum",
    "MUON_BACKEND_STEPS": "optimizer.muon_iterations", "BETA1": "optimizer.beta1",
    "BETA2": "optimizer.beta2", "ADAM_EPS": "optimizer.epsilon", "GRAD_CLIP_NORM": "optimizer.clip_norm",
}  # fmt: skip

# What only the baseline's model knows; TIE_EMBEDDINGS also chooses a rate.
OF_THE_BASELINE = {
    "QK_GAIN_INIT": "model.qk_gain", "NUM_KV_HEADS": "model.kv_heads", "MLP_MULT": "model.mlp_multiple",
    "TIE_EMBEDDINGS": "model.tied", "ROPE_BASE": "model.rope_base", "LOGIT_SOFTCAP": "model.softcap",
    "TIED_EMBED_INIT_STD": "model.embedding_std", "EMBED_DTYPE": "model.embedding_dtype",
    "CONTROL_TENSOR_NAME_PATTERNS": "model.control",
}  # fmt: skip

# Settings that follow from a variable, and the advice that helps here in place of the engine's.
VARIABLES = {path: name for name, path in SETTINGS.items()} | {
    "training.micro_batch": "TRAIN_BATCH_TOKENS", "training.output_dir": "RUN_ID", "training.priming_steps": "WARMUP_STEPS",
    "evaluation.micro_batch": "VAL_BATCH_SIZE", "evaluation.every": "VAL_LOSS_EVERY", "tracking.log_every": "TRAIN_LOG_EVERY",
    "optimizer.decay_steps": "WARMDOWN_ITERS", "optimizer.muon_momentum_warmup_steps": "MUON_MOMENTUM_WARMUP_STEPS",
    "budget.artifact_bytes": "ARTIFACT_LIMIT_BYTES",
    "optimizer.muon_momentum_start": "MUON_MOMENTUM_WARMUP_START", "model.embedding_dtype": "EMBED_DTYPE",
    "model.control": "CONTROL_TENSOR_NAME_PATTERNS", "model.file": "MODEL_FILE",
}  # fmt: skip
ADVICE = {
    "make room for it or choose another {0}": "make room for it or run in another folder",
    "make it writable or choose another {0}": "make it writable or run in another folder",
    "lower the learning rate, lengthen {0} or look at the data, and start again": (
        "lower the learning rate, set GRAD_CLIP_NORM or look at the data, and start again"
    ),
    "lower {0} or set {1}, and start again": "lower {0}, and start again",
    "lower {0}, or set {1} or {2}, and start again": "lower {0}, and start again",
    "shorten it, shrink the model or set {1}": "shorten it or shrink the model",
}


def variable(path: str) -> str:
    """What golf's users know a setting as."""
    return VARIABLES.get(path, path)


def advice(ours: str) -> str:
    """What to do, said with variables."""
    return ADVICE.get(ours, ours)


def accumulation(world_size: int) -> int:
    """The original's accumulation steps: 8 over the ranks, rounded up where the ranks do not divide 8."""
    return -(-SPANS // world_size)


def translate(values: Mapping[str, Any], world_size: int = 1, on_gpu: bool = False, folder: Path | None = None) -> ResolvedConfig:
    """The config of a run with these variables; a mistake is told in the words of its variables."""
    check_model(values)
    _check_batch(values)
    steps = accumulation(world_size)
    settings = {
        "data.spans": SPANS,
        "evaluation.micro_batch": validation_rows(
            values, world_size * steps, f"WORLD_SIZE={world_size} and GRAD_ACCUM_STEPS={steps}"
        ),
        "budget.artifact_bytes": values["ARTIFACT_LIMIT_BYTES"] if values["ARTIFACT_LIMIT_BYTES"] > 0 else None,
    }
    return config_of(values, settings, on_gpu, folder)


def config_of(
    values: Mapping[str, Any], settings: Mapping[str, Any], on_gpu: bool, folder: Path | None, name: Rename = variable
) -> ResolvedConfig:
    """The config of a run with these variables and a script's own settings, which win."""
    known = {path: values[name] for name, path in SETTINGS.items()} | _computed(values, on_gpu) | dict(settings)
    known["model.control"] = ",".join(values["CONTROL_TENSOR_NAME_PATTERNS"])
    if values.get("MODEL_FILE"):
        known = {path: value for path, value in known.items() if path not in OF_THE_BASELINE.values()}
        known |= {"model.family": "file", "model.file": values["MODEL_FILE"]}
    if folder is not None:
        known["training.output_dir"] = str(folder)
    try:
        return load_config(python=known, environment={})
    except ConfigError as error:
        untied = {} if values["TIE_EMBEDDINGS"] else {"optimizer.embedding_learning_rate": "EMBED_LR"}
        raise ConfigError(error.render(lambda path: untied.get(path) or name(path))) from None


def _computed(v: Mapping[str, Any], on_gpu: bool) -> dict[str, Any]:
    """The settings that say what several variables say, or what golf never lets anybody choose."""
    warmdown, cap, every = v["WARMDOWN_ITERS"], v["MAX_WALLCLOCK_SECONDS"], max(v["VAL_LOSS_EVERY"], 0)
    embedding = v["EMBED_DTYPE"] if v["EMBED_DTYPE"] != "auto" else "bf16" if on_gpu else "fp32"
    return {
        "model.family": "golf",
        "model.embedding_dtype": embedding,
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
    }


def check_model(v: Mapping[str, Any]) -> None:
    """The mistakes that golf's users know, in its words."""
    dim, heads, kv_heads = v["MODEL_DIM"], v["NUM_HEADS"], v["NUM_KV_HEADS"]
    for name in ("TRAIN_SEQ_LEN", "TRAIN_BATCH_TOKENS", "NUM_HEADS", "NUM_KV_HEADS"):
        if v[name] < 1:
            raise ConfigError(f"{name}={v[name]} must be positive")
    if v.get("MODEL_FILE"):
        baseline = read_variables({})
        idle = [name for name in OF_THE_BASELINE if v[name] != baseline[name] and name not in HEARD]
        if idle:
            raise ConfigError(
                f"{idle[0]} means nothing to the model of MODEL_FILE={v['MODEL_FILE']}; leave it out and set it there"
            )
        heads, kv_heads, dim = 1, 1, 2  # what the file says is checked when it is built
    if dim % heads:
        raise ConfigError(f"MODEL_DIM={dim} is not divisible by NUM_HEADS={heads}")
    if heads % kv_heads:
        raise ConfigError(f"NUM_HEADS={heads} is not divisible by NUM_KV_HEADS={kv_heads}")
    if dim // heads % 2:
        raise ConfigError(f"MODEL_DIM={dim} over NUM_HEADS={heads} gives heads of size {dim // heads}; rotary needs an even size")
    if not v["LOGIT_SOFTCAP"] > 0:
        raise ConfigError(f"LOGIT_SOFTCAP={v['LOGIT_SOFTCAP']} must be positive")
    if not v["TOKENIZER_PATH"].endswith(".model"):
        raise ConfigError(f"TOKENIZER_PATH={v['TOKENIZER_PATH']} must be a SentencePiece .model file")


def _check_batch(v: Mapping[str, Any]) -> None:
    """Refuse a step that does not fill its spans."""
    length, batch = v["TRAIN_SEQ_LEN"], v["TRAIN_BATCH_TOKENS"]
    part = SPANS * length
    if batch < part or batch % part:
        below = batch // part * part
        nearest = f"{below} and {below + part}" if below else f"{part}"
        raise ConfigError(
            f"TRAIN_BATCH_TOKENS={batch} is not a multiple of {SPANS} x TRAIN_SEQ_LEN={length}, the {SPANS} spans of a step; "
            f"the nearest that is: {nearest}"
        )


def validation_rows(v: Mapping[str, Any], parts: int, named: str) -> int:
    """The rows of one validation pass, of which VAL_BATCH_SIZE has so many parts; `named` says why."""
    length = v["TRAIN_SEQ_LEN"]
    if (rows := int(v["VAL_BATCH_SIZE"] // parts // length)) < 1:
        raise ConfigError(
            f"VAL_BATCH_SIZE={v['VAL_BATCH_SIZE']} over {named} is less than a row of TRAIN_SEQ_LEN={length}; "
            f"give at least {parts * length}"
        )
    return rows
