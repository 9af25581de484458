"""`gpt-simple train` and `gpt-simple validate`, with Ingot's trainer and the keys, log lines and files of the original program.

In addition to Ingot's files, a run has config.json, tokenizer/, .run_state.json, and a folder (checkpoint-N,
checkpoint-N-shutdown or final) for each checkpoint that the original gpt-simple would have written. That program can generate and
resume from these folders; Ingot resumes from its own checkpoints.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.artifact.gpt_simple import CONFIG, FINAL, RUN_STATE, SHUTDOWN, STOP_FLAG, TOKENIZER, saved_checkpoints
from ingot.compat.gpt_simple.config import GptSimpleConfig, advice, key_name, read_config
from ingot.compat.gpt_simple.translate import ALREADY_READ, cosine_steps, kept_tokens, named_tokenizer, translate, warnings
from ingot.console.entry import STARTED_AT, process_start, warn
from ingot.console.output import print_json
from ingot.data.loading.order import GO_ON_WITHOUT_BUCKET
from ingot.errors import CheckpointError, ConfigError, IngotError, RunError, Setting
from ingot.optim.schedules import learning_rate_scale
from ingot.runs.folder import WANDB_ID, Kind, RunFolder, saved_steps, step_of
from ingot.runs.reporter import BeginReport, EvaluationReport, Reporter, StepReport
from ingot.runs.state import read_state
from ingot.runs.tracking import read_id
from ingot.runtime.files import read_dict, to_json, user_path, write_atomically, writing
from ingot.runtime.processes import is_alive
from ingot.runtime.ranks import ranks_from_environment

if TYPE_CHECKING:
    from ingot.config.schema import Config
    from ingot.data.store.dataset import Dataset
    from ingot.data.tokenizers import Tokenizer

Say = Callable[[str], None]
MODULE = "ingot.compat.gpt_simple"
PORT = 29500  # default port for the rendezvous of several machines
# Files that --force deletes in addition to Ingot's. config.json is kept, because the run may have been started from it.
THEIR_FILES = (
    TOKENIZER, RUN_STATE, STOP_FLAG, ".stop_chain", ALREADY_READ, "checkpoints/checkpoint-*", "checkpoints/final",
)  # fmt: skip
RULE = "=" * 60
MAX_EXPONENT = 20.0  # perplexity is computed as exp(min(loss, 20))
FRESH_SECONDS = 300.0  # state files older than this are stale; gpt-simple updates them every logging_steps


@dataclass
class GptSimpleResult:
    """The result of a training run, with the fields of gpt-simple's TrainingResult."""

    final_loss: float  # mean loss in the last progress line or, if none was printed, the loss of the last step
    checkpoint_path: str
    total_tokens: int
    total_steps: int


def train(options: Namespace, overrides: Mapping[str, Any], words: Sequence[str]) -> int:
    """Train or, if the command line asks for several ranks, start the ranks; return the exit code."""
    from ingot.console.launch import launch
    from ingot.train.start import open_data

    config = read_options(options, overrides)
    say: Say = (lambda line: None) if options.quiet else warn  # log lines go to stderr
    if "RANK" not in os.environ and (options.nproc_per_node, options.nnodes) != (1, 1):
        refuse_live_original(Path(config.training.output_dir))
        world_size = options.nproc_per_node * options.nnodes
        resolved = translate(config, world_size, None if options.force else kept_tokens(config)).config
        open_data(resolved, world_size, _check(config, resolved, world_size, options.force))
        nodes = {"nnodes": options.nnodes, "node_rank": options.node_rank, "master_addr": options.master_addr}
        port = options.master_port or (PORT if options.nnodes > 1 else None)
        code = launch(options.nproc_per_node, words, **nodes, master_port=port, module=MODULE, program="gpt-simple")
        return code if options.nnodes == 1 else min(code, 1)  # torchrun exits with 1 after any failure
    status, result = run_training(config, say, options.force, options.verbose)
    if not ranks_from_environment().first:
        return 0  # any other exit code would make the launcher kill the first rank before it has finished
    if status == "completed":
        say(f"Training complete: {result.total_steps} steps, final loss {result.final_loss:.4f}")
    return options.stop_exit_code if status == "stopped" else 0


