"""Where the numbers of a run go besides metrics.jsonl: Weights & Biases, trackio and TensorBoard, by one interface.

A failure there never ends training: it is told once, and the numbers go on to the others.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import secrets
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from ingot.config.schema import TrackingSection
from ingot.errors import ConfigError, IngotError, RunError
from ingot.runs.folder import EVENTS, TRACKIO_ID, WANDB_ID
from ingot.runs.reporter import EvaluationReport, Reporter, StepReport, task_metrics
from ingot.runs.state import this_process
from ingot.runtime.files import read_dict, write_atomically, writing

# Which run of a dashboard a run folder is: a small file of the folder's own.


def read_id(path: Path) -> str | None:
    """What a file of a run folder says; None where it says nothing."""
    known = (read_dict(path) or {}).get("id")
    return known if isinstance(known, str) else None


def keep_id(path: Path, run: str) -> None:
    """Let a run folder say which run it is."""
    with writing(path):
        write_atomically(path, json.dumps({"id": run}))


# Weights & Biases: a run there that goes on when ours is resumed, by an id that checkpoints and the run folder keep.


def check_installed(setting: str) -> None:
    """Refuse a setting that needs the package where it is missing."""
    try:
        importlib.import_module("wandb")
    except ImportError:
        raise ConfigError(f"{setting} needs Weights & Biases; install it with: pip install 'ingot-lm[wandb]'") from None


class WandbRun:
    """A run of Weights & Biases, begun or continued."""

    def __init__(
        self, folder: Path, project: str, name: str, mode: str | None, config: Mapping[str, Any], known: str | None
    ) -> None:
        wandb = importlib.import_module("wandb")
        self.id = known or read_id(folder / WANDB_ID) or secrets.token_hex(4)
        keep_id(folder / WANDB_ID, self.id)
        try:
            self._run = wandb.init(
                project=project, name=name, config=dict(config), dir=str(folder), id=self.id, resume="allow", mode=mode
            )
        except Exception as error:  # whatever it raises: its errors have changed with its versions
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise RunError(
                f"Weights & Biases does not start: {reason}; log in with `wandb login`, or set WANDB_MODE=offline, or go without"
            ) from None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step."""
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        """End the run at Weights & Biases."""
        self._run.finish(exit_code=int(failed))


# trackio: a run in its store on this machine, which `trackio show` draws; it goes on when ours is resumed.


class TrackioRun:
    """A run of trackio, begun, or continued where the session goes on."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any], goes_on: bool) -> None:
        try:
            self._package = importlib.import_module("trackio")
        except ImportError:
            advice = "install it with: pip install 'ingot-lm[trackio]'"
            raise ConfigError(f"tracking.trackio_project={project} needs trackio", advice=advice) from None
        known = read_id(folder / TRACKIO_ID) if goes_on else None
        name = known or f"{folder.resolve().name}-{secrets.token_hex(4)}"
        keep_id(folder / TRACKIO_ID, name)
        try:
            with redirect_stdout(io.StringIO()):
                self._run = self._package.init(
                    project=project,
                    name=name,
                    config=dict(config),
                    resume="never" if known is None else "allow",
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
        except Exception as error:  # whatever it raises
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise RunError(f"trackio does not start: {reason}") from None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Give it the values of a step; a thread of its own writes them."""
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        """End the run at trackio."""
        with redirect_stdout(io.StringIO()):
            self._package.finish()


# TensorBoard's event files: scalars by step, as `tensorboard --logdir RUN` reads them.

VARINT, DOUBLE, BYTES, FLOAT = 0, 1, 2, 5  # how a field of a protocol buffer is written


