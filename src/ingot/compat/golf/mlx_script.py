"""`python train_gpt_mlx.py`: the challenge's script for Macs. It overrides how train_gpt.py handles variables, log and files.

It writes RUN_ID_mlx_model.npz, arrays by name, and RUN_ID_mlx_model.int8.ptz, a zlib-compressed pickle (files.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ingot.backends.open import find_device, framework_version
from ingot.compat.golf.data_check import pattern
from ingot.compat.golf.log import GolfReporter, RunLog
from ingot.compat.golf.main import GolfExporter, Script, start_script, write_files
from ingot.compat.golf.translate import check_model, make_config, validation_rows
from ingot.compat.golf.variables import MLX_VARIABLES, read_variables
from ingot.compat.options import Option, names_of_settings
from ingot.config.loading import ResolvedConfig
from ingot.errors import ConfigError, Rename
from ingot.runs.reporter import BeginReport, StepReport
from ingot.runtime.devices import Device
from ingot.runtime.ranks import Ranks, ranks_from_environment
from ingot.train.end import Exported
from ingot.train.stop import Shutdown
from ingot.train.trainer import Trainer

STATE, PACKED = "_mlx_model.npz", "_mlx_model.int8.ptz"
DTYPES = {"bf16": "mlx.core.bfloat16", "fp32": "mlx.core.float32"}
MATRICES = (
    "attn.c_q.weight", "attn.c_k.weight", "attn.c_v.weight", "attn.proj.weight", "mlp.fc.weight", "mlp.proj.weight", "resid_mix",
)  # parameters per block  # fmt: skip
VECTORS = ("attn.q_gain", "attn_scale", "mlp_scale")
PROGRESS_EVERY = 25  # print progress every 25 validation batches

mlx_variable: Rename = names_of_settings(
    MLX_VARIABLES, {"data.spans": "the chunks by GRAD_ACCUM_STEPS and MLX_MAX_MICROBATCH_TOKENS"}
)


def main(arguments: Sequence[str] = ()) -> int:
    """Run train_gpt_mlx.py and return its exit code."""
    return start_script(MLXScript(), arguments)


def read_mlx_variables(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the value of every variable."""
    values = read_variables(environment, MLX_VARIABLES)
    if file := environment.get("MODEL_FILE"):
        raise ConfigError(f"MODEL_FILE={file} is a torch model; train it with train_gpt.py")
    if "TRAIN_SEQ_LEN" not in environment and values["TRAIN_MAX_SEQ_LEN"] is not None:
        values["TRAIN_SEQ_LEN"] = values["TRAIN_MAX_SEQ_LEN"]
    return values