def validate(options: Namespace, overrides: Mapping[str, Any]) -> int:
    """Check a run and print a report; return 1 if the run cannot start, 2 for warnings (1 with --strict), else 0."""
    from ingot.preflight.data_checks import BLOCKED
    from ingot.preflight.validate import report_lines, report_record
    from ingot.preflight.validate import validate as preflight

    try:
        config = read_options(options, overrides)
        resolved = translate(config, options.world_size, kept_tokens(config)).config
    except ConfigError as error:
        error.exit_code = BLOCKED  # the exit code of `validate` for a run that cannot start
        raise
    warnings(config, warn)
    workers, mismatch = config.data.num_workers, config.data.allow_budget_mismatch
    report = preflight(resolved, options.world_size, began=process_start(), workers=workers, allow_mismatch=mismatch)
    if options.json:
        print_json(report_record(report, options.strict, key_name, advice))
    else:
        print("\n".join(report_lines(report, key_name, advice)))
    return report.findings.exit_code(options.strict)


def read_options(options: Namespace, overrides: Mapping[str, Any]) -> GptSimpleConfig:
    """Build a command's config from the config file, the overrides and the two --allow flags, which set keys."""
    flags = {f"data.{name}": True for name in ("allow_bucket_exhaustion", "allow_budget_mismatch") if getattr(options, name)}
    config = read_config(options.config, {**overrides, **flags})
    record = user_path(config.training.output_dir) / "config.yaml"
    if record.exists() and record.samefile(options.config):
        raise ConfigError(f"{options.config} would be overwritten by the run; give the config file another name or folder")
    return config


def run_training(
    config: GptSimpleConfig, say: Say = warn, force: bool = False, verbose: bool = False
) -> tuple[str, GptSimpleResult]:
    """Train on this rank; return the run's status and result. With `force`, first delete an earlier run in the folder."""
    from ingot.compat.gpt_simple.foreign import adopt_on_all_ranks
    from ingot.train.start import run

    ranks, folder = ranks_from_environment(), Path(config.training.output_dir)
    refuse_live_original(folder)
    foreign_config = (folder / CONFIG).is_file() and not (folder / RUN_STATE).is_file()
    if foreign_config and not {"model", "training"} <= (read_dict(folder / CONFIG) or {}).keys():
        what = f"{folder} holds {CONFIG}, which neither gpt-simple nor Ingot wrote"
        raise CheckpointError(what, Setting("training.output_dir"), advice="choose another {0}")
    if not force:
        adopt_on_all_ranks(config, ranks, say, warn)
    kept = None if force else kept_tokens(config)
    tokenizer = named_tokenizer(config)
    resolved = translate(config, ranks.world_size, kept, tokenizer)
    messages: list[str] = []
    warnings(config, messages.append, ranks.world_size, kept)
    # A rank started by a launcher skips the checks, because the launcher has already run them.
    dataset = None if STARTED_AT in os.environ else _check(config, resolved.config, ranks.world_size, force)
    reporter = GptSimpleReporter(config, resolved.config, tokenizer, messages, say, verbose)
    try:
        result = run(resolved, reporter, began=process_start(), force=force, files=THEIR_FILES, dataset=dataset)
    except Exception as error:
        reporter.failed(error)
        raise
    if reporter.failure is not None:
        raise reporter.failure
    final_loss = reporter.interval_loss if reporter.interval_loss is not None else result.final_loss
    path, loss = reporter.checkpoint or result.checkpoint_path or "", math.inf if final_loss is None else final_loss
    return result.status, GptSimpleResult(loss, str(path), result.total_tokens, result.total_steps)


def _check(config: GptSimpleConfig, resolved: Config, world_size: int, force: bool) -> Dataset | None:
    """Raise an error for a run that cannot succeed; return the dataset if the checks had to open it."""
    from ingot.preflight.validate import check_before_training

    workers, mismatch = config.data.num_workers, config.data.allow_budget_mismatch
    keys: dict[str, Any] = {"workers": workers, "allow_mismatch": mismatch, "name": key_name, "advise": advice}
    return check_before_training(resolved, world_size, warn, fresh=force, **keys)


