"""The end of a golf run: two files in the folder it was started in, the second read again and scored, and their sizes."""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Mapping
from typing import Any

from ingot.compat.golf.bundle import bundle
from ingot.compat.golf.files import read_file, read_golf, write_packed, write_state
from ingot.compat.golf.log import RunLog, own_source, timing
from ingot.compat.golf.variables import CARRIED, CODE, PACKED, STATE, as_text, differing
from ingot.errors import RunError
from ingot.eval.evaluator import Score
from ingot.runtime.files import write_atomically, writing
from ingot.runtime.machine import made_by
from ingot.runtime.tensors import TensorRecord
from ingot.train.end import Exported
from ingot.train.stop import Shutdown
from ingot.train.trainer import Trainer

QUANTISERS = {"golf": "int8-golf", "exact": "int8"}
ROUND_TRIP = "final_int8_zlib_roundtrip"  # what the score of the quantised file is called


class GolfExporter:
    """Writes and scores what the challenge asks for; `over` says afterwards by how many bytes it is too large."""

    def __init__(self, values: Mapping[str, Any], run_log: RunLog, data: Mapping[str, Any]):
        self._v, self._run_log, self._data, self.over = values, run_log, data, 0
        # Now, not after the training: who changed the package hears of mistakes first.
        own = {"MODEL_FILE": CARRIED} if values["MODEL_FILE"] else {}
        model = own_source(values["MODEL_FILE"]) if own else None
        self._code = bundle(differing(values) | own, model) if run_log.writes else b""

    def __call__(self, trainer: Trainer, shutdown: Shutdown) -> Exported:
        """Called on every rank: the first writes, all of them score what the file holds."""
        tell_early_stop(trainer, self._run_log, self._v["ITERATIONS"])
        allocated, reserved = (size >> 20 for size in trainer.backend.peak_memory())
        self._run_log.line(f"peak memory allocated: {allocated} MiB reserved: {reserved} MiB")
        weights, content = trainer.backend.weights(), b""
        if trainer.outputs is not None:
            self._write(trainer, weights)
            content = read_file(PACKED)
        # What the first rank read again goes to the others, which may be on machines that do not see the file.
        content = base64.b64decode(trainer.backend.broadcast(base64.b64encode(content).decode()))
        trainer.backend.load_weights(read_golf(content, PACKED), str(PACKED))
        score = score_lines(trainer, self._run_log)
        return Exported(PACKED, len(content), score.bits_per_byte, facts=self._facts(trainer, score))

    def _facts(self, trainer: Trainer, score: Score) -> dict[str, Any]:
        """What `ingot golf pack` asks of a finished run."""
        return {
            "made_by": made_by(),
            "variables": {name: as_text(value) for name, value in self._v.items() if value is not None},
            "val_loss": score.loss,
            "code_bytes": len(self._code),
            "parameters": trainer.backend.parameters,
            "ranks": trainer.backend.ranks.world_size,
            "device": trainer.backend.device.name,
            **self._data,
        }

    def _write(self, trainer: Trainer, weights: list[TensorRecord]) -> None:
        v, line, code = self._v, self._run_log.line, self._code
        control, keep = v["CONTROL_TENSOR_NAME_PATTERNS"], v["INT8_KEEP_FLOAT_FP32_NAME_PATTERNS"]
        state = write_state(STATE, weights)
        line(f"Serialized model: {state} bytes")
        line(f"Code size: {len(code)} bytes")
        line(f"Total submission size: {state + len(code)} bytes")
        report = write_packed(PACKED, weights, QUANTISERS[v["INT8_RULE"]], control, keep)
        ratio = report.tensors / max(report.payload, 1)
        line(
            f"Serialized model int8+zlib: {report.bytes} bytes "
            f"(payload:{report.payload} raw_torch:{report.raw} payload_ratio:{ratio:.2f}x)"
        )
        keep_copies(trainer, {f"artifact/{PACKED}": PACKED.read_bytes(), CODE: self._code})
        total, limit = report.bytes + len(code), v["ARTIFACT_LIMIT_BYTES"]
        line(f"Total submission size int8+zlib: {total} bytes")
        if 0 < limit < total:
            self.over = total - limit
            line(
                f"error: {total} bytes are {self.over} more than ARTIFACT_LIMIT_BYTES={limit}; "
                f"{_what_would_fit(trainer, limit - len(code), report.bytes)}"
            )


def tell_early_stop(trainer: Trainer, run_log: RunLog, iterations: int) -> None:
    """Say that the clock ended the run, where it did."""
    p = trainer.progress
    if p.step < iterations:
        milliseconds = timing(p.elapsed_seconds, p.step).split()[0]
        run_log.line(f"stopping_early: wallclock_cap {milliseconds} step:{p.step}/{iterations}")


def keep_copies(trainer: Trainer, files: Mapping[str, bytes]) -> None:
    """Copies of what a run wrote, in its folder: the next run writes over the files."""
    assert trainer.outputs is not None
    for name, content in files.items():
        path = trainer.outputs.folder.path / name
        with writing(path):
            write_atomically(path, content)


def score_lines(trainer: Trainer, run_log: RunLog, name: str = ROUND_TRIP) -> Score:
    """Score what the model now holds and write it, once to read and once exactly."""
    began = time.perf_counter()
    score = trainer.evaluation.score("val", None)
    milliseconds = 1000 * (time.perf_counter() - began)
    found = f"val_loss:{score.loss:.4f} val_bpb:{score.bits_per_byte:.4f}"
    run_log.line(f"{name} {found} eval_time:{milliseconds:.0f}ms")
    run_log.line(f"{name}_exact val_loss:{score.loss:.8f} val_bpb:{score.bits_per_byte:.8f}")
    if not math.isfinite(score.loss):
        raise RunError(f"the loss is {score.loss}: the weights hold numbers that are not finite, and this is not a score")
    return score


def _what_would_fit(trainer: Trainer, room: int, size: int) -> str:
    """The largest model of the same kind that would fit, by the bytes a parameter takes here."""
    if room <= 0:
        return "the code alone is larger"
    parameters = int(trainer.backend.parameters * room / size)
    return f"at {size / trainer.backend.parameters:.3f} bytes per parameter, about {parameters:,} parameters would fit"
