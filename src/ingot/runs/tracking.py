"""Send the metrics of a run to Weights & Biases, trackio and TensorBoard.

A failure there never ends training: it is reported once, and the other trackers still get their numbers.
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

Report = StepReport | EvaluationReport
ChooseValues = Callable[[Report], Mapping[str, float] | None]  # None: what `numbers_of` returns
PACKAGES = {"wandb": "Weights & Biases", "trackio": "trackio"}


class Tracker(Protocol):
    """A destination for metrics."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step; steps never decrease."""

    def close(self, failed: bool) -> None:
        """End the session."""


class Tracking(Reporter):
    """A reporter that sends logged steps and evaluations to trackers; a context that closes them."""

    def __init__(self, choose_values: ChooseValues, warn: Callable[[str], None]) -> None:
        self._choose_values, self._warn = choose_values, warn
        self._trackers: dict[str, Tracker] = {}
        self.wandb_id: str | None = None

    def add(self, name: str, tracker: Tracker) -> None:
        """Send to this tracker too."""
        self._trackers[name] = tracker

    def step(self, report: StepReport, log: bool) -> None:
        if log:
            self._send(report)

    def evaluation(self, report: EvaluationReport) -> None:
        self._send(report)

    def _send(self, report: Report) -> None:
        chosen = self._choose_values(report)
        values = numbers_of(report) if chosen is None else chosen
        for name, tracker in list(self._trackers.items()) if values else []:
            try:
                tracker.log(report.step, values)
            except Exception as error:  # trackers raise exceptions of any class
                del self._trackers[name]
                self._warn(f"{name} takes no more values: {_reason(error)}; training goes on")

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        for name, tracker in self._trackers.items():
            try:
                tracker.close(failed=error is not None)
            except Exception as problem:
                self._warn(f"{name} did not end well: {_reason(problem)}")


def open_tracking(
    settings: TrackingSection,
    folder: Path,
    step: int,
    wandb_id: str | None,
    config: Mapping[str, Any],
    choose_values: ChooseValues,
    warn: Callable[[str], None],
) -> Tracking:
    """Start the trackers that the settings ask for, after a step; one that cannot be started is reported and left out."""
    tracking = Tracking(choose_values, warn)

    def start_wandb() -> Tracker:
        run = WandbRun(settings, folder, config, wandb_id)
        tracking.wandb_id = run.id
        return run

    wanted: list[tuple[str, object, Callable[[], Tracker]]] = [
        ("Weights & Biases", settings.wandb_project is not None, start_wandb),
        ("trackio", settings.trackio_project is not None, lambda: TrackioRun(settings, folder, config, resumed=step > 0)),
        ("TensorBoard", settings.tensorboard, lambda: EventFile(folder / EVENTS, step)),
    ]
    for name, is_wanted, start in wanted:
        try:
            if is_wanted:
                tracking.add(name, start())
        except IngotError as error:
            warn(f"{error}; training goes on without it")
        except OSError as error:
            warn(f"{folder / EVENTS} cannot be written: {error.strerror}; training goes on without {name}")
    return tracking


def numbers_of(report: Report) -> dict[str, float]:
    """Return the numbers of a report under the names that dashboards get: gpt-simple's names, and more."""
    if isinstance(report, EvaluationReport):
        train = {"eval/train_loss": report.train_loss} if report.train_loss is not None else {}
        buckets = {f"eval/{name}/loss": scores["val_loss"] for name, scores in report.buckets.items() if "val_loss" in scores}
        tasks = {f"tasks/{name}/{metric}": v for name, task in report.tasks.items() for metric, v in task_metrics(task).items()}
        perplexity = math.exp(min(report.val_loss, 20.0))
        scores = {"eval/loss": report.val_loss, "eval/perplexity": perplexity, "eval/bpb": report.val_bpb}
        return {**scores, **train, **buckets, **tasks}
    return {
        "train/loss": report.loss,
        "train/learning_rate": report.learning_rate,
        "train/grad_norm": report.grad_norm,
        "train/epoch": report.epoch,
        "throughput/tokens_per_sec": report.tokens_per_second,
        "throughput/total_tokens": report.tokens,
        **({"throughput/mfu": report.mfu} if report.mfu is not None else {}),
    }


def read_id(path: Path) -> str | None:
    """Return the dashboard's id of a run from a file of its folder; None if there is none."""
    run_id = (read_dict(path) or {}).get("id")
    return run_id if isinstance(run_id, str) else None


