"""`python train_gpt_mlx.py`: the challenge's script for Macs. It overrides what differs from train_gpt.py: variables, log, files.

Its files are RUN_ID_mlx_model.npz, arrays by name, and RUN_ID_mlx_model.int8.ptz, a pickle in zlib. The original's MLX script
rotates positions the other way than its CUDA script, and our weights follow CUDA. In these files they follow the MLX script: the
halves of every head's rows in c_q and c_k are swapped, which is exact. A pickle may run code; here it can only make arrays.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.backends.open import find_device, framework_version
from ingot.compat.golf.data_check import DataFacts, pattern
from ingot.compat.golf.files import (
    MAX_UNPACKED_BYTES,
    QUANTISERS,
    ROUND_TRIP,
    early_stop_line,
    is_zip,
    keep_copies,
    quantised_contents,
    read_file,
    restored,
    score_lines,
    unpacked,
    write_packed,
)
from ingot.compat.golf.log import GolfReporter, RunLog
from ingot.compat.golf.main import Script, start_script
from ingot.compat.golf.translate import check_model, make_config, validation_rows
from ingot.compat.golf.variables import MLX_VARIABLES, read_variables
from ingot.compat.options import Option, names_of_settings
from ingot.config.loading import ResolvedConfig
from ingot.errors import CheckpointError, ConfigError, Rename
from ingot.runs.reporter import BeginReport, Reporter, StepReport
from ingot.runtime.devices import Device
from ingot.runtime.files import write_atomically, writing
from ingot.runtime.machine import made_by
from ingot.runtime.ranks import Ranks
from ingot.runtime.tensors import TensorRecord, to_array
from ingot.train.end import Exported
from ingot.train.stop import Shutdown
from ingot.train.trainer import Trainer

ONE_PROCESS = {"WORLD_SIZE": "1", "RANK": "0"}  # as torchrun sets them for one process
STATE, PACKED = "_mlx_model.npz", "_mlx_model.int8.ptz"
DTYPES = {"bf16": "mlx.core.bfloat16", "fp32": "mlx.core.float32"}
MATRICES = (
    "attn.c_q.weight", "attn.c_k.weight", "attn.c_v.weight", "attn.proj.weight", "mlp.fc.weight", "mlp.proj.weight", "resid_mix",
)  # parameters of a block  # fmt: skip
VECTORS = ("attn.q_gain", "attn_scale", "mlp_scale")
PROGRESS_EVERY = 25  # validation batches
SWAPPED = (".attn.c_q.weight", ".attn.c_k.weight")
DTYPE_CODES = {"<f4": "F32", "<f2": "F16", "|i1": "I8", "|V2": "BF16"}  # numpy has no bfloat16: MLX writes its bits as two bytes
PICKLE_PROTOCOL = 5  # the original's, and the first that stores the bytes of an array as they are

mlx_variable: Rename = names_of_settings(
    MLX_VARIABLES, {"data.spans": "the chunks by GRAD_ACCUM_STEPS and MLX_MAX_MICROBATCH_TOKENS"}
)


def main(arguments: Sequence[str] = ()) -> int:
    """Run train_gpt_mlx.py and return its exit code."""
    return start_script(MLXScript(), arguments)


class MLXScript(Script):
    """train_gpt_mlx.py."""

    name, exclusive = "train_gpt_mlx.py", False  # its files are named after its runs
    variables: Mapping[str, Option] = MLX_VARIABLES
    variable: Rename = staticmethod(mlx_variable)

    def read(self, environment: Mapping[str, str]) -> tuple[dict[str, Any], Ranks]:
        values = read_mlx_variables(environment)
        ranks = {name: environment[name] for name in ONE_PROCESS if name in environment}
        for name, value in ranks.items():
            if value != ONE_PROCESS[name]:
                raise ConfigError(f"{name}={value}: {self.name} runs in one process; start it without torchrun")
        if len(ranks) == 1:
            ((name, value),) = ranks.items()
            (missing,) = ONE_PROCESS.keys() - ranks
            raise ConfigError(f"{name}={value} is set and {missing} is not; unset both, or start it with torchrun")
        return values, Ranks()

    def logs(self, values: Mapping[str, Any]) -> Path:
        return Path(values["OUT_DIR"])

    def config(self, values: Mapping[str, Any], ranks: Ranks, folder: Path) -> ResolvedConfig:
        try:
            device = find_device("mlx")
        except ConfigError as error:
            raise ConfigError(f"{self.name} needs mlx, which is not installed", advice=error.advice) from None
        return translate_mlx(values, device, folder)

    def head(self, values: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        files = Path(str(resources.files("ingot.backends"))).glob("mlx/*.py")
        return [path.read_text(encoding="utf-8") for path in sorted(files)], [f"Running MLX {framework_version('mlx')}"]

    @staticmethod
    def data_lines(values: Mapping[str, Any], data: DataFacts) -> list[str]:
        shards = f"train_shards:{data.shards}" + (f"/{data.listed}" if data.listed is not None else "")
        dataset = f"train_loader:dataset:{data.name} {shards}"
        if data.listed is not None and data.shards < data.listed:
            dataset = (
                f"WARNING: train_loader:subset dataset:{data.name} {shards} new epochs will arrive sooner than the full dataset"
            )
        return [
            f"run_id:{values['RUN_ID']}",
            f"mlx_version:{framework_version('mlx')}",
            f"train_loader:shards pattern={pattern(values, 'train')}",
            f"val_loader:shards pattern={pattern(values, 'val')} tokens:{data.usable}",
            dataset,
            f"tokenizer_path:{values['TOKENIZER_PATH']}",
        ]

    def reporter(self, values: Mapping[str, Any], run_log: RunLog, data: Mapping[str, Any]) -> Reporter:
        return MLXReporter(values, run_log, data)

    def exporter(self, values: Mapping[str, Any], run_log: RunLog, data: Mapping[str, Any]) -> Any:
        return MLXExporter(values, run_log, data)

    def weights(self, content: bytes, path: Path, values: Mapping[str, Any]) -> tuple[dict[str, TensorRecord], str]:
        return read_mlx(content, f"EVAL_ONLY_PATH={path}", head_size(values)), "mlx_model" if is_zip(content) else ROUND_TRIP


# Variables.


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
    """How a step is cut: into `parts`, each of `rows` sequences, computed in chunks of `largest` rows or, at the end, fewer."""

    parts: int
    rows: int
    largest: int

    @classmethod
    def of(cls, v: Mapping[str, Any]) -> Chunks:
        """Return the chunks that the variables set."""
        parts, length = v["GRAD_ACCUM_STEPS"], v["TRAIN_SEQ_LEN"]
        if (rows := v["TRAIN_BATCH_TOKENS"] // parts // length) < 1:
            raise ConfigError(
                f"TRAIN_BATCH_TOKENS={v['TRAIN_BATCH_TOKENS']} over GRAD_ACCUM_STEPS={parts} is less than one sequence of "
                f"TRAIN_SEQ_LEN={length}; give at least {parts * length}"
            )
        return cls(parts, rows, min(rows, max(1, v["MLX_MAX_MICROBATCH_TOKENS"] // length)))

    @property
    def of_part(self) -> list[int]:
        """The rows of each chunk of a part."""
        rest = self.rows % self.largest
        return [self.largest] * (self.rows // self.largest) + ([rest] if rest else [])

    @property
    def spans(self) -> int | list[int]:
        """The chunks of a step as data.spans has them."""
        return self.of_part if self.rows % self.largest else self.parts * len(self.of_part)

    def validation_rows(self, v: Mapping[str, Any]) -> int:
        """Return the sequences per validation batch."""
        return validation_rows(v, self.parts, f"GRAD_ACCUM_STEPS={self.parts}")

    def tokens(self, seq_len: int) -> int:
        """Return the tokens that a step trains on."""
        return self.parts * self.rows * seq_len

    def consumed(self, seq_len: int) -> int:
        """Return the tokens that a step reads: each chunk has a last target that is never an input."""
        return self.tokens(seq_len) + self.parts * len(self.of_part)


def translate_mlx(values: Mapping[str, Any], device: Device, folder: Path | None = None) -> ResolvedConfig:
    """Return the config of a run of train_gpt_mlx.py; errors name its variables."""
    check_model(values)
    chunks, on_gpu = Chunks.of(values), device.precisions[0] == "bf16"
    settings = {
        "training.device": "mlx",
        "training.precision": device.precisions[0],
        "training.compile": on_gpu,  # on a CPU every kernel is a call of g++
        "training.tokens_per_step": chunks.tokens(values["TRAIN_SEQ_LEN"]),
        "training.micro_batch": chunks.largest,
        "training.eager": values["MLX_EAGER_EVAL"],
        "training.loss_chunk": values["LOGIT_CHUNK_TOKENS"] if values["LOGIT_CHUNK_TOKENS"] > 0 else None,
        "data.spans": chunks.spans,
        "evaluation.micro_batch": chunks.validation_rows(values),
    }
    return make_config(MLX_VARIABLES, values, settings, on_gpu, folder, mlx_variable)


# The log.


class MLXReporter(GolfReporter):
    """Writes the lines of the original's MLX script, but every validation: the original hides some of them."""

    def __init__(self, values: Mapping[str, Any], run_log: RunLog, data: Mapping[str, Any]):
        super().__init__(values, run_log)
        self._data, self._chunks = data, Chunks.of(values)
        self._validation_rows = self._chunks.validation_rows(values)
        self._train_tokens, self._seconds = 1, 0.0

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
        if tokens % length or v["TRAIN_BATCH_TOKENS"] % chunks.parts:
            self._run_log.note(
                f"a step trains on {report.tokens_per_step} of its {v['TRAIN_BATCH_TOKENS']} tokens, the whole sequences"
            )
        self._train_tokens, self._seconds = report.train_tokens, report.elapsed_seconds
        if report.resumed_at:
            self._run_log.note(f"resumes from step {report.resumed_at}")
            self._epoch = self._epochs(report.resumed_at)

    def waiting(self, what: str, done: int = 0, total: int = 0) -> None:
        batch, batches = -(-done // self._validation_rows), -(-total // self._validation_rows)
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
        """Return how many times the training data has ended in the first steps."""
        return (step * self._chunks.consumed(self._v["TRAIN_SEQ_LEN"]) - 1) // self._train_tokens


def optimizer_tensors(v: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of tensors that Muon and Adam train, without the embedding and an untied head."""
    names = [f"blocks.{i}.{part}" for i in range(v["NUM_LAYERS"]) for part in MATRICES]
    matrices = sum(not any(word in name for word in v["CONTROL_TENSOR_NAME_PATTERNS"]) for name in names)
    return matrices, len(names) - matrices + len(VECTORS) * v["NUM_LAYERS"] + 1  # skip_weights


# The files.


class MLXExporter:
    """Writes and scores the two files."""

    over = 0  # there is no limit

    def __init__(self, values: Mapping[str, Any], run_log: RunLog, data: Mapping[str, Any]):
        self._v, self._run_log, self._data = values, run_log, data

    def __call__(self, trainer: Trainer, shutdown: Shutdown) -> Exported:
        v, line, start = self._v, self._run_log.line, str(Path(self._v["OUT_DIR"]) / self._v["RUN_ID"])
        state, small = Path(start + STATE), Path(start + PACKED)
        early_stop_line(trainer, self._run_log, v["ITERATIONS"])
        self._run_log.note(f"peak memory {trainer.backend.peak_memory()[0] >> 20} MiB")
        weights = swap_halves(trainer.backend.weights(), head_size(v))
        line(f"saved_model:{state} bytes:{write_npz(state, weights)}")
        control, keep = v["CONTROL_TENSOR_NAME_PATTERNS"], v["INT8_KEEP_FLOAT_FP32_NAME_PATTERNS"]
        report = write_packed(small, weights, QUANTISERS[v["INT8_RULE"]], control, keep, pickled)
        line(
            f"serialized_model_int8_zlib:{report.bytes} bytes "
            f"(payload:{report.payload} raw_pickle:{report.raw} payload_ratio:{report.ratio:.2f}x)"
        )
        content = read_file(small)
        keep_copies(trainer, {f"artifact/{small.name}": content})
        trainer.backend.load_weights(read_mlx(content, str(small), head_size(v)), str(small))
        score = score_lines(trainer, self._run_log)
        facts = {"made_by": made_by(), "val_loss": score.loss, **self._data}
        return Exported(small, len(content), score.bits_per_byte, facts=facts)


def head_size(values: Mapping[str, Any]) -> int:
    """Return the rows of one head in c_q and c_k."""
    return int(values["MODEL_DIM"] // values["NUM_HEADS"])


def swap_halves(records: Iterable[TensorRecord], size: int) -> list[TensorRecord]:
    """Return the weights with the halves of every head's `size` rows in c_q and c_k swapped; twice restores them."""
    return [_swapped(one, size) if one.name.endswith(SWAPPED) else one for one in records]


def _swapped(one: TensorRecord, size: int) -> TensorRecord:
    if not one.data.nbytes or one.shape[0] % size:
        return one  # it does not fit the model, which reports that
    halves = np.frombuffer(one.data, np.uint8).reshape(one.shape[0] // size, 2, -1)
    return TensorRecord(one.name, one.dtype, one.shape, np.ascontiguousarray(halves[:, ::-1]).reshape(-1).data)


def write_npz(path: Path, records: Iterable[TensorRecord]) -> int:
    """Write the arrays, bfloat16 ones as float32, and return the size; the same numbers give the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        for one in records:
            member = io.BytesIO()
            np.lib.format.write_array(member, to_array(one), version=(1, 0), allow_pickle=False)
            file.writestr(zipfile.ZipInfo(f"{one.name}.npy"), member.getvalue())
    with writing(path):
        write_atomically(path, buffer.getvalue())
    return buffer.tell()


def pickled(records: Iterable[TensorRecord], quantiser: str, control: Sequence[str], keep: Sequence[str]) -> tuple[bytes, int]:
    """Return the pickle of the quantised arrays, and the bytes of the arrays in it."""
    contents, payload = quantised_contents(records, quantiser, control, keep, to_array)
    return pickle.dumps(contents, PICKLE_PROTOCOL), payload


def read_mlx(content: bytes, where: str, size: int | None = None) -> dict[str, TensorRecord]:
    """Return the weights in either file, their halves swapped back; `size` is that of a head, by default what the shapes say."""
    try:
        content = content if is_zip(content) else unpacked(content)
        if not is_zip(content):
            contents = _Unpickler(io.BytesIO(content)).load()
            if not isinstance(contents, dict):
                raise ValueError("it holds no arrays by name")
            weights = restored(contents, _record)
        else:
            with zipfile.ZipFile(io.BytesIO(content)) as file:
                if any(name.endswith("/data.pkl") for name in file.namelist()):
                    raise CheckpointError(
                        f"{where} is a file of train_gpt.py, which scores it; train_gpt_mlx.py reads its own {STATE} and {PACKED}"
                    )
                if sum(member.file_size for member in file.infolist()) > MAX_UNPACKED_BYTES:
                    raise ValueError("it unpacks to more than a model of this kind has")
                members = {member.filename.removesuffix(".npy"): file.read(member) for member in file.infolist()}
            arrays = {name: np.lib.format.read_array(io.BytesIO(data), allow_pickle=False) for name, data in members.items()}
            weights = {name: _record(name, array) for name, array in arrays.items()}
        size = size or weights["tok_emb.weight"].shape[1] // weights["blocks.0.attn.q_gain"].shape[0]
        return {one.name: one for one in swap_halves(weights.values(), size)}
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{where} is damaged, or holds more than weights; it was not loaded, because it could run code: {error!s:.100}"
        ) from None
    except Exception as error:  # whatever a damaged file makes of zipfile and numpy
        reason = " ".join(str(error).split("\n")[0].split()) or type(error).__name__
        raise CheckpointError(f"{where} is not a model that train_gpt_mlx.py wrote, or it is damaged: {reason:.160}") from None


def _record(name: str, value: Any) -> TensorRecord:
    if not isinstance(value, np.ndarray) or value.dtype.str not in DTYPE_CODES:
        raise ValueError(f"{name!r:.100} is not an array of weights")
    raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return TensorRecord(name, DTYPE_CODES[value.dtype.str], value.shape, raw.data)


class _Callable:
    """A function that a pickle can call and can neither read nor change."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]):
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it changes a function")


class _Dtype:
    """A dtype by its name, as numpy pickles one."""

    __slots__ = ("name",)

    def __init__(self, name: str, *_: Any):
        self.name = name

    def __setstate__(self, state: Any) -> None:
        if state[1] not in ("<", "|"):
            raise pickle.UnpicklingError("its numbers are not little-endian")


def _from_buffer(buffer: Any, dtype: Any, shape: Any, order: Any) -> NDArray[Any]:
    if not isinstance(buffer, bytes | bytearray) or not isinstance(dtype, _Dtype) or dtype.name not in ("f4", "f2", "i1"):
        raise pickle.UnpicklingError("it holds an array that is not of weights")
    return np.frombuffer(buffer, f"<{dtype.name}").reshape(shape, order=order)


ALLOWED = {
    ("numpy._core.numeric", "_frombuffer"): _Callable(_from_buffer),
    ("numpy.core.numeric", "_frombuffer"): _Callable(_from_buffer),  # written by numpy 1
    ("numpy", "dtype"): _Callable(_Dtype),
}


class _Unpickler(pickle.Unpickler):
    """Unpickles dicts, numbers, texts and arrays, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return ALLOWED[module, name]
