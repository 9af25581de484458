"""`python train_gpt.py`: the challenge's script, driven by environment variables, on our engine.

The challenge has a second script, for Macs (mlx_script.py): it overrides what differs in Script.
"""

from __future__ import annotations

import base64
import math
import os
import sys
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ingot.backends.open import find_device, open_backend
from ingot.compat.golf.bundle import bundle
from ingot.compat.golf.data_check import check_data, pattern
from ingot.compat.golf.log import GolfReporter, RunLog, custom_model_source, timing, torch_head
from ingot.compat.golf.translate import advice, translate, variable
from ingot.compat.golf.variables import (
    CARRIED,
    CODE,
    PACKED,
    STATE,
    VARIABLES,
    as_text,
    differing,
    look_alikes,
    read_variables,
    run_folder,
    usage,
)
from ingot.compat.options import Option
from ingot.config.loading import ResolvedConfig
from ingot.console.entry import explained, process_start, warn
from ingot.errors import ConfigError, IngotError, Rename, RunError
from ingot.runs.claim import LOCK, RunLock
from ingot.runtime.files import write_atomically, writing
from ingot.runtime.machine import made_by
from ingot.runtime.ranks import Ranks, ranks_from_environment
from ingot.runtime.signals import listening_early
from ingot.runtime.tensors import TensorRecord
from ingot.train.end import Exported
from ingot.train.stop import Shutdown
from ingot.train.trainer import Trainer

QUANTISERS = {"golf": "int8-golf", "exact": "int8"}
ROUND_TRIP = "final_int8_zlib_roundtrip"  # name of the quantised file's score in the log


class GolfExporter:
    """Writes a run's model files and scores them; `over` is the number of bytes by which they exceed the limit."""

    def __init__(self, values: Mapping[str, Any], run_log: RunLog, data: Mapping[str, Any]):
        self._v, self._run_log, self._data, self.over, self._code = values, run_log, data, 0, b""
        if run_log.writes:  # saved before training, in case the sources change during the run
            carried = {"MODEL_FILE": CARRIED} if values["MODEL_FILE"] else {}
            self._code = bundle(differing(values) | carried, custom_model_source(values["MODEL_FILE"]) if carried else None)

    def __call__(self, trainer: Trainer, shutdown: Shutdown) -> Exported:
        """Write the files on the first rank and score them on all ranks."""
        from ingot.compat.golf.files import read_weights

        self._early_stop_line(trainer)
        allocated, reserved = (size >> 20 for size in trainer.backend.peak_memory())
        self._run_log.line(f"peak memory allocated: {allocated} MiB reserved: {reserved} MiB")
        weights = trainer.backend.weights()
        content = self._write(trainer, weights) if trainer.outputs is not None else b""
        # Other ranks may run on machines that cannot read the file.
        content = base64.b64decode(trainer.backend.broadcast(base64.b64encode(content).decode()))
        trainer.backend.load_weights(read_weights(content, str(PACKED)), str(PACKED))
        facts = {
            "variables": {name: as_text(value) for name, value in self._v.items() if value is not None},
            "code_bytes": len(self._code),
            "parameters": trainer.backend.parameters,
            "ranks": trainer.backend.ranks.world_size,
            "device": trainer.backend.device.name,
        }
        return self._score(trainer, PACKED, len(content), facts)

    def _early_stop_line(self, trainer: Trainer) -> None:
        p, iterations = trainer.progress, self._v["ITERATIONS"]
        if p.step < iterations:
            milliseconds = timing(p.elapsed_seconds, p.step).split()[0]
            self._run_log.line(f"stopping_early: wallclock_cap {milliseconds} step:{p.step}/{iterations}")

    def _write(self, trainer: Trainer, weights: Sequence[TensorRecord]) -> bytes:
        """Write both files and return the content of the quantised one."""
        from ingot.compat.golf.files import state_dict

        line, code = self._run_log.line, len(self._code)
        state = state_dict(weights)
        write_files({STATE: state})
        line(f"Serialized model: {len(state)} bytes")
        line(f"Code size: {code} bytes")
        line(f"Total submission size: {len(state) + code} bytes")
        content, sizes = self._packed(weights, "raw_torch")
        folder = trainer.outputs.folder.path if trainer.outputs is not None else Path()
        write_files(
            {PACKED: content, folder / "artifact" / PACKED: content, folder / CODE: self._code}
        )  # the artifact folder keeps a copy: the next run overwrites PACKED
        line(f"Serialized model int8+zlib: {len(content)} bytes {sizes}")
        total, limit = len(content) + code, self._v["ARTIFACT_LIMIT_BYTES"]
        line(f"Total submission size int8+zlib: {total} bytes")
        if 0 < limit < total:
            self.over = total - limit
            each = len(content) / trainer.backend.parameters
            fits = f"at {each:.3f} bytes per parameter, about {int((limit - code) / each):,} parameters would fit"
            fits = fits if limit > code else "the code alone is larger"
            line(f"error: {total} bytes are {self.over} more than ARTIFACT_LIMIT_BYTES={limit}; {fits}")
        return content

    def _packed(self, weights: Sequence[TensorRecord], raw: str) -> tuple[bytes, str]:
        """Return the quantised file and its sizes for the log; `raw` is the log's name for the size before zlib."""
        from ingot.compat.golf.files import quantised

        control, keep = self._v["CONTROL_TENSOR_NAME_PATTERNS"], self._v["INT8_KEEP_FLOAT_FP32_NAME_PATTERNS"]
        data, payload = quantised(weights, QUANTISERS[self._v["INT8_RULE"]], control, keep, raw == "raw_pickle")
        ratio = sum(len(item.data) for item in weights) / max(payload, 1)
        return zlib.compress(data, 9), f"(payload:{payload} {raw}:{len(data)} payload_ratio:{ratio:.2f}x)"

    def _score(self, trainer: Trainer, path: Path, size: int, facts: Mapping[str, Any]) -> Exported:
        """Score the model read back from the exported file."""
        loss, bits_per_byte = score_lines(trainer, self._run_log)
        return Exported(path, size, bits_per_byte, facts={"made_by": made_by(), "val_loss": loss, **facts, **self._data})