def refuse_live_original(folder: Path) -> None:
    """Raise RunError if the original gpt-simple is training in the folder: it and Ingot would delete each other's checkpoints.

    The state file does not name the host, so a recently updated one counts as a running process even if this host has no such
    process. State files written by Ingot are ignored, because Ingot's lock protects its runs.
    """
    state, ours = read_dict(folder / RUN_STATE) or {}, read_state(folder)
    try:
        pid, updated = int(state["pid"]), datetime.fromisoformat(state["updated_at"])
        written_by_us = ours is not None and (ours.pid == pid or datetime.fromisoformat(ours.updated_at) >= updated)
    except (KeyError, TypeError, ValueError):
        return  # gpt-simple did not write this file: it always writes a pid and a time with a time zone
    if state.get("status") != "running" or written_by_us:
        return
    age, path = time.time() - updated.timestamp(), folder / RUN_STATE
    if age < FRESH_SECONDS or (pid > 0 and pid != os.getpid() and is_alive(pid, age)):
        what = f"the original gpt-simple (process {pid}) seems to be training in {folder}, perhaps on another host"
        how = f"stop that process first, or choose another {{0}}; if it has already ended, delete {path}"
        raise RunError(f"{what}: {path} was last updated {max(0.0, age):.0f} s ago", Setting("training.output_dir"), advice=how)


