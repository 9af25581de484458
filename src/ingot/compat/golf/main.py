"""`python train_gpt.py`: the challenge's script, configured by environment variables and executed by Ingot.

The challenge's second script, for Macs, is a subclass of Script (mlx_script.py). The keys, order and number formats of log lines
are exactly those of the challenge's scripts, because other people's tools parse them.
"""

from __future__ import annotations

import base64
import math
import os
import subprocess
import sys
import time
import uuid
import zlib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from ingot.backends.open import find_device, framework_version, open_backend
from ingot.compat.golf.bundle import bundle
from ingot.compat.golf.data_check import check_data, pattern
from ingot.compat.golf.log import RunLog, torch_sources
from ingot.compat.golf.translate import SPANS, accumulation, advice, translate, variable
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
from ingot.runs.reporter import BeginReport, EvaluationReport, Reporter, StepReport
from ingot.runs.state import LOCK, RunLock
from ingot.runtime.files import open_to_read, readable, write_atomically, writing
from ingot.runtime.machine import made_by
from ingot.runtime.ranks import Ranks, ranks_from_environment
from ingot.runtime.signals import listening_early
from ingot.runtime.tensors import TensorRecord
from ingot.train.end import Exported
from ingot.train.stop import Shutdown
from ingot.train.trainer import Trainer

ALWAYS_LOGGED = 10  # number of steps at the start that are always logged
KERNELS = {"cudnn": "cudnn", "flash": "flash", "efficient": "mem_efficient", "math": "math"}  # maps Ingot's names to the log's
QUANTISERS = {"golf": "int8-golf", "exact": "int8"}
ROUND_TRIP = "final_int8_zlib_roundtrip"  # name in the log for the score of the quantised file