def write_files(files: Mapping[Path, bytes]) -> None:
    """Write each file atomically."""
    for path, content in files.items():
        with writing(path):
            write_atomically(path, content)


def score_lines(trainer: Trainer, run_log: RunLog, name: str = ROUND_TRIP) -> tuple[float, float]:
    """Score the model's current weights, log loss and bits per byte, rounded and exact, and return them."""
    began = time.perf_counter()
    score = trainer.evaluation.score("val", None)
    milliseconds = 1000 * (time.perf_counter() - began)
    run_log.line(f"{name} val_loss:{score.loss:.4f} val_bpb:{score.bits_per_byte:.4f} eval_time:{milliseconds:.0f}ms")
    run_log.line(f"{name}_exact val_loss:{score.loss:.8f} val_bpb:{score.bits_per_byte:.8f}")
    if not math.isfinite(score.loss):
        raise RunError(f"the loss is {score.loss}: the weights are not finite, so this is not a score")
    return score.loss, score.bits_per_byte


class Script:
    """train_gpt.py; the methods are what the MLX script overrides."""

    name = CODE
    variables: Mapping[str, Option] = VARIABLES
    state_score = STATE.stem  # name of the unquantised file's score in the log
    exclusive = True  # only one run at a time in a folder, because file names are fixed
    variable: Rename = staticmethod(variable)
    reporter: type[GolfReporter] = GolfReporter
    exporter: type[GolfExporter] = GolfExporter

    def read(self, environment: Mapping[str, str]) -> tuple[dict[str, Any], Ranks]:
        """Return the value of every variable, and the rank of this process."""
        return read_variables(environment), ranks_from_environment(environment)

    def logs(self, values: Mapping[str, Any]) -> Path:
        """Return the folder of logs and run folders."""
        return Path("logs")

    def config(self, values: Mapping[str, Any], ranks: Ranks, folder: Path) -> ResolvedConfig:
        """Return the config of a run."""
        return translate(values, ranks.world_size, find_device("auto").kind == "cuda", folder)

    def head(self, values: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Return the source code and the versions of libraries and GPU, for the head of the log."""
        return torch_head(values["MODEL_FILE"])

    def data_lines(self, values: Mapping[str, Any], name: str, shards: int, listed: int | None, usable: int) -> list[str]:
        """Return the log lines about the data: its name, train shards found and listed in the manifest, and scored tokens."""
        lines = [
            f"val_bpb:enabled tokenizer_kind=sentencepiece tokenizer_path={values['TOKENIZER_PATH']}",
            f"train_loader:dataset:{name} train_shards:{shards}",
            f"val_loader:shards pattern={pattern(values, 'val')} tokens:{usable}",
        ]
        if listed is not None and shards < listed:
            lines.append(
                f"note: warning: DATA_PATH={values['DATA_PATH']} has {shards:,} of the {listed:,} train shards that its "
                "manifest lists; the data repeats sooner"
            )
        return lines


def main(arguments: Sequence[str] = (), carried: str | None = None) -> int:
    """Run train_gpt.py and return its exit code; `carried` is the source of a custom model embedded in a submission's file."""
    return start_script(Script(), arguments, carried)


def start_script(script: Script, arguments: Sequence[str], carried: str | None = None) -> int:
    """Run a script configured by environment variables; the only argument is --help."""
    with explained(script.name, script.variable, advice) as outcome, listening_early():
        if {"--help", "-h"} & set(arguments):
            print(usage(script.name, script.variables.values()))
        elif arguments:
            word, _, value = arguments[0].lstrip("-").partition("=")
            name = word.replace("-", "_").upper()
            example = f"{name}={value or 'VALUE'}" if name in script.variables else "ITERATIONS=100"
            raise ConfigError(
                f"{script.name} takes no arguments and was given {arguments[0]}; set variables before the command, as in "
                f"{example} python {script.name}; --help lists them"
            )
        else:
            if carried is not None and os.environ["MODEL_FILE"] == CARRIED:
                os.environ["MODEL_FILE"] = str(_write_carried(carried))
            outcome.code = run_script(script, os.environ)
    return outcome.code


def _write_carried(model: str) -> Path:
    """Write the embedded custom model beside the submission's file; never overwrite a different file of that name."""
    path = Path(sys.argv[0]).with_name(CARRIED)
    if not path.exists():
        write_files({path: model.encode()})
    elif custom_model_source(str(path)) != model:
        raise ConfigError(f"{path} is not the model that {sys.argv[0]} carries; remove it, or rename it and set MODEL_FILE to it")
    return path


def run_script(script: Script, environment: Mapping[str, str]) -> int:
    """Train, or score the file in EVAL_ONLY_PATH; return 1 if the artifact exceeds its size limit."""
    values, ranks = script.read(environment)
    for warning in look_alikes(environment, script.variables) if ranks.first else ():
        warn(f"{script.name}: warning: {warning}")
    logs, run_id = script.logs(values), values["RUN_ID"] or str(uuid.uuid4())
    folder = run_folder(logs, run_id, ranks.first)
    values["RUN_ID"] = run_id
    resolved = script.config(values, ranks, folder)
    run_log = RunLog(logs / f"{run_id}.txt" if ranks.first else None)
    if ranks.first:
        run_log.head(resolved, values, *script.head(values))
    data = check_data(values, run_log, ranks.first, script.data_lines)
    with _logs_folder(logs, ranks.first, shared=not script.exclusive or bool(values["EVAL_ONLY_PATH"])):
        run_log.show()
        try:
            if values["EVAL_ONLY_PATH"]:
                return _score(script, values, resolved, ranks, run_log)
            return _train(script, values, resolved, run_log, data)
        except IngotError as error:
            run_log.line(f"error: {error.render(script.variable, advice)}", console=False)
            raise


@contextmanager
def _logs_folder(logs: Path, first: bool, shared: bool) -> Iterator[None]:
    """Create the folder of logs and lock it unless it is shared; remove it again if it is new and still empty at the end."""
    if not first:
        yield
        return
    with writing(logs):
        new = not logs.exists()
        logs.mkdir(parents=True, exist_ok=True)
    lock = RunLock(logs, elsewhere="another folder to run in")
    try:
        if not shared:
            lock.acquire()
        yield
    finally:
        if new and not [path for path in logs.iterdir() if path.name != LOCK]:
            (logs / LOCK).unlink(missing_ok=True)  # before the release: waiting processes check that it exists
            with suppress(OSError):
                logs.rmdir()
        lock.release()


def _train(script: Script, values: Mapping[str, Any], resolved: ResolvedConfig, run_log: RunLog, data: Mapping[str, Any]) -> int:
    from ingot.train.start import run
    from ingot.train.stop import find_walltime

    find_walltime(resolved.config.training, process_start(), warn=run_log.note)  # only for its warnings: the run has no log yet
    exporter = script.exporter(values, run_log, data)
    result = run(resolved, script.reporter(values, run_log, data), exporter, process_start())
    if result.status == "stopped":
        run_log.note(
            f"stopped after step {result.total_steps} and saved; the same command with RUN_ID={values['RUN_ID']} resumes it"
        )
    return 1 if exporter.over else 0


def _score(script: Script, values: Mapping[str, Any], resolved: ResolvedConfig, ranks: Ranks, run_log: RunLog) -> int:
    """Load a file of an earlier run and score it as at the end of a run."""
    from ingot.compat.golf.files import is_zip, read_file, read_weights
    from ingot.train.resume import Progress
    from ingot.train.start import open_data

    path = Path(values["EVAL_ONLY_PATH"])
    content = read_file(path)
    weights = read_weights(content, f"EVAL_ONLY_PATH={path}")
    dataset, rows = open_data(resolved.config, ranks.world_size)
    backend = open_backend(resolved.config, dataset.tokenizer.vocab_size, ranks)
    backend.load_weights(weights, str(path))
    run_log.write()
    run_log.line(f"model_params:{backend.parameters}")
    trainer = Trainer(resolved.config, dataset, rows, backend, Progress(), script.reporter(values, run_log, {}), None)
    score_lines(trainer, run_log, script.state_score if is_zip(content) else ROUND_TRIP)
    backend.close()
    return 0
