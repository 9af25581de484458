"""The log of a golf run: the challenge's own lines with our measured values, on the console and in logs/RUN_ID.txt.

Keys, order and number formatting match the original exactly, because other people's tools parse them. Lines that the original
does not have start with `note:`.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ingot.backends.open import framework_version
from ingot.compat.golf.translate import SPANS, accumulation
from ingot.compat.golf.variables import LOG, as_lines
from ingot.config.loading import ResolvedConfig
from ingot.config.render import dump_yaml
from ingot.errors import ConfigError
from ingot.runs.metrics import LineFile
from ingot.runs.reporter import BeginReport, EvaluationReport, Reporter, StepReport
from ingot.runtime.files import open_to_read
from ingot.runtime.machine import made_by

RULE = "=" * 100
KERNELS = {"cudnn": "cudnn", "flash": "flash", "efficient": "mem_efficient", "math": "math"}  # in the log's order
ALWAYS_LOGGED = 10  # the first steps are always logged


class RunLog:
    """Prints lines and appends them to the log and, once there is a run folder, to a copy of this session's lines in it.

    Nothing is printed before `show` and no file is created before `write`, so a run that fails to start leaves no log.
    """

    def __init__(self, path: Path | None):
        self._path = path  # None on ranks that write no log
        self._files: list[LineFile] = []
        self._unwritten: list[str] = []  # lines not yet in the run folder's copy
        self._unshown: list[str] | None = []  # lines not yet on the console
        self._has_copy = False
        self.writes = path is not None

    def line(self, text: str, console: bool = True) -> None:
        """Write a line to the log and, with `console`, print it too."""
        if self._path is None:
            return
        if console and self._unshown is not None:
            self._unshown.append(text)
        elif console:
            print(text, flush=True)
        for file in self._files:
            file.append(text)
        if not self._has_copy:
            self._unwritten.append(text)

    def show(self) -> None:
        """Print the path of the log and the lines so far; from now on every line is printed."""
        lines, self._unshown = self._unshown or [], None
        for text in (str(self._path), *lines) if self.writes else ():
            print(text, flush=True)

    def write(self, folder: Path | None = None) -> None:
        """Open the log and, given a run folder, the copy in it; write the lines so far."""
        if self._path is None:
            return
        lines, self._unwritten, self._has_copy = self._unwritten, [], folder is not None
        self._files = [LineFile(path) for path in (self._path, folder / LOG if folder is not None else None) if path is not None]
        for file in self._files if lines else ():
            file.append("\n".join(lines))

    def note(self, text: str) -> None:
        """Write a line that the original's log does not have, prefixed with `note:`."""
        self.line(f"note: {text}")

    def head(self, resolved: ResolvedConfig, values: Mapping[str, Any], sources: Sequence[str], machine: Sequence[str]) -> None:
        """Write what makes the run reproducible: version, settings, sources of model and optimizer, Python and hardware."""
        head = [made_by(), *as_lines(values), dump_yaml(resolved.config, resolved.origins), *sources, RULE]
        head += [f"Running Python {sys.version}", *machine, RULE]
        self.line("\n".join(head), console=False)


def torch_head(model_file: str | None) -> tuple[list[str], list[str]]:
    """Return the source code of model and optimizer, and the versions of torch and the GPU, for the head of a log."""
    from ingot.model import golf, layers, loss
    from ingot.optim import groups, muon, schedules

    sources = [inspect.getsource(module) for module in (golf, layers, loss, groups, muon, schedules)]
    if model_file:
        sources.append(custom_model_source(model_file))
    try:
        gpu = subprocess.run(["nvidia-smi"], capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
    except OSError:
        gpu = "no nvidia-smi"
    return sources, [f"Running PyTorch {framework_version()}", gpu]


def custom_model_source(file: str) -> str:
    """Return the source code of a custom model."""
    try:
        with open_to_read(Path(file)) as opened:
            return opened.read().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"MODEL_FILE={file} cannot be read: {getattr(error, 'strerror', None) or error}") from None


