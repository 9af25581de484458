"""`python train_gpt_mlx.py`: the challenge's script for Macs. It differs from train_gpt.py in its variables, log and files.

It writes RUN_ID_mlx_model.npz (arrays by name) and RUN_ID_mlx_model.int8.ptz (a zlib-compressed pickle, see files.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ingot.backends.open import find_device, framework_version
from ingot.compat.golf.data_check import pattern
from ingot.compat.golf.main import Script, write_files
from ingot.compat.golf.main import main as run_main
from ingot.compat.golf.translate import make_config, rows_per_part
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
)  # weight matrices of a block  # fmt: skip
VECTORS = ("attn.q_gain", "attn_scale", "mlp_scale")
PROGRESS_EVERY = 25  # print progress every 25 validation batches

mlx_variable: Rename = names_of_settings(
    MLX_VARIABLES, {"data.spans": "the chunks set by GRAD_ACCUM_STEPS and MLX_MAX_MICROBATCH_TOKENS"}
)


def main(arguments: Sequence[str] = ()) -> int:
    """Run train_gpt_mlx.py and return its exit code."""
    return run_main(arguments, script=MLXScript())


def read_mlx_variables(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the value of every environment variable of train_gpt_mlx.py."""
    values = read_variables(environment, MLX_VARIABLES)
    if file := environment.get("MODEL_FILE"):
        raise ConfigError(f"MODEL_FILE={file} is a torch model; train it with train_gpt.py")
    if "TRAIN_SEQ_LEN" not in environment and values["TRAIN_MAX_SEQ_LEN"] is not None:
        values["TRAIN_SEQ_LEN"] = values["TRAIN_MAX_SEQ_LEN"]
    return values