class EventFile:
    """One file of events, open to append to."""

    def __init__(self, folder: Path, step: int) -> None:
        """Begin a file after a step; 0 at the start of a run."""
        folder.mkdir(parents=True, exist_ok=True)
        host, pid, _ = this_process()
        self._file: BinaryIO = (folder / f"events.out.tfevents.{time.time():.6f}.{host}.{pid}").open("xb")
        self._write(0, _field(3, BYTES, b"brain.Event:2"))
        if step:
            self._write(step + 1, _field(7, BYTES, _field(1, VARINT, 1)))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of a step."""
        told = (_field(1, BYTES, name.encode()) + _field(2, FLOAT, float(value)) for name, value in values.items())
        self._write(step, _field(5, BYTES, b"".join(_field(1, BYTES, one) for one in told)))

    def close(self, failed: bool) -> None:
        """Leave it on the disk."""
        os.fsync(self._file.fileno())
        self._file.close()

    def _write(self, step: int, what: bytes) -> None:
        event = _field(1, DOUBLE, time.time()) + (_field(2, VARINT, step) if step else b"") + what
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked_checksum(length) + event + _masked_checksum(event))
        self._file.flush()  # somebody may be watching


def _field(number: int, kind: int, value: int | float | bytes) -> bytes:
    tag = _varint(number << 3 | kind)
    if isinstance(value, bytes):
        return tag + _varint(len(value)) + value
    if kind == VARINT:
        return tag + _varint(int(value))
    return tag + struct.pack("<d" if kind == DOUBLE else "<f", value)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _masked_checksum(data: bytes) -> bytes:
    """CRC-32C, turned and shifted as the records of TensorFlow have it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _table()[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@cache
def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


Report = StepReport | EvaluationReport
Words = Callable[[Report], Mapping[str, float] | None]  # what is sent of a report; None: what numbers_of says


class Sink(Protocol):
    """Something that takes numbers."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a step; steps never go back."""

    def close(self, failed: bool) -> None:
        """The session is over."""


class Tracking(Reporter):
    """A reporter that sends what it hears of to sinks, in the words of the door; a context that closes them."""

    def __init__(self, words: Words, warn: Callable[[str], None]) -> None:
        self._words, self._warn = words, warn
        self._sinks: dict[str, Sink] = {}
        self.wandb_id: str | None = None

    def add(self, name: str, sink: Sink) -> None:
        """Send to this one too."""
        self._sinks[name] = sink

    def step(self, report: StepReport, log: bool) -> None:
        if log:
            self._send(report)

    def evaluation(self, report: EvaluationReport) -> None:
        self._send(report)

    def _send(self, report: Report) -> None:
        chosen = self._words(report)
        values = numbers_of(report) if chosen is None else chosen
        for name, sink in list(self._sinks.items()) if values else []:
            try:
                sink.log(report.step, values)
            except Exception as error:  # theirs are of any kind
                del self._sinks[name]
                self._warn(f"{name} takes no more values: {' '.join(str(error).split())[:200]}; training goes on")

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        for name, sink in self._sinks.items():
            try:
                sink.close(failed=error is not None)
            except Exception as problem:
                self._warn(f"{name} did not end well: {' '.join(str(problem).split())[:200]}")


def open_tracking(
    settings: TrackingSection,
    folder: Path,
    step: int,
    wandb_id: str | None,
    config: Mapping[str, Any],
    words: Words,
    warn: Callable[[str], None],
) -> Tracking:
    """The sinks that the settings ask for, of a session that goes on after a step; one that cannot be had is told and omitted."""
    tracking, own_name = Tracking(words, warn), folder.resolve().name
    if settings.wandb_project is not None:
        try:
            check_installed(f"tracking.wandb_project={settings.wandb_project}")
            name = settings.wandb_run_name or own_name
            run = WandbRun(folder, settings.wandb_project, name, settings.wandb_mode, config, wandb_id)
        except IngotError as error:
            warn(f"{error}; training goes on without it")
        else:
            tracking.add("Weights & Biases", run)
            tracking.wandb_id = run.id
    if settings.trackio_project is not None:
        try:
            tracking.add("trackio", TrackioRun(folder, settings.trackio_project, config, goes_on=step > 0))
        except IngotError as error:
            warn(f"{error}; training goes on without it")
    if settings.tensorboard:
        try:
            tracking.add("TensorBoard", EventFile(folder / EVENTS, step))
        except OSError as error:
            warn(f"{folder / EVENTS} cannot be written: {error.strerror}; training goes on without TensorBoard")
    return tracking


def numbers_of(report: Report) -> dict[str, float]:
    """The numbers of a report under the names that dashboards get; those of gpt-simple, and more."""
    if isinstance(report, EvaluationReport):
        train = {"eval/train_loss": report.train_loss} if report.train_loss is not None else {}
        buckets = {f"eval/{name}/loss": found["val_loss"] for name, found in report.buckets.items() if "val_loss" in found}
        scores = {f"tasks/{name}/{metric}": v for name, task in report.tasks.items() for metric, v in task_metrics(task).items()}
        told = {"eval/loss": report.val_loss, "eval/perplexity": math.exp(min(report.val_loss, 20.0)), "eval/bpb": report.val_bpb}
        return {**told, **train, **buckets, **scores}
    return {
        "train/loss": report.loss,
        "train/learning_rate": report.learning_rate,
        "train/grad_norm": report.grad_norm,
        "train/epoch": report.epoch,
        "throughput/tokens_per_sec": report.tokens_per_second,
        "throughput/total_tokens": report.tokens,
        **({"throughput/mfu": report.mfu} if report.mfu is not None else {}),
    }