class GolfReporter(Reporter):
    """Writes the original's log lines."""

    def __init__(self, values: Mapping[str, Any], run_log: RunLog, data: Mapping[str, Any]):
        self._v, self._run_log, self._data, self._epoch = values, run_log, data, 0

    def begin(self, report: BeginReport) -> None:
        v, line = self._v, self._run_log.line
        self._run_log.write(Path(report.run))
        line(f"model_params:{report.parameters}")
        line(f"world_size:{report.ranks} grad_accum_steps:{accumulation(report.ranks)}")
        line(f"sdp_backends:{sdp_backends(report.attention)}")
        line(f"attention_mode:gqa num_heads:{v['NUM_HEADS']} num_kv_heads:{v['NUM_KV_HEADS']}")
        tied = v["TIE_EMBEDDINGS"]
        line(
            f"tie_embeddings:{tied} embed_lr:{v['TIED_EMBED_LR'] if tied else v['EMBED_LR']} "
            f"head_lr:{0.0 if tied else v['HEAD_LR']} matrix_lr:{v['MATRIX_LR']} scalar_lr:{v['SCALAR_LR']}"
        )
        line(
            f"train_batch_tokens:{v['TRAIN_BATCH_TOKENS']} train_seq_len:{v['TRAIN_SEQ_LEN']} iterations:{v['ITERATIONS']} "
            f"warmup_steps:{v['WARMUP_STEPS']} max_wallclock_seconds:{v['MAX_WALLCLOCK_SECONDS']:.3f}"
        )
        line(f"seed:{v['SEED']}")
        self._run_log.note(f"run folder {report.run}, {report.device}, {report.precision}, {report.micro_batch} rows at once")
        self._tokens_note(report)
        if report.resumed_at:
            self._run_log.note(f"resumes from step {report.resumed_at}")
            self._epoch = report.resumed_at * (report.tokens_per_step + SPANS) // report.train_tokens

    def _tokens_note(self, report: BeginReport) -> None:
        if report.tokens_per_step != (tokens := self._v["TRAIN_BATCH_TOKENS"]):
            self._run_log.note(f"a step trains on {report.tokens_per_step} of its {tokens} tokens, the whole sequences")

    def primed(self, step: int, steps: int) -> None:
        if steps <= 20 or step % 10 == 0 or step == steps:
            self._run_log.line(f"warmup_step:{step}/{steps}")

    def step(self, report: StepReport, log: bool) -> None:
        if report.epoch > self._epoch:
            self._epoch = report.epoch
            self._run_log.note(f"the training data ended in step {report.step} and is read again: pass {report.epoch + 1}")
        self._step_line(report)

    def _step_line(self, report: StepReport, more: str = "") -> None:
        every = self._v["TRAIN_LOG_EVERY"]
        if report.step <= ALWAYS_LOGGED or (every > 0 and report.step % every == 0):
            self._run_log.line(
                f"step:{report.step}/{self._v['ITERATIONS']} train_loss:{report.loss:.4f} "
                f"{timing(report.elapsed_seconds, report.step)}{more}"
            )

    def evaluation(self, report: EvaluationReport) -> None:
        self._run_log.line(
            f"step:{report.step}/{self._v['ITERATIONS']} val_loss:{report.val_loss:.4f} val_bpb:{report.val_bpb:.4f} "
            f"{timing(report.elapsed_seconds, report.step)}"
        )

    def message(self, text: str) -> None:
        self._run_log.note(text)


def timing(seconds: float, step: int) -> str:
    """Format the training time and the average step time, in milliseconds."""
    return f"train_time:{1000 * seconds:.0f}ms step_avg:{1000 * seconds / max(step, 1):.2f}ms"


def sdp_backends(chosen: str) -> str:
    """Return which attention kernels are enabled: the selected one on a GPU, or torch's two CPU kernels."""
    chosen = chosen.removesuffix("-grouped")
    may_run = {KERNELS[chosen]} if chosen in KERNELS else {"flash", "math"}
    return " ".join(f"{name}={name in may_run}" for name in KERNELS.values())