@dataclass(frozen=True)
class Chunks:
    """Division of a step: `parts` gradient accumulation steps of `rows` sequences each, in chunks of `of_part` sequences."""

    parts: int
    rows: int
    of_part: list[int]

    @classmethod
    def of(cls, v: Mapping[str, Any]) -> Chunks:
        """Compute the chunks of a step from the environment variables."""
        parts, length = v["GRAD_ACCUM_STEPS"], v["TRAIN_SEQ_LEN"]
        rows = rows_per_part(v, "TRAIN_BATCH_TOKENS", parts, f"GRAD_ACCUM_STEPS={parts}")
        largest = min(rows, max(1, v["MLX_MAX_MICROBATCH_TOKENS"] // length))
        return cls(parts, rows, [largest] * (rows // largest) + ([rows % largest] if rows % largest else []))


def translate_mlx(values: Mapping[str, Any], device: Device, folder: Path | None = None) -> ResolvedConfig:
    """Return the config of a train_gpt_mlx.py run; error messages name environment variables instead of settings."""
    chunks, on_gpu = Chunks.of(values), device.precisions[0] == "bf16"
    settings = {
        "training.device": "mlx",
        "training.precision": device.precisions[0],
        "training.compile": on_gpu,  # compiling on a CPU starts g++ for every kernel
        "training.tokens_per_step": chunks.parts * chunks.rows * values["TRAIN_SEQ_LEN"],
        "training.micro_batch": chunks.of_part[0],
        "training.eager": values["MLX_EAGER_EVAL"],
        "training.loss_chunk": values["LOGIT_CHUNK_TOKENS"] if values["LOGIT_CHUNK_TOKENS"] > 0 else None,
        "data.spans": chunks.of_part if len(set(chunks.of_part)) > 1 else chunks.parts * len(chunks.of_part),
        "evaluation.micro_batch": rows_per_part(values, "VAL_BATCH_SIZE", chunks.parts, f"GRAD_ACCUM_STEPS={chunks.parts}"),
    }
    return make_config(MLX_VARIABLES, values, settings, on_gpu, folder, mlx_variable)


def optimizer_tensors(v: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of tensors trained by Muon and by Adam, not counting the embedding and an untied output head."""
    names = [f"blocks.{i}.{part}" for i in range(v["NUM_LAYERS"]) for part in MATRICES]
    matrices = sum(not any(word in name for word in v["CONTROL_TENSOR_NAME_PATTERNS"]) for name in names)
    return matrices, len(names) - matrices + len(VECTORS) * v["NUM_LAYERS"] + 1  # + 1: skip_weights


class MLXScript(Script):
    """A run of train_gpt_mlx.py. It logs more validation scores than golf's own script, and the files have no size limit."""

    name, exclusive = "train_gpt_mlx.py", False  # several runs can share a folder: file names include the run id
    variables: Mapping[str, Option] = MLX_VARIABLES
    state_score = "mlx_model"
    rename: Rename = staticmethod(mlx_variable)
    chunks: Chunks
    val_rows: int  # sequences per validation batch
    seconds = 0.0  # elapsed training seconds at the previous step

    def read(self, environment: Mapping[str, str]) -> None:
        self.values, self.ranks = read_mlx_variables(environment), Ranks()
        if (size := ranks_from_environment(environment).world_size) > 1:
            raise ConfigError(f"WORLD_SIZE={size}: {self.name} runs in one process; start it without torchrun")

    def config(self, folder: Path) -> ResolvedConfig:
        resolved = translate_mlx(self.values, find_device("mlx"), folder)
        self.chunks, self.val_rows = Chunks.of(self.values), resolved.config.evaluation.micro_batch
        return resolved

    def sources(self) -> tuple[list[str], list[str]]:
        files = Path(str(resources.files("ingot.backends"))).glob("mlx/*.py")
        return [path.read_text(encoding="utf-8") for path in sorted(files)], [f"Running MLX {framework_version('mlx')}"]

    def data_lines(self, name: str, shards: int, listed: int | None, usable: int) -> list[str]:
        values = self.values
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

    def bundle(self) -> bytes:
        return b""  # only train_gpt.py runs can be submitted

    def begin(self, report: BeginReport) -> None:
        self.seconds = report.elapsed_seconds
        super().begin(report)

    def begin_lines(self, report: BeginReport) -> list[str]:
        v, chunks, tied = self.values, self.chunks, self.values["TIE_EMBEDDINGS"]
        matrices, scalars = optimizer_tensors(v)
        embedding = v["EMBED_DTYPE"] if v["EMBED_DTYPE"] != "auto" else report.precision
        return [
            f"model_params:{report.parameters} vocab_size:{v['VOCAB_SIZE']} layers:{v['NUM_LAYERS']} dim:{v['MODEL_DIM']} "
            f"heads:{v['NUM_HEADS']} kv_heads:{v['NUM_KV_HEADS']} seq_len:{v['TRAIN_SEQ_LEN']} tie_embeddings:{tied}",
            f"iterations:{v['ITERATIONS']} train_batch_tokens:{v['TRAIN_BATCH_TOKENS']} grad_accum_steps:{chunks.parts} "
            f"microbatch_tokens:{v['TRAIN_BATCH_TOKENS'] // chunks.parts} microbatch_batch_size:{chunks.rows} "
            f"val_batch_size:{v['VAL_BATCH_SIZE']} "
            f"warmup_steps:{v['WARMUP_STEPS']} max_wallclock_seconds:{v['MAX_WALLCLOCK_SECONDS']:.3f}",
            f"mlx_max_microbatch_tokens:{v['MLX_MAX_MICROBATCH_TOKENS']}",
            f"optimizer:muon+adam muon_matrix_params:{matrices} scalar_params:{scalars} "
            f"embed_lr:{v['TIED_EMBED_LR'] if tied else v['EMBED_LR']} matrix_lr:{v['MATRIX_LR']} scalar_lr:{v['SCALAR_LR']} "
            f"muon_momentum:{v['MUON_MOMENTUM']} muon_steps:{v['MUON_BACKEND_STEPS']}"
            + ("" if tied else f" head_lr:{v['HEAD_LR']}"),
            f"val_bpb:enabled tokenizer_kind=sentencepiece tokenizer_path={v['TOKENIZER_PATH']}",
            f"compute_dtype:{DTYPES[report.precision]} compile:{report.precision == 'bf16'}",
            f"dtypes tok_emb:{DTYPES[embedding]} linear_weight:{DTYPES['fp32']} skip_weights:{DTYPES['fp32']}",
        ]

    def epochs(self, step: int) -> int:
        chunks = self.chunks  # each chunk reads one extra token, its last target
        tokens: int = chunks.parts * (chunks.rows * self.values["TRAIN_SEQ_LEN"] + len(chunks.of_part))
        return (step * tokens - 1) // self.train_tokens

    def waiting(self, what: str, done: int = 0, total: int = 0) -> None:
        batch, batches = -(-done // self.val_rows), -(-total // self.val_rows)
        if what == "evaluating" and batches > 1 and batch and (batch in (1, batches) or batch % PROGRESS_EVERY == 0):
            self.run_log.line(f"val_progress:{batch}/{batches}")

    def step(self, report: StepReport, log: bool) -> None:
        for epoch in range(self.epoch + 1, self.epochs(report.step) + 1):
            name, shards = self.data["dataset"], self.data["train_shards"]
            self.run_log.line(f"WARNING: starting epoch:{epoch + 1} dataset:{name} train_shards:{shards}")
            self.epoch = epoch
        seconds, self.seconds = report.elapsed_seconds - self.seconds, report.elapsed_seconds
        tokens_per_second = self.values["TRAIN_BATCH_TOKENS"] / max(seconds, 1e-9)
        self.step_line(report, f"train_loss:{report.loss:.4f}", f" tok_s:{tokens_per_second:.0f}")

    def export(self, trainer: Trainer, shutdown: Shutdown) -> Exported:
        from ingot.compat.golf.files import npz, read_weights

        assert trainer.outputs is not None
        state_path, packed_path = (Path(self.values["OUT_DIR"], self.values["RUN_ID"] + end) for end in (STATE, PACKED))
        self.early_stop_line(trainer)
        self.run_log.note(f"peak memory {trainer.backend.peak_memory()[0] >> 20} MiB")
        weights = trainer.backend.weights()
        state, (content, sizes) = npz(weights), self.packed(weights, "raw_pickle")
        copy = trainer.outputs.folder.path / "artifact" / packed_path.name
        write_files({state_path: state, packed_path: content, copy: content})
        self.run_log.line(f"saved_model:{state_path} bytes:{len(state)}")
        self.run_log.line(f"serialized_model_int8_zlib:{len(content)} bytes {sizes}")
        trainer.backend.load_weights(read_weights(content, str(packed_path)), str(packed_path))
        return self.exported(trainer, packed_path, len(content), {})