class GptSimpleReporter(Reporter):
    """A reporter that prints the log lines of `gpt-simple train` and writes its files, on the first rank.

    `notes` are warnings to print once the run begins, so that a run that fails to start prints only its error. `interval_loss` is
    the mean loss in the last progress line (None before the first); `checkpoint` is the path of the newest checkpoint. If a
    checkpoint cannot be written, training continues and `failure` holds the error until a later save succeeds. If `verbose`, the
    reporter also prints what the run is waiting for.
    """

    def __init__(
        self,
        config: GptSimpleConfig,
        resolved: Config,
        tokenizer: Tokenizer | None,
        notes: Sequence[str] = (),
        say: Say = warn,
        verbose: bool = False,
    ) -> None:
        self._config, self._resolved, self._notes, self._say, self._verbose = config, resolved, notes, say, verbose
        self._tokenizer, self._keys = tokenizer, config.to_dict()
        self._folder = Path(config.training.output_dir)
        self.interval_loss: float | None = None
        self.checkpoint: Path | None = None
        self.failure: CheckpointError | None = None
        self._interval: list[StepReport] = []  # steps since the last progress line
        self._numbers: dict[str, float] = {}  # values in the last progress line
        self._seconds = 0.0
        self._state: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._resumed_from: str | None = None

    def begin(self, report: BeginReport) -> None:
        from ingot.compat.gpt_simple.files import write_tokenizer
        from ingot.runs.checkpoints import read_kind

        step, max_steps = report.resumed_at, self._config.training.max_steps
        self._seconds = report.elapsed_seconds
        saved = [one for one in saved_checkpoints(self._folder) if one.step <= step]
        newest, tokens = (str(saved[-1].path), saved[-1].state.get("tokens_trained", 0)) if saved else (None, 0)
        if saved and saved[-1].step == step:
            self.checkpoint, self._resumed_from = saved[-1].path, newest
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._state = {"status": "running", "pid": os.getpid(), "started_at": now, "updated_at": now, "global_step": step}
        self._state |= {"max_steps": max_steps, "learning_rate": 0.0, "tokens_trained": tokens, "tokens_per_sec": 0.0}
        self._state |= {"error": None, "latest_checkpoint": newest, "config_path": str(self._folder / CONFIG)}
        with writing(self._folder):
            write_atomically(self._folder / CONFIG, json.dumps(self._keys, indent=2) + "\n")
            folder, tokenizer = self._folder / TOKENIZER, self._tokenizer
            written = folder.is_dir() and any(folder.iterdir())  # the tokenizer is written once per run
            if tokenizer and not written and not write_tokenizer(folder, tokenizer.spec(), self._config.data.max_length):
                warn(f"gpt-simple has no {tokenizer.kind} tokenizer, so only ingot can generate from {self._folder}")
        self._update()
        ours = saved_steps(self._folder / "checkpoints").get(step)
        if ours is not None and self.checkpoint is None:  # the run was killed before it wrote gpt-simple's folder
            self.saved(ours, read_kind(ours))
        with suppress(OSError):
            if (self._folder / STOP_FLAG).stat().st_mtime < process_start():
                (self._folder / STOP_FLAG).unlink()  # left over from an earlier session
        self._pass_on_flag()
        for line in self._notes:
            warn(line)
        t, o = self._config.training, self._config.optimizer
        rows = self._resolved.training.tokens_per_step // self._config.data.max_length
        lines = [
            RULE,
            "GPT-SIMPLE TRAINING",
            RULE,
            f"Dataset:              {self._config.data.path}",
            f"Output:               {t.output_dir}",
            f"Devices:              {report.ranks}",
            f"Per-device batch size: {t.per_device_batch_size}",
            f"Gradient accumulation: {-(-rows // (t.per_device_batch_size * report.ranks))}",
            f"Effective batch size:  {rows}",
            f"Max steps:            {t.max_steps}",
            f"LR: {o.learning_rate}  (warmup={o.warmup_steps}, decay={cosine_steps(self._config)})",
        ]
        if step:
            named = t.resume if t.resume not in ("auto", "scratch") else self.checkpoint
            lines.append(f"Resuming from step {step}  (checkpoint: {named})")
        lines.append(RULE)
        if step >= max_steps:
            lines.append(f"Training already complete: step {step} of training.max_steps={max_steps}; raise it to continue")
        for line in lines:
            self._say(line)

    def step(self, report: StepReport, log: bool) -> None:
        self._pass_on_flag()
        self._interval.append(report)
        if report.step % self._config.training.logging_steps:
            return
        steps, seconds = len(self._interval), report.elapsed_seconds - self._seconds
        targets = sum(one.targets for one in self._interval)
        self.interval_loss = sum(one.loss for one in self._interval) / steps
        # As in gpt-simple, a progress line shows the learning rate of the next step.
        scale = learning_rate_scale(self._resolved, report.step, report.elapsed_seconds)
        self._numbers = n = {
            "train/loss": self.interval_loss,
            "train/learning_rate": self._resolved.optimizer.learning_rate * scale,
            "train/grad_norm": sum(one.grad_norm for one in self._interval) / steps,
            "throughput/tokens_per_sec": targets / seconds if seconds else 0.0,
            "throughput/time_per_step": seconds / steps,
            "throughput/total_tokens": report.tokens,
            "throughput/packing_efficiency": 100 * targets / (steps * self._resolved.training.tokens_per_step),
            **({"curriculum/phase": report.phase} if self._config.data.curriculum else {}),
        }
        self._say(
            f"Step {report.step:6d} | Loss {n['train/loss']:.4f} | LR {n['train/learning_rate']:.2e} | "
            f"GradNorm {n['train/grad_norm']:.3f} | {n['throughput/time_per_step']:.2f}s/step | "
            f"{n['throughput/tokens_per_sec']:,.0f} tok/s | Packing {n['throughput/packing_efficiency']:.1f}%"
        )
        self._interval, self._seconds = [], report.elapsed_seconds
        self._update(
            global_step=report.step,
            loss=self.interval_loss,
            learning_rate=report.learning_rate,
            tokens_trained=report.tokens,
            tokens_per_sec=report.tokens_per_second,
        )

    def evaluation(self, report: EvaluationReport) -> None:
        self._say(f"Eval Loss: {report.val_loss:.4f}")

    def phase(self, number: int, tokens: int) -> None:
        self._say(f"Curriculum: advancing to phase {number} (at {tokens:,} total tokens)")

    def saved(self, path: Path, kind: Kind = "regular") -> None:
        """Write the folders that gpt-simple would have written for a checkpoint; delete those that it would have deleted."""
        from ingot.compat.gpt_simple.files import write_checkpoint
        from ingot.runs.checkpoints import load_checkpoint, to_keep

        began, step, folder, training = time.monotonic(), step_of(path), path.parent, self._config.training
        names = {"shutdown": [f"checkpoint-{step}{SHUTDOWN}"], "final": [FINAL], "regular": []}[kind]
        if kind != "shutdown" and step % training.save_steps == 0:  # no folder for a checkpoint saved only because it is the best
            names.insert(0, f"checkpoint-{step}")
        self.checkpoint = folder / names[-1] if names else path
        new = [folder / name for name in names if name == FINAL or not (folder / name).exists()]
        try:
            if new:
                checkpoint = load_checkpoint(path)
                facts = {"wandb_run_id": read_id(self._folder / WANDB_ID), "resumed_from": self._resumed_from}
                for target in new:
                    write_checkpoint(target, checkpoint, self._keys, facts)
            for earlier in saved_checkpoints(self._folder):
                if earlier.kind == "final" and earlier.step < step:  # gpt-simple always takes `final` for the newest checkpoint
                    shutil.rmtree(regular := earlier.path.with_name(f"checkpoint-{earlier.step}"), ignore_errors=True)
                    earlier.path.rename(regular)
            saved = {(one.step, one.kind): one.path for one in saved_checkpoints(self._folder)}
            for old in saved.keys() - to_keep(list(saved), training.keep_last_k, training.keep_milestone_every or 0):
                shutil.rmtree(saved[old], ignore_errors=True)
            self.failure = None
        except (IngotError, OSError) as error:  # in the saving thread: the error is raised when training ends
            why = getattr(error, "strerror", None) or error
            self.failure = CheckpointError(f"cannot write {path.name} in gpt-simple's format: {why}")
            warn(f"{self.failure}; training continues, and Ingot's checkpoint {path} is complete")
            return
        for target in new:
            what = "Checkpoint" if target.name == f"checkpoint-{step}" else f"{kind.capitalize()} checkpoint"
            self._say(f"{what} saved to {target} (step {step}, {time.monotonic() - began:.1f}s)")
            self._update(latest_checkpoint=str(target))

    def tracked(self, report: StepReport | EvaluationReport) -> Mapping[str, float] | None:
        if isinstance(report, EvaluationReport):
            return {"eval/loss": report.val_loss, "eval/perplexity": math.exp(min(report.val_loss, MAX_EXPONENT))}
        return {} if report.step % self._config.training.logging_steps else self._numbers

    def tracked_config(self) -> Mapping[str, Any] | None:
        return self._keys

    def waiting(self, what: str, done: int = 0, total: int = 0) -> None:
        if not done and self._verbose:
            warn(what)

    def message(self, text: str) -> None:
        warn(text.replace(GO_ON_WITHOUT_BUCKET, "add --allow-bucket-exhaustion"))

    def end(self, result: Any) -> None:
        with suppress(OSError):
            (self._folder / STOP_FLAG).unlink(missing_ok=True)
        loss = {} if result.final_loss is None else {"loss": self._state.get("loss", result.final_loss)}
        self._update(status=result.status, global_step=result.total_steps, tokens_trained=result.total_tokens, **loss)
        if result.status == "completed":
            for line in (RULE, "TRAINING COMPLETE!", RULE):
                self._say(line)
            return
        reason = "flag_file" if result.stop_reason == "stop_file" else result.stop_reason
        where = self.checkpoint or result.checkpoint_path or self._folder
        ended = "Halted" if result.status == "halted" else "Stopped"
        self._say(f"{ended} at step {result.total_steps} ({reason}). Resume with: --training.resume {where}")

    def failed(self, error: BaseException) -> None:
        """Record the error that ended the session, so that `status` of the original gpt-simple can show it."""
        if self._state:
            self._update(status="error", error="".join(traceback.format_exception(error)))

    def _pass_on_flag(self) -> None:
        """Ask the run to stop if gpt-simple's stop flag (a file) exists; end() deletes the file."""
        if (self._folder / STOP_FLAG).is_file():
            with suppress(CheckpointError):  # the write failed; the next step tries again
                RunFolder(self._folder).ask_to_stop()

    def _update(self, **values: Any) -> None:
        with self._lock:  # both the training loop and the saving thread call this
            self._state |= {**values, "updated_at": datetime.now(UTC).isoformat(timespec="seconds")}
            text, path = to_json(self._state, indent=2) + "\n", self._folder / RUN_STATE
            try:
                write_atomically(path, text, durable=self._state["status"] != "running")
            except OSError as error:
                warn(f"cannot write {path}: {error.strerror or error}; training continues")
