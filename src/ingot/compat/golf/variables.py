"""The environment variables of train_gpt.py and train_gpt_mlx.py: names, types, defaults, meanings and corresponding settings.

docs/golf.md shows these tables. The defaults are those of the baseline; the recipe golf/seq4096 has the values of a record.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ingot.compat.options import Option, closest, defaults, help_lines, table
from ingot.errors import ConfigError
from ingot.model.settings import CONTROL
from ingot.runs.state import read_state

LIMIT_BYTES = 16_000_000  # the challenge's limit for the size of an artifact plus the code that reads it
STATE, PACKED, CODE = Path("final_model.pt"), Path("final_model.int8.ptz"), "train_gpt.py"  # files that a run writes
CARRIED = "train_gpt_model.py"  # file name for the custom model embedded in a submission's script
LOG = "train_gpt.log"  # copy of a run's log in the run folder
MAX_RUN_ID_BYTES = 200  # file names are limited to 255 bytes, and a run appends suffixes to its RUN_ID
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # set by torchrun

VARIABLES = table(
    Option("DATA_PATH", "str", "./data/datasets/fineweb10B_sp1024",
           "Folder with the shards fineweb_train_*.bin and fineweb_val_*.bin.", sets="data.path"),
    Option("TOKENIZER_PATH", "str", "./data/tokenizers/fineweb_1024_bpe.model",
           "SentencePiece model file of the tokenizer, used to count the bytes of tokens.", sets="data.tokenizer"),
    Option("TRUST_TOKENS", "flag", False,
           "Accept tokens that the tokenizer would not produce, such as random ones.", sets="data.trust_tokens", added=True),
    Option("RUN_ID", "str", None, "Name of the log, logs/RUN_ID.txt, and of the run folder, logs/RUN_ID. Unset: a random name.",
           sets="training.output_dir", computed=True),
    Option("SEED", "int", 1337, "Seed of the initial weights.", sets="training.seed"),
    Option("VAL_BATCH_SIZE", "int", 524_288,
           "Tokens per validation batch, over all ranks and accumulation steps.", sets="evaluation.micro_batch", computed=True),
    Option("VAL_LOSS_EVERY", "int", 1000,
           "Steps between validations, from step 0 on. 0: validate only at the end.", sets="evaluation.every", computed=True),
    Option("TRAIN_LOG_EVERY", "int", 200,
           "Steps between train_loss lines; steps 1 to 10 are always logged.", sets="tracking.log_every", computed=True),
    Option("ITERATIONS", "int", 20_000, "Maximum number of training steps.", sets="training.max_steps"),
    Option("WARMDOWN_ITERS", "int", 1200, "Length of the final linear decay of the learning rate, in steps of average duration. "
           "0: no decay.", sets="optimizer.decay_steps", computed=True),
    Option("WARMUP_STEPS", "int", 20,
           "Warm-up steps, whose updates are undone before the clock starts.", sets="training.priming_steps", computed=True),
    Option("TRAIN_BATCH_TOKENS", "int", 524_288,
           "Tokens per step, summed over ranks. Rounded down to a multiple of 8; an eighth of it must fill whole sequences.",
           low=1, sets="training.tokens_per_step"),
    Option("TRAIN_SEQ_LEN", "int", 1024, "Sequence length, in tokens, of training and validation.", low=1, sets="data.seq_len"),
    Option("MAX_WALLCLOCK_SECONDS", "float", 600.0,
           "Time limit of training in seconds; the step that exceeds it is the last. 0: no limit.", high=math.inf),
    Option("QK_GAIN_INIT", "float", 1.5, "Initial gain of the queries in every attention head.", sets="model.qk_gain"),
    Option("VOCAB_SIZE", "int", 1024, "Vocabulary size; must be equal to the tokenizer's.", sets="model.vocab_size"),
    Option("NUM_LAYERS", "int", 9,
           "Number of transformer blocks; the first half feeds the second half through skip connections.", sets="model.layers"),
    Option("NUM_KV_HEADS", "int", 4, "Number of key and value heads; must divide NUM_HEADS.", low=1, sets="model.kv_heads"),
    Option("MODEL_DIM", "int", 512, "Width of the model.", sets="model.width"),
    Option("NUM_HEADS", "int", 8, "Number of query heads; MODEL_DIM / NUM_HEADS must be even.", low=1, sets="model.heads"),
    Option("MLP_MULT", "int", 2, "Hidden width of the MLP, as a multiple of MODEL_DIM.", sets="model.mlp_multiple"),
    Option("TIE_EMBEDDINGS", "flag", True, "Use the weights of the token embedding for the output head too.", sets="model.tied"),
    Option("ROPE_BASE", "float", 10_000.0, "Base of the rotary position embedding.", sets="model.rope_base"),
    Option("LOGIT_SOFTCAP", "float", 30.0, "Logits are soft-capped to plus or minus this value.", above=0, sets="model.softcap"),
    Option("EMBED_LR", "float", 0.6, "Learning rate of the embedding if TIE_EMBEDDINGS=0."),
    Option("HEAD_LR", "float", 0.008, "Learning rate of the head if TIE_EMBEDDINGS=0.", sets="optimizer.head_learning_rate"),
    Option("TIED_EMBED_LR", "float", 0.05,
           "Learning rate of the embedding if TIE_EMBEDDINGS=1.", sets="optimizer.embedding_learning_rate", computed=True),
    Option("TIED_EMBED_INIT_STD", "float", 0.005,
           "Standard deviation of the embedding's initial weights if TIE_EMBEDDINGS=1.", sets="model.embedding_std"),
    Option("MATRIX_LR", "float", 0.04, "Learning rate of the matrices, which Muon trains.", sets="optimizer.muon_learning_rate"),
    Option("SCALAR_LR", "float", 0.04, "Learning rate of gains, scales, mixes and skip weights.", sets="optimizer.learning_rate"),
    Option("MUON_MOMENTUM", "float", 0.95, "Momentum of Muon.", sets="optimizer.muon_momentum"),
    Option("MUON_BACKEND_STEPS", "int", 5, "Newton-Schulz iterations per update of Muon.", sets="optimizer.muon_iterations"),
    Option("MUON_MOMENTUM_WARMUP_START", "float", 0.85,
           "Momentum of Muon at the first step.", sets="optimizer.muon_momentum_start", computed=True),
    Option("MUON_MOMENTUM_WARMUP_STEPS", "int", 500, "Steps until Muon's momentum reaches MUON_MOMENTUM. 0: no warm-up.",
           sets="optimizer.muon_momentum_warmup_steps", computed=True),
    Option("BETA1", "float", 0.9, "Adam's beta1.", sets="optimizer.beta1"),
    Option("BETA2", "float", 0.95, "Adam's beta2.", sets="optimizer.beta2"),
    Option("ADAM_EPS", "float", 1e-8, "Adam's epsilon.", sets="optimizer.epsilon"),
    Option("GRAD_CLIP_NORM", "float", 0.0,
           "Gradients are clipped to this norm. 0: no clipping.", sets="optimizer.clip_norm", computed=True),
    Option("CONTROL_TENSOR_NAME_PATTERNS", "list", CONTROL,
           "Parameters whose names contain one of these strings are trained by Adam and never quantised.",
           sets="model.control", computed=True),
    Option("INT8_KEEP_FLOAT_FP32_NAME_PATTERNS", "list", None,
           "Unquantised tensors whose names contain one of these strings stay in fp32. Unset: CONTROL_TENSOR_NAME_PATTERNS."),
    Option("ARTIFACT_LIMIT_BYTES", "int", LIMIT_BYTES,
           "Maximum size in bytes of the quantised model plus the code; a larger size is an error. 0: no limit.",
           sets="budget.artifact_bytes", computed=True, added=True),
    Option("EVAL_ONLY_PATH", "str", None, "Model file to score instead of training, such as final_model.int8.ptz.", added=True),
    Option("MODEL_FILE", "str", None,
           "Python file with a class Model to train instead of the baseline.", sets="model.file", computed=True, added=True),
    Option("EMBED_DTYPE", "str", "auto", "Dtype of the embedding. auto: bf16 on GPUs, fp32 on CPUs.", ("auto", "bf16", "fp32"),
           sets="model.embedding_dtype", computed=True, added=True),
    Option("INT8_RULE", "str", "golf", "Quantisation rule. golf: as in golf's script. exact: no minimum scale, and integers "
           "computed from the stored scale.", ("golf", "exact"), added=True),
)  # fmt: skip
# train_gpt_mlx.py has no size limit, because its runs are not submitted, and no custom models, because those use torch.
MLX_VARIABLES = {
    name: option for name, option in VARIABLES.items() if name not in ("ARTIFACT_LIMIT_BYTES", "MODEL_FILE")
} | table(
    replace(VARIABLES["RUN_ID"], help="Name of the log, the run folder and the two model files. Unset: a random name."),
    replace(VARIABLES["VAL_LOSS_EVERY"], default=0),
    replace(VARIABLES["TRAIN_BATCH_TOKENS"], help="Tokens per step, rounded down to a multiple of GRAD_ACCUM_STEPS sequences."),
    replace(VARIABLES["EVAL_ONLY_PATH"], help="Model file to score instead of training: *_mlx_model.npz or *.int8.ptz."),
    Option("GRAD_ACCUM_STEPS", "int", 8, "Gradient accumulation steps; the tokens of a step are split evenly among them.", low=1),
    Option("MLX_MAX_MICROBATCH_TOKENS", "int", 8192, "Maximum tokens per forward pass (a chunk); at least one sequence is used.",
           low=1, sets="training.micro_batch", computed=True),
    Option("MLX_EAGER_EVAL", "flag", True, "1: compute chunks one by one. 0: all at once; needs more memory but may be faster.",
           sets="training.eager", computed=True),
    Option("LOGIT_CHUNK_TOKENS", "int", 0,
           "Tokens whose logits are in memory at once. 0: all tokens of a chunk.", sets="training.loss_chunk", computed=True),
    Option("OUT_DIR", "str", "logs", "Folder that contains the log, the run folder and the two model files."),
    Option("TRAIN_MAX_SEQ_LEN", "int", None, "Sequence length, in tokens, if TRAIN_SEQ_LEN is not set.", low=1),
)  # fmt: skip
LOCAL = ("DATA_PATH", "TOKENIZER_PATH", "RUN_ID", "SEED", "EVAL_ONLY_PATH")  # set by each user, so not in a submission
# Variables of record scripts on the leaderboard: they have no effect here, but are not reported as typos.
OF_RECORDS = (
    "EVAL_STRIDE", "EVAL_SEQ_LEN", "EVAL_BATCH_SEQS", "SLIDING_WINDOW_ENABLED", "VAL_BATCH_TOKENS", "WARMDOWN_FRAC", "MIN_LR",
    "ENABLE_LOOPING_AT", "XSA_LAST_N", "ROPE_DIMS", "ROPE_TRAIN_SEQ_LEN", "LN_SCALE", "SKIP_GATES_ENABLED", "NUM_LOOPS",
    "LOOP_START", "LOOP_END", "PARALLEL_START_LAYER", "EMBEDDING_DIM", "BIGRAM_VOCAB_SIZE", "BIGRAM_DIM", "SMEAR_GATE_ENABLED",
    "GATE_WINDOW", "MLP_HIDDEN", "MUON_WD", "ADAM_WD", "EMBED_WD", "MUON_ROW_NORMALIZE", "EMA_DECAY", "EMA_ENABLED",
    "MATRIX_BITS", "EMBED_BITS", "GPTQ_CALIBRATION_BATCHES", "GPTQ_RESERVE_SECONDS", "COMPRESSOR", "LATE_QAT_THRESHOLD",
    "ARTIFACT_DIR", "TTT_EVAL_ONLY", "FORCE_STOP_STEP", "GRAD_ACCUM_STEPS", "MLX_MAX_MICROBATCH_TOKENS", "LOGIT_CHUNK_TOKENS",
    "MLX_EAGER_EVAL",
)  # fmt: skip


# Same rules as in golf's own script: "1e3" is not an integer, and "true" is not a flag.
PARSERS: dict[str, Callable[[str], Any]] = {
    "int": int, "float": float, "flag": lambda text: bool(int(text)), "str": str,
    "list": lambda text: tuple(item.strip() for item in text.split(",") if item.strip()),
}  # fmt: skip


def read_variables(environment: Mapping[str, str], options: Mapping[str, Option] = VARIABLES) -> dict[str, Any]:
    """Return the value of every variable of a script: its default, or the parsed text in `environment`."""
    values = defaults(options)
    for name, option in options.items():
        if (text := environment.get(name)) is None:
            continue
        try:
            value = PARSERS[option.kind](text)
        except ValueError:
            raise ConfigError(f"{name}={text} must be {option.allowed}") from None
        values[name] = option.check(value)
    if values["INT8_KEEP_FLOAT_FP32_NAME_PATTERNS"] is None:
        values["INT8_KEEP_FLOAT_FP32_NAME_PATTERNS"] = values["CONTROL_TENSOR_NAME_PATTERNS"]
    return values


def as_text(value: Any) -> str:
    """Format a value as the text of an environment variable; `read_variables` parses it back to the same value."""
    return ",".join(value) if isinstance(value, tuple | list) else str(int(value) if isinstance(value, bool) else value)


def differing(values: Mapping[str, Any]) -> dict[str, str]:
    """Return, as text, the variables that differ from the baseline, except the ones that each user sets, such as DATA_PATH."""
    baseline = read_variables({})
    return {name: as_text(value) for name, value in values.items() if name not in LOCAL and value != baseline[name]}


def look_alikes(environment: Mapping[str, str], options: Mapping[str, Option] = VARIABLES) -> list[str]:
    """Return a warning for every variable that belongs to another script or is probably a misspelt variable of this one."""
    warnings, names = [], list(options)
    for name in sorted(environment.keys() - options.keys() - set(RANKS)):
        if name in OF_RECORDS or name in VARIABLES:
            owner = "train_gpt.py" if name in VARIABLES else "some leaderboard record scripts"
            warnings.append(f"{name} is a variable of {owner} and has no effect here")
            continue
        word = name.upper()
        meant = closest(word, names, 0.8)
        if meant is None and "_" in word and len(word) > 5:  # not `_`, a variable set by the shell
            meant = next((other for other in names if f"_{word}_" in f"_{other}_"), None)
        if meant is not None:
            warnings.append(f"{name}={environment[name]:.40} has no effect; did you mean {meant}?")
    return warnings


def run_folder(logs: Path, run_id: str, first: bool) -> Path:
    """Return logs/RUN_ID; on the first rank, append -2, -3, ... to the name until the folder holds no completed run."""
    if Path(run_id).name != run_id or run_id == ".." or not run_id.isprintable() or len(os.fsencode(run_id)) > MAX_RUN_ID_BYTES:
        raise ConfigError(
            f"RUN_ID={run_id} names a file in {logs}/; it may not be a path, have line breaks or exceed {MAX_RUN_ID_BYTES} bytes"
        )
    folder, number = logs / run_id, 1
    while first and (state := read_state(folder)) is not None and state.status == "completed":
        number += 1
        folder = logs / f"{run_id}-{number}"
    return folder


def usage(script: str, options: Iterable[Option]) -> str:
    """Return the --help text of a script."""
    lines = [f"usage: [VARIABLE=value ...] python {script}"]
    if script == CODE:
        lines.append(f"       [VARIABLE=value ...] torchrun --standalone --nproc_per_node=N {script}")
    lines += ["", "Trains and scores a golf model. It takes no arguments; settings are environment variables:"]
    return "\n".join([*lines, *help_lines(options, "", lambda value: "" if value is None else as_text(value))])
