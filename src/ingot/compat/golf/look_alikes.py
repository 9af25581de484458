"""Variables that are set, have no effect, and were probably meant to have one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from ingot.compat.golf.variables import NAMES, RANKS, Variable

# What scripts of records read. They are not misspelt, and mean nothing here.
OF_RECORDS = (
    "EVAL_STRIDE", "EVAL_SEQ_LEN", "EVAL_BATCH_SEQS", "SLIDING_WINDOW_ENABLED", "VAL_BATCH_TOKENS", "WARMDOWN_FRAC", "MIN_LR",
    "ENABLE_LOOPING_AT", "XSA_LAST_N", "ROPE_DIMS", "ROPE_TRAIN_SEQ_LEN", "LN_SCALE", "SKIP_GATES_ENABLED", "NUM_LOOPS",
    "LOOP_START", "LOOP_END", "PARALLEL_START_LAYER", "EMBEDDING_DIM", "BIGRAM_VOCAB_SIZE", "BIGRAM_DIM", "SMEAR_GATE_ENABLED",
    "GATE_WINDOW", "MLP_HIDDEN", "MUON_WD", "ADAM_WD", "EMBED_WD", "MUON_ROW_NORMALIZE", "EMA_DECAY", "EMA_ENABLED",
    "MATRIX_BITS", "EMBED_BITS", "GPTQ_CALIBRATION_BATCHES", "GPTQ_RESERVE_SECONDS", "COMPRESSOR", "LATE_QAT_THRESHOLD",
    "ARTIFACT_DIR", "TTT_EVAL_ONLY", "FORCE_STOP_STEP", "GRAD_ACCUM_STEPS", "MLX_MAX_MICROBATCH_TOKENS", "LOGIT_CHUNK_TOKENS",
    "MLX_EAGER_EVAL",
)  # fmt: skip


def look_alikes(environment: Mapping[str, str], names: Mapping[str, Variable] = NAMES) -> list[str]:
    """A sentence for every variable that is set, has no effect, and was probably meant to have one."""
    said = []
    for name in sorted(environment.keys() - names.keys() - set(RANKS)):
        if name in OF_RECORDS or name in NAMES:
            owner = "train_gpt.py" if name in NAMES else "scripts of some records"
            said.append(f"{name} belongs to {owner} and has no effect here")
        elif meant := _meant(name.upper(), names):
            said.append(f"{name}={environment[name]:.40} has no effect; did you mean {meant[0]}?")
    return said


def _meant(name: str, names: Iterable[str]) -> list[str]:
    """The variable that a name resembles, or words of which it is."""
    words = name.count("_") and len(name) > 5  # the shell itself sets `_`
    return get_close_matches(name, names, n=1, cutoff=0.8) or [other for other in names if words and f"_{name}_" in f"_{other}_"]