class Script(Reporter):
    """A run of train_gpt.py: prints the log lines of the challenge's script, and writes and scores the model files."""

    name = CODE
    variables: Mapping[str, Option] = VARIABLES
    state_score = STATE.stem  # name in the log for the score of the unquantised file
    exclusive = True  # only one run at a time in a folder, because the model files have fixed names
    rename: Rename = staticmethod(variable)
    values: dict[str, Any]
    ranks: Ranks
    run_log: RunLog
    data: dict[str, Any]  # name and counts of the data
    code = b""  # the code that a submission of this run would contain
    over = 0  # number of bytes over the submission's size limit
    epoch, train_tokens = 0, 1  # completed epochs of the training data, and tokens per epoch

    def read(self, environment: Mapping[str, str]) -> None:
        """Read the value of every environment variable of the script, and the rank of this process."""
        self.values, self.ranks = read_variables(environment), ranks_from_environment(environment)

    def config(self, folder: Path) -> ResolvedConfig:
        """Return the config of the run."""
        return translate(self.values, self.ranks.world_size, find_device("auto").kind == "cuda", folder)

    def sources(self) -> tuple[list[str], list[str]]:
        """Return two parts of the log's header: the source code of model and optimizer, and the library and GPU versions."""
        sources = [*torch_sources(), *([custom_model_source(file)] if (file := self.values["MODEL_FILE"]) else [])]
        try:
            gpu = subprocess.run(["nvidia-smi"], capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
        except OSError:
            gpu = "no nvidia-smi"
        return sources, [f"Running PyTorch {framework_version()}", gpu]

    def data_lines(self, name: str, shards: int, listed: int | None, usable: int) -> list[str]:
        """Return the log lines about tokenizer and data; warn if there are fewer train shards than the manifest lists."""
        values = self.values
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

    def bundle(self) -> bytes:
        """Return the code of a submission; called before training, because the sources may change during the run."""
        carried = {"MODEL_FILE": CARRIED} if self.values["MODEL_FILE"] else {}
        return bundle(differing(self.values) | carried, custom_model_source(self.values["MODEL_FILE"]) if carried else None)

    # Methods that print the log lines of a run.

    def begin(self, report: BeginReport) -> None:
        note, tokens = self.run_log.note, self.values["TRAIN_BATCH_TOKENS"]
        self.train_tokens = report.train_tokens
        self.run_log.write(Path(report.run))
        for line in self.begin_lines(report):
            self.run_log.line(line)
        note(f"run folder {report.run}, {report.device}, {report.precision}, micro-batches of {report.micro_batch} rows")
        if report.tokens_per_step != tokens:
            note(f"a step trains on {report.tokens_per_step} of {tokens} tokens, to use whole sequences only")
        if report.resumed_at:
            note(f"resumes from step {report.resumed_at}")
            self.epoch = self.epochs(report.resumed_at)

    def begin_lines(self, report: BeginReport) -> list[str]:
        """Return the log lines about the model and the settings."""
        v, tied = self.values, self.values["TIE_EMBEDDINGS"]
        return [
            f"model_params:{report.parameters}",
            f"world_size:{report.ranks} grad_accum_steps:{accumulation(report.ranks)}",
            f"sdp_backends:{sdp_backends(report.attention)}",
            f"attention_mode:gqa num_heads:{v['NUM_HEADS']} num_kv_heads:{v['NUM_KV_HEADS']}",
            f"tie_embeddings:{tied} embed_lr:{v['TIED_EMBED_LR'] if tied else v['EMBED_LR']} "
            f"head_lr:{0.0 if tied else v['HEAD_LR']} matrix_lr:{v['MATRIX_LR']} scalar_lr:{v['SCALAR_LR']}",
            f"train_batch_tokens:{v['TRAIN_BATCH_TOKENS']} train_seq_len:{v['TRAIN_SEQ_LEN']} iterations:{v['ITERATIONS']} "
            f"warmup_steps:{v['WARMUP_STEPS']} max_wallclock_seconds:{v['MAX_WALLCLOCK_SECONDS']:.3f}",
            f"seed:{v['SEED']}",
        ]

    def epochs(self, step: int) -> int:
        """Return the number of epochs completed after `step` steps."""
        tokens: int = self.values["TRAIN_BATCH_TOKENS"] // SPANS * SPANS + SPANS  # each of the 8 chunks reads one extra token
        return step * tokens // self.train_tokens

    def primed(self, step: int, steps: int) -> None:
        if steps <= 20 or step % 10 == 0 or step == steps:
            self.run_log.line(f"warmup_step:{step}/{steps}")

    def step(self, report: StepReport, log: bool) -> None:
        if report.epoch > self.epoch:
            self.epoch = report.epoch
            self.run_log.note(f"the training data ended in step {report.step}; starting epoch {report.epoch + 1}")
        self.step_line(report, f"train_loss:{report.loss:.4f}")

    def step_line(self, report: StepReport | EvaluationReport, scores: str, rate: str = "") -> None:
        """Log an evaluation, or a step if it is one of the first 10 or due by TRAIN_LOG_EVERY."""
        every, of = self.values["TRAIN_LOG_EVERY"], self.values["ITERATIONS"]
        always = isinstance(report, EvaluationReport) or report.step <= ALWAYS_LOGGED
        if always or (every > 0 and report.step % every == 0):
            milliseconds = 1000 * report.elapsed_seconds
            times = f"train_time:{milliseconds:.0f}ms step_avg:{milliseconds / max(report.step, 1):.2f}ms"
            self.run_log.line(f"step:{report.step}/{of} {scores} {times}{rate}")

    def evaluation(self, report: EvaluationReport) -> None:
        self.step_line(report, f"val_loss:{report.val_loss:.4f} val_bpb:{report.val_bpb:.4f}")

    def message(self, text: str) -> None:
        self.run_log.note(text)

    # Methods that write and score the files of a run.

    def export(self, trainer: Trainer, shutdown: Shutdown) -> Exported:
        """Write the model files on the first rank, and score the quantised file on all ranks."""
        from ingot.compat.golf.files import read_weights, state_dict

        self.early_stop_line(trainer)
        line, code, limit = self.run_log.line, len(self.code), self.values["ARTIFACT_LIMIT_BYTES"]
        allocated, reserved = (size >> 20 for size in trainer.backend.peak_memory())
        line(f"peak memory allocated: {allocated} MiB reserved: {reserved} MiB")
        weights, content = trainer.backend.weights(), b""
        if trainer.outputs is not None:
            state, folder = state_dict(weights), trainer.outputs.folder.path
            write_files({STATE: state})
            line(f"Serialized model: {len(state)} bytes")
            line(f"Code size: {code} bytes")
            line(f"Total submission size: {len(state) + code} bytes")
            content, sizes = self.packed(weights, "raw_torch")
            # Keep a copy of the quantised file in the run folder, because the next run overwrites PACKED.
            write_files({PACKED: content, folder / "artifact" / PACKED: content, folder / CODE: self.code})
            line(f"Serialized model int8+zlib: {len(content)} bytes {sizes}")
            total = len(content) + code
            line(f"Total submission size int8+zlib: {total} bytes")
            if 0 < limit < total:
                self.over = total - limit
                each = len(content) / trainer.backend.parameters
                fits = f"at {each:.3f} bytes per parameter, about {int((limit - code) / each):,} parameters would fit"
                fits = fits if limit > code else "the code alone exceeds the limit"
                line(f"error: {total} bytes are {self.over} more than ARTIFACT_LIMIT_BYTES={limit}; {fits}")
        # Send the content to the other ranks, which may run on machines that cannot read the file.
        content = base64.b64decode(trainer.backend.broadcast(base64.b64encode(content).decode()))
        trainer.backend.load_weights(read_weights(content, str(PACKED)), str(PACKED))
        facts = {
            "variables": {name: as_text(value) for name, value in self.values.items() if value is not None},
            "code_bytes": code,
            "parameters": trainer.backend.parameters,
            "ranks": trainer.backend.ranks.world_size,
            "device": trainer.backend.device.name,
        }
        return self.exported(trainer, PACKED, len(content), facts)

    def early_stop_line(self, trainer: Trainer) -> None:
        """Log an early stop, if the time limit ended the run before its last step."""
        p, iterations = trainer.progress, self.values["ITERATIONS"]
        if p.step < iterations:
            milliseconds = f"{1000 * p.elapsed_seconds:.0f}ms"
            self.run_log.line(f"stopping_early: wallclock_cap train_time:{milliseconds} step:{p.step}/{iterations}")

    def packed(self, weights: Sequence[TensorRecord], raw: str) -> tuple[bytes, str]:
        """Return the quantised, compressed file and the sizes to log; `raw` is the log's name for the size before compression."""
        from ingot.compat.golf.files import quantised

        control, keep = self.values["CONTROL_TENSOR_NAME_PATTERNS"], self.values["INT8_KEEP_FLOAT_FP32_NAME_PATTERNS"]
        data, payload = quantised(weights, QUANTISERS[self.values["INT8_RULE"]], control, keep, raw == "raw_pickle")
        ratio = sum(len(item.data) for item in weights) / max(payload, 1)
        return zlib.compress(data, 9), f"(payload:{payload} {raw}:{len(data)} payload_ratio:{ratio:.2f}x)"

    def exported(self, trainer: Trainer, path: Path, size: int, facts: Mapping[str, Any]) -> Exported:
        """Score the current weights, which were loaded from the exported file; return an Exported with the score and `facts`."""
        loss, bits_per_byte = self.score(trainer)
        return Exported(path, size, bits_per_byte, facts={"made_by": made_by(), "val_loss": loss, **facts, **self.data})

    def score(self, trainer: Trainer, name: str = ROUND_TRIP) -> tuple[float, float]:
        """Score the current weights; log the loss and the bits per byte, both rounded and exact, and return the exact values."""
        began = time.perf_counter()
        score = trainer.evaluation.score("val", None)
        milliseconds = 1000 * (time.perf_counter() - began)
        self.run_log.line(f"{name} val_loss:{score.loss:.4f} val_bpb:{score.bits_per_byte:.4f} eval_time:{milliseconds:.0f}ms")
        self.run_log.line(f"{name}_exact val_loss:{score.loss:.8f} val_bpb:{score.bits_per_byte:.8f}")
        if not math.isfinite(score.loss):
            raise RunError(f"the loss is {score.loss}: the weights are not finite, so the score is invalid")
        return score.loss, score.bits_per_byte


def sdp_backends(chosen: str) -> str:
    """Return the log text on the attention kernels that torch may use: the chosen one or, if not in KERNELS, flash and math."""
    chosen = chosen.removesuffix("-grouped")
    may_run = {KERNELS[chosen]} if chosen in KERNELS else {"flash", "math"}
    return " ".join(f"{name}={name in may_run}" for name in KERNELS.values())


def write_files(files: Mapping[Path, bytes]) -> None:
    """Write each file atomically."""
    for path, content in files.items():
        with writing(path):
            write_atomically(path, content)


def custom_model_source(file: str) -> str:
    """Return the source code of a custom model."""
    with readable(Path(f"MODEL_FILE={file}"), ConfigError), open_to_read(Path(file)) as opened:
        return opened.read().decode()


def main(arguments: Sequence[str] = (), carried: str | None = None, script: Script | None = None) -> int:
    """Run a script of the challenge (default: train_gpt.py) and return its exit code; the only valid argument is --help.

    `carried` is the source of a custom model embedded in a submission's file.
    """
    script = script or Script()
    with explained(script.name, script.rename, advice) as outcome, listening_early():
        if {"--help", "-h"} & set(arguments):
            print(usage(script.name, script.variables.values()))
        elif arguments:
            word, _, value = arguments[0].lstrip("-").partition("=")
            name = word.replace("-", "_").upper()
            example = f"{name}={value or 'VALUE'}" if name in script.variables else "ITERATIONS=100"
            raise ConfigError(
                f"{script.name} takes no arguments, but was given {arguments[0]}; set variables before the command, as in "
                f"{example} python {script.name}; --help lists them"
            )
        else:
            if carried is not None and os.environ["MODEL_FILE"] == CARRIED:
                path = Path(sys.argv[0]).with_name(CARRIED)  # next to the submission's train_gpt.py
                if not path.exists():
                    write_files({path: carried.encode()})
                elif custom_model_source(str(path)) != carried:
                    advised = "remove it, or rename it and set MODEL_FILE to it"
                    raise ConfigError(f"{path} differs from the model embedded in {sys.argv[0]}; {advised}")
                os.environ["MODEL_FILE"] = str(path)
            outcome.code = run_script(script, os.environ)
    return outcome.code


def run_script(script: Script, environment: Mapping[str, str]) -> int:
    """Train or, if EVAL_ONLY_PATH is set, only score that file; return 1 if artifact plus code exceed the size limit, else 0."""
    script.read(environment)
    values, first = script.values, script.ranks.first
    for warning in look_alikes(environment, script.variables) if first else ():
        warn(f"{script.name}: warning: {warning}")
    logs, run_id = Path(values.get("OUT_DIR", "logs")), values["RUN_ID"] or str(uuid.uuid4())
    folder = run_folder(logs, run_id, first)
    values["RUN_ID"] = run_id
    resolved = script.config(folder)
    script.run_log = run_log = RunLog(logs / f"{run_id}.txt" if first else None)
    if first:
        run_log.head(values, resolved, *script.sources())
    script.data = check_data(values, run_log, first, script.data_lines)
    try:
        if values["EVAL_ONLY_PATH"]:
            return _score(script, resolved)
        new = False
        if first:
            with writing(logs):
                new = not logs.exists()
                logs.mkdir(parents=True, exist_ok=True)
        exclusive = first and script.exclusive
        with RunLock(logs, elsewhere="another folder to run in") if exclusive else nullcontext():
            try:
                return _train(script, resolved)
            finally:
                if new and {path.name for path in logs.iterdir()} <= {LOCK}:  # the run never started: remove the folder
                    with suppress(OSError):
                        (logs / LOCK).unlink(missing_ok=True)  # while locked, so that waiting processes notice
                        logs.rmdir()
    except IngotError as error:
        run_log.line(f"error: {error.render(script.rename, advice)}", console=False)
        raise


def _train(script: Script, resolved: ResolvedConfig) -> int:
    from ingot.train.start import run
    from ingot.train.stop import find_walltime

    note = script.run_log.note
    script.run_log.show()
    find_walltime(resolved.config.training, process_start(), warn=note)  # called here so that its warnings are logged
    script.code = script.bundle() if script.ranks.first else b""
    result = run(resolved, script, script.export, process_start())
    if result.status == "stopped":
        run_id = script.values["RUN_ID"]
        note(f"stopped after step {result.total_steps} and saved; the same command with RUN_ID={run_id} resumes it")
    return 1 if script.over else 0


def _score(script: Script, resolved: ResolvedConfig) -> int:
    from ingot.compat.golf.files import ZIP, read_file, read_weights
    from ingot.train.resume import Progress
    from ingot.train.start import open_data

    path = Path(script.values["EVAL_ONLY_PATH"])
    content = read_file(path)
    weights = read_weights(content, f"EVAL_ONLY_PATH={path}")
    dataset, rows = open_data(resolved.config, script.ranks.world_size)
    backend = open_backend(resolved.config, dataset.tokenizer.vocab_size, script.ranks)
    backend.load_weights(weights, str(path))
    script.run_log.show()
    script.run_log.write()
    script.run_log.line(f"model_params:{backend.parameters}")
    trainer = Trainer(resolved.config, dataset, rows, backend, Progress(), script, None)
    script.score(trainer, script.state_score if content.startswith(ZIP) else ROUND_TRIP)
    backend.close()
    return 0
