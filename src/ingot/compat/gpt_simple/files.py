"""gpt-simple's files beside ours, for its users' scripts and for the original itself: written while a run goes on.

config.json, tokenizer/, .run_state.json, and for every checkpoint of ours that the original would have written a folder of its
own: checkpoint-N, checkpoint-N-shutdown or final. Our own checkpoints are what a resume relies on; these follow them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ingot.artifact.gpt_simple import CONFIG, FINAL, RUN_STATE, SHUTDOWN, STOP_FLAG, TOKENIZER, Saved, saved_checkpoints
from ingot.compat.gpt_simple.checkpoint import Keys, theirs_reads, write_checkpoint, write_tokenizer
from ingot.errors import CheckpointError, IngotError, RunError, Setting
from ingot.runs.checkpoints import load_checkpoint, read_kind
from ingot.runs.folder import WANDB_ID, Kind, RunFolder, saved_steps, step_of
from ingot.runs.reporter import BeginReport, Reporter, StepReport
from ingot.runs.state import read_state
from ingot.runs.tracking import read_id
from ingot.runtime.files import read_dict, to_json, write_atomically, writing
from ingot.runtime.processes import is_alive

LEFT = re.compile(rf"\.({FINAL}|checkpoint-\d+.*)\.[0-9a-f]{{8}}\.(tmp|old)")  # by a kill while one was written
STATUSES = {"failed": "error"}  # what it calls a status
FRESH_SECONDS = 300.0  # the original writes its state every logging_steps, and clocks of hosts differ
LOOK_SECONDS = 0.5  # between two looks for its flag file: a network disk answers slowly


def refuse_strangers(folder: Path) -> None:
    """Refuse a folder whose config.json is neither gpt-simple's nor ours: it would be replaced, and deleted by --force."""
    if not (folder / CONFIG).is_file() or (folder / RUN_STATE).is_file():
        return
    if not {"model", "training"} <= (read_dict(folder / CONFIG) or {}).keys():
        what = f"{folder} holds {CONFIG}, which neither gpt-simple nor Ingot wrote"
        raise CheckpointError(what, Setting("training.output_dir"), advice="choose another {0}")


def refuse_live_original(folder: Path) -> None:
    """Refuse a folder in which the original gpt-simple trains: each of the two would delete the other's checkpoints.

    Its state names no host, so a process that is not found here may still train on another one while the state is fresh. A run
    of ours writes the same file; its own lock keeps others out, and a killed one may go on at once.
    """
    state, ours = read_dict(folder / RUN_STATE) or {}, read_state(folder)
    try:
        pid, updated = int(state["pid"]), datetime.fromisoformat(state["updated_at"])
        written_by_us = ours is not None and (ours.pid == pid or datetime.fromisoformat(ours.updated_at) >= updated)
    except (KeyError, TypeError, ValueError):
        return  # the original writes both, the time with its zone
    if state.get("status") != "running" or written_by_us:
        return
    age = time.time() - updated.timestamp()
    output_dir = Setting("training.output_dir")
    if pid > 0 and pid != os.getpid() and is_alive(pid, age):
        what = f"the original gpt-simple, process {pid}, is training in {folder}"
        raise RunError(what, output_dir, advice="stop it first, or choose another {0}")
    if age < FRESH_SECONDS:
        raise RunError(
            f"the original gpt-simple wrote {folder / RUN_STATE} {max(0.0, age):.0f} s ago and may be training on another host",
            output_dir,
            advice=f"stop it first, or choose another {{0}}; if it is dead, delete {folder / RUN_STATE}",
        )