def write_id(path: Path, run_id: str) -> None:
    """Write the dashboard's id of a run into its folder."""
    with writing(path):
        write_atomically(path, json.dumps({"id": run_id}))


def check_installed(setting: str, package: str = "wandb") -> Any:
    """Return a package that a setting needs; ConfigError if it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError:
        install = f"install it with: pip install 'ingot-lm[{package}]'"
        raise ConfigError(f"{setting} needs {PACKAGES[package]}", advice=install) from None


class WandbRun:
    """A run at Weights & Biases; a resumed run continues there by its id."""

    def __init__(self, settings: TrackingSection, folder: Path, config: Mapping[str, Any], run_id: str | None) -> None:
        wandb = check_installed(f"tracking.wandb_project={settings.wandb_project}")
        self.id = run_id or read_id(folder / WANDB_ID) or secrets.token_hex(4)
        write_id(folder / WANDB_ID, self.id)
        arguments: dict[str, Any] = {"project": settings.wandb_project, "name": settings.wandb_run_name or folder.resolve().name}
        arguments |= {"config": dict(config), "dir": str(folder), "id": self.id, "resume": "allow", "mode": settings.wandb_mode}
        advice = "; log in with `wandb login`, or set WANDB_MODE=offline, or go without"
        self._run = _start("wandb", lambda: wandb.init(**arguments), advice)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step."""
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        """End the run at Weights & Biases."""
        self._run.finish(exit_code=int(failed))


class TrackioRun:
    """A run in trackio's store on this machine, which `trackio show` draws; a resumed run continues there by its name."""

    def __init__(self, settings: TrackingSection, folder: Path, config: Mapping[str, Any], resumed: bool) -> None:
        self._trackio = check_installed(f"tracking.trackio_project={settings.trackio_project}", "trackio")
        known = read_id(folder / TRACKIO_ID) if resumed else None
        name = known or f"{folder.resolve().name}-{secrets.token_hex(4)}"
        write_id(folder / TRACKIO_ID, name)
        arguments: dict[str, Any] = {"project": settings.trackio_project, "name": name, "config": dict(config)}
        arguments |= {"resume": "never" if known is None else "allow", "embed": False}
        arguments |= {"auto_log_gpu": False, "auto_log_cpu": False}
        with redirect_stdout(io.StringIO()):  # it prints advertisements
            self._run = _start("trackio", lambda: self._trackio.init(**arguments))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step; a thread of trackio writes them."""
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        """End the run at trackio."""
        with redirect_stdout(io.StringIO()):
            self._trackio.finish()


def _start(package: str, init: Callable[[], Any], advice: str = "") -> Any:
    try:
        return init()
    except Exception as error:  # the exception classes have changed with the packages' versions
        raise RunError(f"{PACKAGES[package]} does not start: {_reason(error)}{advice}") from None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


VARINT, DOUBLE, BYTES, FLOAT = 0, 1, 2, 5  # wire types of protocol buffer fields


class EventFile:
    """A TensorBoard event file: scalars by step, as `tensorboard --logdir RUN` reads them. Needs no package."""

    def __init__(self, folder: Path, step: int) -> None:
        """Start a file after a step, 0 at the start of a run; TensorBoard forgets what came after that step."""
        folder.mkdir(parents=True, exist_ok=True)
        host, pid, _ = this_process()
        self._file: BinaryIO = (folder / f"events.out.tfevents.{time.time():.6f}.{host}.{pid}").open("xb")
        self._write(0, _field(3, BYTES, b"brain.Event:2"))
        if step:
            self._write(step + 1, _field(7, BYTES, _field(1, VARINT, 1)))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append the values of a step."""
        scalars = (_field(1, BYTES, name.encode()) + _field(2, FLOAT, float(value)) for name, value in values.items())
        self._write(step, _field(5, BYTES, b"".join(_field(1, BYTES, scalar) for scalar in scalars)))

    def close(self, failed: bool) -> None:
        """Sync and close the file."""
        os.fsync(self._file.fileno())
        self._file.close()

    def _write(self, step: int, content: bytes) -> None:
        event = _field(1, DOUBLE, time.time()) + (_field(2, VARINT, step) if step else b"") + content
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
    """Return the masked CRC-32C of TensorFlow records."""
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
