"""The log of train_gpt_mlx.py: the original's lines, and what it does not say in lines that begin with `note:`.

Every validation that ran is told; the original hides those whose step is not a multiple of 25.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from ingot.backends.open import framework_version
from ingot.compat.golf.data_check import Found, pattern
from ingot.compat.golf.log import GolfReporter, RunLog
from ingot.compat.golf.mlx.translate import Cut
from ingot.runs.reporter import BeginReport, StepReport

DTYPES = {"bf16": "mlx.core.bfloat16", "fp32": "mlx.core.float32"}
MATRICES = (
    "attn.c_q.weight", "attn.c_k.weight", "attn.c_v.weight", "attn.proj.weight", "mlp.fc.weight", "mlp.proj.weight", "resid_mix",
)  # of a block  # fmt: skip
VECTORS = ("attn.q_gain", "attn_scale", "mlp_scale")
PROGRESS_EVERY = 25  # batches of a validation
SOURCES = ("models.py", "backend.py")


def mlx_head() -> tuple[list[str], list[str]]:
    """The sources that compute, and what they run on."""
    folder = resources.files("ingot.backends").joinpath("mlx")
    return [folder.joinpath(name).read_text(encoding="utf-8") for name in SOURCES], [f"Running MLX {framework_version('mlx')}"]


def tell_mlx_data(values: Mapping[str, Any], found: Found) -> list[str]:
    """What the log says before the model is built."""
    shards = f"train_shards:{found.shards}" + (f"/{found.listed}" if found.listed is not None else "")
    dataset = f"train_loader:dataset:{found.name} {shards}"
    if found.listed is not None and found.shards < found.listed:
        dataset = (
            f"WARNING: train_loader:subset dataset:{found.name} {shards} new epochs will arrive sooner than the full dataset"
        )
    return [
        f"run_id:{values['RUN_ID']}",
        f"mlx_version:{framework_version('mlx')}",
        f"train_loader:shards pattern={pattern(values, 'train')}",
        f"val_loader:shards pattern={pattern(values, 'val')} tokens:{found.usable}",
        dataset,
        f"tokenizer_path:{values['TOKENIZER_PATH']}",
    ]


class MLXReporter(GolfReporter):
    """Tells a run in the lines of the original's MLX script."""

    def __init__(self, values: Mapping[str, Any], run_log: RunLog, data: Mapping[str, Any]):
        super().__init__(values, run_log)
        self._data, self._cut = data, Cut.of(values)
        self._validation_rows = self._cut.validation_rows(values)
        self._train_tokens, self._seconds = 1, 0.0

    def begin(self, report: BeginReport) -> None:
        v, line, cut = self._v, self._run_log.line, self._cut
        self._run_log.write(Path(report.run))
        tied, length, tokens = v["TIE_EMBEDDINGS"], v["TRAIN_SEQ_LEN"], v["TRAIN_BATCH_TOKENS"] // cut.parts
        line(
            f"model_params:{report.parameters} vocab_size:{v['VOCAB_SIZE']} layers:{v['NUM_LAYERS']} dim:{v['MODEL_DIM']} "
            f"heads:{v['NUM_HEADS']} kv_heads:{v['NUM_KV_HEADS']} seq_len:{length} tie_embeddings:{tied}"
        )
        line(
            f"iterations:{v['ITERATIONS']} train_batch_tokens:{v['TRAIN_BATCH_TOKENS']} grad_accum_steps:{cut.parts} "
            f"microbatch_tokens:{tokens} microbatch_batch_size:{cut.rows} val_batch_size:{v['VAL_BATCH_SIZE']} "
            f"warmup_steps:{v['WARMUP_STEPS']} max_wallclock_seconds:{v['MAX_WALLCLOCK_SECONDS']:.3f}"
        )
        line(f"mlx_max_microbatch_tokens:{v['MLX_MAX_MICROBATCH_TOKENS']}")
        matrices, scalars = trained_by(v)
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
        if tokens % length or v["TRAIN_BATCH_TOKENS"] % cut.parts:
            self._run_log.note(
                f"a step trains on {report.tokens_per_step} of its {v['TRAIN_BATCH_TOKENS']} tokens, the whole rows"
            )
        self._train_tokens, self._seconds = report.train_tokens, report.elapsed_seconds
        if report.resumed_at:
            self._run_log.note(f"goes on from step {report.resumed_at}")
            self._epoch = self._passes(report.resumed_at)

    def waiting(self, what: str, done: int = 0, total: int = 0) -> None:
        batch, batches = -(-done // self._validation_rows), -(-total // self._validation_rows)
        if what == "evaluating" and batches > 1 and batch and (batch in (1, batches) or batch % PROGRESS_EVERY == 0):
            self._run_log.line(f"val_progress:{batch}/{batches}")

    def step(self, report: StepReport, log: bool) -> None:
        v = self._v
        for epoch in range(self._epoch + 1, self._passes(report.step) + 1):
            name, shards = self._data["dataset"], self._data["train_shards"]
            self._run_log.line(f"WARNING: starting epoch:{epoch + 1} dataset:{name} train_shards:{shards}")
            self._epoch = epoch
        seconds, self._seconds = report.elapsed_seconds - self._seconds, report.elapsed_seconds
        self._tell(report, f" tok_s:{v['TRAIN_BATCH_TOKENS'] / max(seconds, 1e-9):.0f}")

    def _passes(self, step: int) -> int:
        """How many times the training data has ended in the first steps."""
        return (step * self._cut.taken(self._v["TRAIN_SEQ_LEN"]) - 1) // self._train_tokens


def trained_by(v: Mapping[str, Any]) -> tuple[int, int]:
    """How many tensors Muon and Adam have, the embedding and a head apart."""
    names = [f"blocks.{i}.{part}" for i in range(v["NUM_LAYERS"]) for part in MATRICES]
    matrices = sum(not any(word in name for word in v["CONTROL_TENSOR_NAME_PATTERNS"]) for name in names)
    return matrices, len(names) - matrices + len(VECTORS) * v["NUM_LAYERS"] + 1  # skip_weights