@dataclass(frozen=True)
class Chunks:
    """How a step is split: into `parts` of `rows` sequences each, computed in chunks whose sizes `of_part` lists."""

    parts: int
    rows: int
    of_part: list[int]

    @classmethod
    def of(cls, v: Mapping[str, Any]) -> Chunks:
        """Compute the chunks from the variables."""
        parts, length = v["GRAD_ACCUM_STEPS"], v["TRAIN_SEQ_LEN"]
        if (rows := v["TRAIN_BATCH_TOKENS"] // parts // length) < 1:
            raise ConfigError(
                f"TRAIN_BATCH_TOKENS={v['TRAIN_BATCH_TOKENS']} over GRAD_ACCUM_STEPS={parts} is less than one sequence of "
                f"TRAIN_SEQ_LEN={length}; give at least {parts * length}"
            )
        largest = min(rows, max(1, v["MLX_MAX_MICROBATCH_TOKENS"] // length))
        return cls(parts, rows, [largest] * (rows // largest) + ([rows % largest] if rows % largest else []))

    @property
    def spans(self) -> int | list[int]:
        """Return the chunks of a step in the form that data.spans takes."""
        return self.of_part if len(set(self.of_part)) > 1 else self.parts * len(self.of_part)

    def consumed(self, seq_len: int) -> int:
        """Return the number of tokens that a step reads: the last target of each chunk is never an input."""
        return self.parts * (self.rows * seq_len + len(self.of_part))


def val_rows(v: Mapping[str, Any]) -> int:
    """Return the number of sequences per validation batch."""
    return validation_rows(v, v["GRAD_ACCUM_STEPS"], f"GRAD_ACCUM_STEPS={v['GRAD_ACCUM_STEPS']}")


def translate_mlx(values: Mapping[str, Any], device: Device, folder: Path | None = None) -> ResolvedConfig:
    """Return the config of a train_gpt_mlx.py run; errors name its variables."""
    check_model(values)
    chunks, on_gpu = Chunks.of(values), device.precisions[0] == "bf16"
    settings = {
        "training.device": "mlx",
        "training.precision": device.precisions[0],
        "training.compile": on_gpu,  # compiling on a CPU starts g++ for every kernel
        "training.tokens_per_step": chunks.parts * chunks.rows * values["TRAIN_SEQ_LEN"],
        "training.micro_batch": chunks.of_part[0],
        "training.eager": values["MLX_EAGER_EVAL"],
        "training.loss_chunk": values["LOGIT_CHUNK_TOKENS"] if values["LOGIT_CHUNK_TOKENS"] > 0 else None,
        "data.spans": chunks.spans,
        "evaluation.micro_batch": val_rows(values),
    }
    return make_config(MLX_VARIABLES, values, settings, on_gpu, folder, mlx_variable)


class MLXReporter(GolfReporter):
    """Writes the log lines of the original's MLX script, including validations that the original does not print."""

    def __init__(self, values: Mapping[str, Any], run_log: RunLog, data: Mapping[str, Any]):
        super().__init__(values, run_log, data)
        self._chunks, self._train_tokens, self._seconds = Chunks.of(values), 1, 0.0

    def begin(self, report: BeginReport) -> None:
        v, line, chunks = self._v, self._run_log.line, self._chunks
        self._run_log.write(Path(report.run))
        tied, length, tokens = v["TIE_EMBEDDINGS"], v["TRAIN_SEQ_LEN"], v["TRAIN_BATCH_TOKENS"] // chunks.parts
        line(
            f"model_params:{report.parameters} vocab_size:{v['VOCAB_SIZE']} layers:{v['NUM_LAYERS']} dim:{v['MODEL_DIM']} "
            f"heads:{v['NUM_HEADS']} kv_heads:{v['NUM_KV_HEADS']} seq_len:{length} tie_embeddings:{tied}"
        )
        line(
            f"iterations:{v['ITERATIONS']} train_batch_tokens:{v['TRAIN_BATCH_TOKENS']} grad_accum_steps:{chunks.parts} "
            f"microbatch_tokens:{tokens} microbatch_batch_size:{chunks.rows} val_batch_size:{v['VAL_BATCH_SIZE']} "
            f"warmup_steps:{v['WARMUP_STEPS']} max_wallclock_seconds:{v['MAX_WALLCLOCK_SECONDS']:.3f}"
        )
        line(f"mlx_max_microbatch_tokens:{v['MLX_MAX_MICROBATCH_TOKENS']}")
        matrices, scalars = optimizer_tensors(v)
        line(
            f"optimizer:muon+adam muon_matrix_params:{matrices} scalar_params:{scalars} "
            f"embed_lr:{v['TIED_EMBED_LR'] if tied else v['EMBED_LR']} matrix_lr:{v['MATRIX_LR']} scalar_lr:{v['SCALAR_LR']} "
            f"muon_momentum:{v['MUON_MOMENTUM']} muon_steps:{v['MUON_BACKEND_STEPS']}"
            + ("" if tied else f" head_lr:{v['HEAD_LR']}")
        )
        line(f"val_bpb:enabled tokenizer_kind=sentencepiece tokenizer_path={v['TOKENIZER_PATH']}")
        line(f"compute_dtype:{DTYPES[report.precision]} compile:{report.precision == 'bf16'}")
        embedding = v["EMBED_DTYPE"] if v["EMBED_DTYPE"] != "auto" else report.precision
        line(f"dtypes tok_emb:{DTYPES[embedding]} linear_weight:{DTYPES['fp32']} skip_weights:{DTYPES['fp32']}")
        self._run_log.note(f"run folder {report.run}, {report.device}, {report.micro_batch} rows at once")
        self._tokens_note(report)
        self._train_tokens, self._seconds = report.train_tokens, report.elapsed_seconds
        if report.resumed_at:
            self._run_log.note(f"resumes from step {report.resumed_at}")
            self._epoch = self._epochs(report.resumed_at)

    def waiting(self, what: str, done: int = 0, total: int = 0) -> None:
        rows = val_rows(self._v)
        batch, batches = -(-done // rows), -(-total // rows)
        if what == "evaluating" and batches > 1 and batch and (batch in (1, batches) or batch % PROGRESS_EVERY == 0):
            self._run_log.line(f"val_progress:{batch}/{batches}")

    def step(self, report: StepReport, log: bool) -> None:
        for epoch in range(self._epoch + 1, self._epochs(report.step) + 1):
            name, shards = self._data["dataset"], self._data["train_shards"]
            self._run_log.line(f"WARNING: starting epoch:{epoch + 1} dataset:{name} train_shards:{shards}")
            self._epoch = epoch
        seconds, self._seconds = report.elapsed_seconds - self._seconds, report.elapsed_seconds
        self._step_line(report, f" tok_s:{self._v['TRAIN_BATCH_TOKENS'] / max(seconds, 1e-9):.0f}")

    def _epochs(self, step: int) -> int:
        """Return how many epochs of the training data are complete after `step` steps."""
        return (step * self._chunks.consumed(self._v["TRAIN_SEQ_LEN"]) - 1) // self._train_tokens


def optimizer_tensors(v: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of tensors trained by Muon and by Adam, without the embedding and an untied head."""
    names = [f"blocks.{i}.{part}" for i in range(v["NUM_LAYERS"]) for part in MATRICES]
    matrices = sum(not any(word in name for word in v["CONTROL_TENSOR_NAME_PATTERNS"]) for name in names)
    return matrices, len(names) - matrices + len(VECTORS) * v["NUM_LAYERS"] + 1  # 1: skip_weights


class MLXExporter(GolfExporter):
    """Writes and scores the two files; the MLX script has no size limit."""

    def __init__(self, values: Mapping[str, Any], run_log: RunLog, data: Mapping[str, Any]):
        self._v, self._run_log, self._data, self.over = values, run_log, data, 0

    def __call__(self, trainer: Trainer, shutdown: Shutdown) -> Exported:
        from ingot.compat.golf.files import npz, read_weights

        assert trainer.outputs is not None
        start = Path(self._v["OUT_DIR"]) / self._v["RUN_ID"]
        state_path, packed_path = Path(f"{start}{STATE}"), Path(f"{start}{PACKED}")
        self._early_stop_line(trainer)
        self._run_log.note(f"peak memory {trainer.backend.peak_memory()[0] >> 20} MiB")
        weights = trainer.backend.weights()
        state, (content, sizes) = npz(weights), self._packed(weights, "raw_pickle")
        copy = trainer.outputs.folder.path / "artifact" / packed_path.name
        write_files({state_path: state, packed_path: content, copy: content})
        self._run_log.line(f"saved_model:{state_path} bytes:{len(state)}")
        self._run_log.line(f"serialized_model_int8_zlib:{len(content)} bytes {sizes}")
        trainer.backend.load_weights(read_weights(content, str(packed_path)), str(packed_path))
        return self._score(trainer, packed_path, len(content), {})


class MLXScript(Script):
    """train_gpt_mlx.py."""

    name, exclusive = "train_gpt_mlx.py", False  # several runs can share a folder: file names include the run id
    variables: Mapping[str, Option] = MLX_VARIABLES
    state_score = "mlx_model"
    variable: Rename = staticmethod(mlx_variable)
    reporter = MLXReporter
    exporter = MLXExporter

    def read(self, environment: Mapping[str, str]) -> tuple[dict[str, Any], Ranks]:
        values, ranks = read_mlx_variables(environment), ranks_from_environment(environment)
        if ranks.world_size > 1:
            raise ConfigError(f"WORLD_SIZE={ranks.world_size}: {self.name} runs in one process; start it without torchrun")
        return values, Ranks()

    def logs(self, values: Mapping[str, Any]) -> Path:
        return Path(values["OUT_DIR"])

    def config(self, values: Mapping[str, Any], ranks: Ranks, folder: Path) -> ResolvedConfig:
        return translate_mlx(values, find_device("mlx"), folder)

    def head(self, values: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        files = Path(str(resources.files("ingot.backends"))).glob("mlx/*.py")
        return [path.read_text(encoding="utf-8") for path in sorted(files)], [f"Running MLX {framework_version('mlx')}"]

    def data_lines(self, values: Mapping[str, Any], name: str, shards: int, listed: int | None, usable: int) -> list[str]:
        counts = f"dataset:{name} train_shards:{shards}" + (f"/{listed}" if listed is not None else "")
        dataset = f"train_loader:{counts}"
        if listed is not None and shards < listed:
            dataset = f"WARNING: train_loader:subset {counts} new epochs will arrive sooner than the full dataset"
        return [
            f"run_id:{values['RUN_ID']}",
            f"mlx_version:{framework_version('mlx')}",
            f"train_loader:shards pattern={pattern(values, 'train')}",
            f"val_loader:shards pattern={pattern(values, 'val')} tokens:{usable}",
            dataset,
            f"tokenizer_path:{values['TOKENIZER_PATH']}",
        ]