class RunFiles(Reporter):
    """Writes gpt-simple's files into a run folder; on the first rank.

    `keys` are its 59 after all overrides, `tokenizer` the spec of the run's. A file that cannot be written is told, training goes
    on, and `failure` holds the error until a later save succeeds. Its flag file becomes our request to stop, unless it was left
    before the session began at a unix time.
    """

    def __init__(
        self,
        folder: Path,
        keys: Keys,
        tokenizer: Mapping[str, Any] | None,
        warn: Callable[[str], None],
        began: float = 0.0,
    ) -> None:
        self._folder, self._keys, self._tokenizer, self._warn = folder, keys, tokenizer, warn
        self._losses: list[float] = []  # since the last line
        self._resumed_from: str | None = None
        self._state: dict[str, Any] = {}
        self._telling = threading.Lock()
        self._flag, self._began, self._looked_at = folder / STOP_FLAG, began, -LOOK_SECONDS
        self.failure: CheckpointError | None = None

    def begin(self, report: BeginReport) -> None:
        found = saved_checkpoints(self._folder)
        newest = next((saved for saved in reversed(found) if saved.step <= report.resumed_at), None)
        self._resumed_from = str(newest.path) if newest is not None and newest.step == report.resumed_at else None
        self._state = {
            "status": "running",
            "pid": os.getpid(),
            "started_at": now(),
            "updated_at": now(),
            "global_step": report.resumed_at,
            "max_steps": self._keys["training"]["max_steps"],
            "learning_rate": 0.0,
            "tokens_trained": newest.state.get("tokens_trained", 0) if newest is not None else 0,
            "tokens_per_sec": 0.0,
            "error": None,
            "latest_checkpoint": str(newest.path) if newest is not None else None,
            "config_path": str(self._folder / CONFIG),
        }
        with writing(self._folder):
            for left in self._folder.glob("checkpoints/.*"):
                if LEFT.fullmatch(left.name):
                    shutil.rmtree(left, ignore_errors=True)
            write_atomically(self._folder / CONFIG, json.dumps(self._keys, indent=2) + "\n")
            self._write_tokenizer()
            self._write_state()
        self._catch_up(report.resumed_at)
        with suppress(OSError):
            if self._flag.stat().st_mtime < self._began:
                self._flag.unlink()
        self._pass_on_flag()

    def step(self, report: StepReport, log: bool) -> None:
        self._pass_on_flag()
        self._losses.append(report.loss)
        if report.step % self._keys["training"]["logging_steps"]:
            return
        self._tell(
            global_step=report.step,
            loss=sum(self._losses) / len(self._losses),
            learning_rate=report.learning_rate,
            tokens_trained=report.tokens,
            tokens_per_sec=report.tokens_per_second,
        )
        self._losses = []

    def saved(self, path: Path, kind: Kind = "regular") -> None:
        try:
            self._write_theirs(path, kind)
            self.failure = None
        except (IngotError, OSError) as error:  # in a thread: training goes on, and the end of the run tells
            self.failure = CheckpointError(
                f"cannot write {path.name} as gpt-simple's: {getattr(error, 'strerror', None) or error}"
            )
            self._warn(f"{self.failure}; training goes on, and {path} is whole")

    def end(self, result: Any) -> None:
        with suppress(OSError):
            self._flag.unlink(missing_ok=True)
        self._tell(
            status=STATUSES.get(result.status, result.status),
            global_step=result.total_steps,
            tokens_trained=result.total_tokens,
            **({} if result.final_loss is None else {"loss": self._state.get("loss", result.final_loss)}),
        )

    def failed(self, error: BaseException) -> None:
        """The session has ended with an error, which the original's `status` shows."""
        if self._state:
            self._tell(status="error", error="".join(traceback.format_exception(error)))

    def _pass_on_flag(self) -> None:
        """Ask the run to stop where gpt-simple's flag file does; it is removed when that has been obeyed."""
        if time.monotonic() - self._looked_at >= LOOK_SECONDS:
            self._looked_at = time.monotonic()
            if self._flag.is_file():
                with suppress(CheckpointError):  # a disk that refuses: the next look tries again
                    RunFolder(self._folder).ask_to_stop()

    def _write_theirs(self, path: Path, kind: Kind) -> None:
        """Write a checkpoint of ours as those that the original would have written, and delete those that it would not keep."""
        step, training = step_of(path), self._keys["training"]
        names = [f"checkpoint-{step}"] if step % training["save_steps"] == 0 and kind != "shutdown" else []
        names += {"regular": [], "shutdown": [f"checkpoint-{step}{SHUTDOWN}"], "final": [FINAL]}[kind]
        folder = path.parent
        names = [name for name in names if name == FINAL or not (folder / name).exists()]
        if not names:
            return
        checkpoint = load_checkpoint(path)
        facts = {"wandb_run_id": read_id(self._folder / WANDB_ID), "resumed_from": self._resumed_from}
        for name in names:
            write_checkpoint(folder / name, checkpoint, self._keys, facts)
        found = saved_checkpoints(self._folder)
        rename_final(found, step)
        for saved in not_kept(saved_checkpoints(self._folder), training["keep_last_k"], training["keep_milestone_every"]):
            shutil.rmtree(saved.path, ignore_errors=True)
        self._tell(latest_checkpoint=str(folder / names[-1]))

    def _catch_up(self, step: int) -> None:
        """Write what a kill kept an earlier session from writing: the folder of the checkpoint that this one goes on from."""
        ours = saved_steps(self._folder / "checkpoints").get(step)
        newest = max((saved.step for saved in saved_checkpoints(self._folder)), default=0)
        if ours is not None and newest < step:
            self.saved(ours, read_kind(ours))

    def _write_tokenizer(self) -> None:
        folder = self._folder / TOKENIZER
        if self._tokenizer is None or (folder.is_dir() and any(folder.iterdir())):
            return  # once per run, as the original does
        write_tokenizer(folder, self._tokenizer, self._keys["data"]["max_length"])
        if not theirs_reads(self._tokenizer):
            kind = self._tokenizer["kind"]
            self._warn(f"gpt-simple has no {kind} tokenizer: {folder} is for ingot alone, and the original cannot generate here")

    def _tell(self, **known: Any) -> None:
        """Give .run_state.json the latest values; a disk that refuses does not end training."""
        with self._telling:  # the loop does, and the thread that saves
            self._state |= known
            try:
                self._write_state()
            except OSError as error:
                self._warn(f"cannot write {self._folder / RUN_STATE}: {error.strerror or error}; training goes on")

    def _write_state(self) -> None:
        self._state["updated_at"] = now()
        durable = self._state["status"] != "running"
        write_atomically(self._folder / RUN_STATE, to_json(self._state, indent=2) + "\n", durable=durable)


def not_kept(saved: Sequence[Saved], keep_last: int | None, keep_every: int | None) -> list[Saved]:
    """Those that are not kept: all but the newest regular ones, the newest of a stop, final, and milestones; null keeps all."""
    if keep_last is None:
        return []
    stops = [one for one in saved if one.name.endswith(SHUTDOWN)]
    regular = [one for one in saved if one.name != FINAL and one not in stops]
    kept = [*regular[-max(1, keep_last) :], *stops[-1:], *(one for one in saved if one.name == FINAL)]
    return [one for one in saved if one not in kept and not (one in regular and keep_every and one.step % keep_every == 0)]


def rename_final(saved: Sequence[Saved], step: int) -> None:
    """Give `final` of a run that has gone on the name of its step: the original would take it for the newest for ever."""
    for old in (one for one in saved if one.name == FINAL and one.step < step):
        name = old.path.with_name(f"checkpoint-{old.step}")
        if name.exists():
            shutil.rmtree(old.path, ignore_errors=True)
        else:
            old.path.rename(name)


def now() -> str:
    """The time as its files have it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
