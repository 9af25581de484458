"""The variables of train_gpt_mlx.py, and the Config of a run with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.compat.golf.translate import check_model, config_of, validation_rows, variable
from ingot.compat.golf.variables import TABLE, Variable, read_variables
from ingot.config.loading import ResolvedConfig
from ingot.errors import ConfigError
from ingot.runtime.devices import Device

OWN = (
    Variable("GRAD_ACCUM_STEPS", "int", 8, "Parts of a step; the last chunk of each may be shorter."),
    Variable("MLX_MAX_MICROBATCH_TOKENS", "int", 8192, "Tokens computed at once, the chunks of a part; at least a row."),
    Variable("MLX_EAGER_EVAL", "0 or 1", True, "Compute each chunk before the next; 0 takes more memory and may be faster."),
    Variable("LOGIT_CHUNK_TOKENS", "int", 0, "Tokens whose logits are held at once. 0: those of the chunk."),
    Variable("OUT_DIR", "text", "logs", "Folder of the log, the run folder and the two files."),
    Variable("TRAIN_MAX_SEQ_LEN", "int", None, "TRAIN_SEQ_LEN where that is unset."),
    Variable("VAL_LOSS_EVERY", "int", 0, "Steps between validations, step 0 among them. 0: only at the end."),
    Variable("TRAIN_BATCH_TOKENS", "int", 524_288, "Tokens of a step; what does not fill rows in its parts is left out."),
    Variable("RUN_ID", "text", None, "Name of the log, the run folder and the two files. Unset: a random one."),
    Variable("EVAL_ONLY_PATH", "text", None, "Score this _mlx_model.npz or _mlx_model.int8.ptz, and do not train."),
)  # fmt: skip
# No code is counted here, because a submission is a run of train_gpt.py; and a model of one's own is torch code.
NOT_READ = ("ARTIFACT_LIMIT_BYTES", "MODEL_FILE")
VARIABLES = {one.name: one for one in (*TABLE, *OWN) if one.name not in NOT_READ}
CHUNKS = "the chunks by GRAD_ACCUM_STEPS and MLX_MAX_MICROBATCH_TOKENS"
WORDS = {
    "training.micro_batch": "MLX_MAX_MICROBATCH_TOKENS", "training.loss_chunk": "LOGIT_CHUNK_TOKENS", "data.spans": CHUNKS,
}  # fmt: skip


def mlx_variable(path: str) -> str:
    """What users of the script know a setting as."""
    return WORDS.get(path) or variable(path)


def read_mlx_variables(environment: Mapping[str, str]) -> dict[str, Any]:
    """The value of every variable."""
    values = read_variables(environment, VARIABLES)
    if file := environment.get("MODEL_FILE"):
        raise ConfigError(f"MODEL_FILE={file} is a torch model; train it with train_gpt.py")
    if "TRAIN_SEQ_LEN" not in environment and (length := values["TRAIN_MAX_SEQ_LEN"]) is not None:
        if length < 1:
            raise ConfigError(f"TRAIN_MAX_SEQ_LEN={length} must be positive")
        values["TRAIN_SEQ_LEN"] = length
    return values


@dataclass(frozen=True)
class Cut:
    """How a step is cut: so many parts, each of so many rows, read and computed in chunks of which the last may be shorter."""

    parts: int
    rows: int
    largest: int  # rows of a chunk

    @classmethod
    def of(cls, v: Mapping[str, Any]) -> Cut:
        """The cut that the variables ask for."""
        for name in ("GRAD_ACCUM_STEPS", "MLX_MAX_MICROBATCH_TOKENS"):
            if v[name] < 1:
                raise ConfigError(f"{name}={v[name]} must be positive")
        parts, length = v["GRAD_ACCUM_STEPS"], v["TRAIN_SEQ_LEN"]
        if (rows := v["TRAIN_BATCH_TOKENS"] // parts // length) < 1:
            raise ConfigError(
                f"TRAIN_BATCH_TOKENS={v['TRAIN_BATCH_TOKENS']} over GRAD_ACCUM_STEPS={parts} is less than a row of "
                f"TRAIN_SEQ_LEN={length}; give at least {parts * length}"
            )
        return cls(parts, rows, min(rows, max(1, v["MLX_MAX_MICROBATCH_TOKENS"] // length)))

    @property
    def chunks(self) -> list[int]:
        """The rows of the chunks of a part."""
        rest = self.rows % self.largest
        return [self.largest] * (self.rows // self.largest) + ([rest] if rest else [])

    @property
    def spans(self) -> int | list[int]:
        """The chunks of a step as data.spans has them."""
        return self.chunks if self.rows % self.largest else self.parts * len(self.chunks)

    def validation_rows(self, v: Mapping[str, Any]) -> int:
        """The rows of one validation pass."""
        return validation_rows(v, self.parts, f"GRAD_ACCUM_STEPS={self.parts}")

    def tokens(self, seq_len: int) -> int:
        """Tokens that a step trains on."""
        return self.parts * self.rows * seq_len

    def taken(self, seq_len: int) -> int:
        """Tokens by which a step moves on: each chunk has a last target that is never an input."""
        return self.tokens(seq_len) + self.parts * len(self.chunks)


def translate_mlx(values: Mapping[str, Any], device: Device, folder: Path | None = None) -> ResolvedConfig:
    """The config of a run with these variables; a mistake is told in their words."""
    check_model(values)
    cut, on_gpu = Cut.of(values), device.precisions[0] == "bf16"
    settings = {
        "training.device": "mlx",
        "training.precision": device.precisions[0],
        "training.compile": on_gpu,  # on a CPU every kernel is a call of g++
        "training.tokens_per_step": cut.tokens(values["TRAIN_SEQ_LEN"]),
        "training.micro_batch": cut.largest,
        "training.eager": values["MLX_EAGER_EVAL"],
        "training.loss_chunk": values["LOGIT_CHUNK_TOKENS"] if values["LOGIT_CHUNK_TOKENS"] > 0 else None,
        "data.spans": cut.spans,
        "evaluation.micro_batch": cut.validation_rows(values),
    }
    return config_of(values, settings, on_gpu, folder, mlx_variable)
