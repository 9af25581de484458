"""The environment variables of train_gpt.py: their names, kinds, defaults and meaning.

docs/golf.md shows this table, and the door knows no other. Defaults are the baseline's; golf/seq4096 is the recipe with others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ingot.errors import ConfigError
from ingot.model.settings import CONTROL

LIMIT_BYTES = 16_000_000  # of an artifact and the code that reads it
Kind = Literal["int", "float", "0 or 1", "text", "list"]


@dataclass(frozen=True)
class Variable:
    """One variable; `default` is what an unset one means."""

    name: str
    kind: Kind
    default: Any
    meaning: str
    choices: tuple[str, ...] = ()

    def read(self, text: str) -> Any:
        """The value of a text, by the rules of the original: whole numbers, numbers, and 0 or 1 for what is on or off."""
        try:
            match self.kind:
                case "int":
                    return int(text)
                case "float":
                    if math.isnan(number := float(text)):
                        raise ValueError
                    return number
                case "0 or 1":
                    return bool(int(text))
                case "list":
                    return tuple(item.strip() for item in text.split(",") if item.strip())
                case "text":
                    if self.choices and text not in self.choices:
                        raise ConfigError(f"{self.name}={text} is none of {', '.join(self.choices)}")
                    return text
        except ValueError:
            wanted = {"int": "a whole number", "float": "a number", "0 or 1": "0 or 1"}[self.kind]
            raise ConfigError(f"{self.name}={text} is not {wanted}") from None


TABLE = (
    Variable("DATA_PATH", "text", "./data/datasets/fineweb10B_sp1024", "Folder with fineweb_train_*.bin and fineweb_val_*.bin."),
    Variable("TOKENIZER_PATH", "text", "./data/tokenizers/fineweb_1024_bpe.model", "SentencePiece model, which counts bytes."),
    Variable("TRUST_TOKENS", "0 or 1", False, "Take tokens that TOKENIZER_PATH would not have made: random or lossy ones."),
    Variable("RUN_ID", "text", None, "Name of the log logs/RUN_ID.txt and of the run folder logs/RUN_ID. Unset: a random one."),
    Variable("SEED", "int", 1337, "Decides the initial weights, and nothing else."),
    Variable("VAL_BATCH_SIZE", "int", 524_288, "Tokens of one validation pass, over all ranks and accumulation steps."),
    Variable("VAL_LOSS_EVERY", "int", 1000, "Steps between validations, step 0 among them. 0: only at the end."),
    Variable("TRAIN_LOG_EVERY", "int", 200, "Steps between train_loss lines; steps 1 to 10 always have one."),
    Variable("ITERATIONS", "int", 20_000, "Most steps to take."),
    Variable("WARMDOWN_ITERS", "int", 1200, "Length of the last linear decay, in steps of average length. 0: none."),
    Variable("WARMUP_STEPS", "int", 20, "Steps taken and undone before the clock starts."),
    Variable("TRAIN_BATCH_TOKENS", "int", 524_288, "Tokens of a step, over all ranks; a multiple of 8 x TRAIN_SEQ_LEN."),
    Variable("TRAIN_SEQ_LEN", "int", 1024, "Tokens of a row, in training and validation."),
    Variable("MAX_WALLCLOCK_SECONDS", "float", 600.0, "Seconds of training; the step in which they end is the last. 0: no cap."),
    Variable("QK_GAIN_INIT", "float", 1.5, "Initial gain of every head's queries."),
    Variable("VOCAB_SIZE", "int", 1024, "Rows of the embedding; the tokenizer's."),
    Variable("NUM_LAYERS", "int", 9, "Blocks; the first half feeds the second through skips."),
    Variable("NUM_KV_HEADS", "int", 4, "Heads of keys and values; they divide NUM_HEADS."),
    Variable("MODEL_DIM", "int", 512, "Width of the model."),
    Variable("NUM_HEADS", "int", 8, "Heads of queries; they divide MODEL_DIM into even parts."),
    Variable("MLP_MULT", "int", 2, "Width inside the MLP, in MODEL_DIM."),
    Variable("TIE_EMBEDDINGS", "0 or 1", True, "The head is the embedding."),
    Variable("ROPE_BASE", "float", 10_000.0, "Base of the rotary positions."),
    Variable("LOGIT_SOFTCAP", "float", 30.0, "Logits are bent into plus or minus this."),
    Variable("EMBED_LR", "float", 0.6, "Learning rate of the embedding where it is not tied."),
    Variable("HEAD_LR", "float", 0.008, "Learning rate of a head of its own."),
    Variable("TIED_EMBED_LR", "float", 0.05, "Learning rate of the embedding where it is tied."),
    Variable("TIED_EMBED_INIT_STD", "float", 0.005, "Spread of the initial embedding where it is tied."),
    Variable("MATRIX_LR", "float", 0.04, "Learning rate of Muon."),
    Variable("SCALAR_LR", "float", 0.04, "Learning rate of gains, scales, mixes and skips."),
    Variable("MUON_MOMENTUM", "float", 0.95, "Momentum of Muon."),
    Variable("MUON_BACKEND_STEPS", "int", 5, "Newton-Schulz iterations."),
    Variable("MUON_MOMENTUM_WARMUP_START", "float", 0.85, "Momentum of the first step."),
    Variable("MUON_MOMENTUM_WARMUP_STEPS", "int", 500, "Steps until MUON_MOMENTUM is reached. 0: it is there at once."),
    Variable("BETA1", "float", 0.9, "Adam: decay of the mean of gradients."),
    Variable("BETA2", "float", 0.95, "Adam: decay of the mean of squared gradients."),
    Variable("ADAM_EPS", "float", 1e-8, "Adam: added to the root of the second moment."),
    Variable("GRAD_CLIP_NORM", "float", 0.0, "Gradients are scaled down to this norm. 0: never."),
    Variable("CONTROL_TENSOR_NAME_PATTERNS", "list", CONTROL, "Parts of names: Adam trains these, nothing quantises them."),
    Variable("INT8_KEEP_FLOAT_FP32_NAME_PATTERNS", "list", None, "Parts of names of tensors kept in float32. Unset: as above."),
    Variable("ARTIFACT_LIMIT_BYTES", "int", LIMIT_BYTES, "Largest file plus code; more is an error at the end. 0: no limit."),
    Variable("EVAL_ONLY_PATH", "text", None, "Score this final_model.int8.ptz or final_model.pt, and do not train."),
    Variable("MODEL_FILE", "text", None, "Python file with a class Model, trained instead of the baseline's model."),
    Variable("EMBED_DTYPE", "text", "auto", "Number format of the embedding. auto: bf16 on GPUs.", ("auto", "bf16", "fp32")),
    Variable("INT8_RULE", "text", "golf", "exact: no least scale, and codes by the scale that is stored.", ("golf", "exact")),
)  # fmt: skip
NAMES = {variable.name: variable for variable in TABLE}
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # set by torchrun
STATE, PACKED, CODE = Path("final_model.pt"), Path("final_model.int8.ptz"), "train_gpt.py"  # what a run leaves
CARRIED = "train_gpt_model.py"  # what a submission's script calls the model of its own that it carries
LOG = "train_gpt.log"  # the lines of one run, in its folder
OF_ONE_RUN = ("DATA_PATH", "TOKENIZER_PATH", "RUN_ID", "SEED", "EVAL_ONLY_PATH")


def read_variables(environment: Mapping[str, str], names: Mapping[str, Variable] = NAMES) -> dict[str, Any]:
    """The value of every variable of a script."""
    given = {name: variable.read(environment[name]) for name, variable in names.items() if name in environment}
    values = {**{name: variable.default for name, variable in names.items()}, **given}
    if values["INT8_KEEP_FLOAT_FP32_NAME_PATTERNS"] is None:
        values["INT8_KEEP_FLOAT_FP32_NAME_PATTERNS"] = values["CONTROL_TENSOR_NAME_PATTERNS"]
    return values


def as_lines(values: Mapping[str, Any]) -> list[str]:
    """NAME=value for every variable that has one, as a shell would set it; `read_variables` gives the same values back."""
    return [f"{name}={as_text(value)}" for name, value in values.items() if value is not None]


def as_text(value: Any) -> str:
    """A value as it stands in the environment."""
    return ",".join(value) if isinstance(value, tuple | list) else str(int(value) if isinstance(value, bool) else value)


def differing(values: Mapping[str, Any]) -> dict[str, str]:
    """What makes a run another than the baseline, as text; where it runs and its seed do not."""
    baseline = read_variables({})
    return {name: as_text(value) for name, value in values.items() if name not in OF_ONE_RUN and value != baseline[name]}


def markdown(table: Iterable[Variable] = TABLE) -> str:
    """The table as docs/golf.md shows it."""
    rows = ["| variable | kind | default | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{v.name}` | {' or '.join(v.choices) or v.kind} | {_default(v).replace(',', ', ')} | {v.meaning} |" for v in table
    ]
    return "\n".join(rows) + "\n"


def usage(script: str = CODE, table: Iterable[Variable] = TABLE) -> str:
    """What --help of a script prints: every variable with its default and meaning."""
    lines = [f"usage: [VARIABLE=value ...] python {script}"]
    if script == CODE:
        lines.append(f"       [VARIABLE=value ...] torchrun --standalone --nproc_per_node=N {script}")
    lines += ["", "Trains and scores a golf model. It takes no arguments; settings are environment variables:"]
    lines += [f"  {v.name}={_default(v)}\n      {v.meaning} ({' or '.join(v.choices) or v.kind})" for v in table]
    return "\n".join(lines)


def _default(v: Variable) -> str:
    """The default as the environment would have it; nothing where unset means something else."""
    return as_text(v.default) if v.default is not None else ""
