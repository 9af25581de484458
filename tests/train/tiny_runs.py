"""Runs of a tiny model on a small text, in this process, and what they left behind."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ingot.config.loading import load_config
from ingot.data.prepare.pipeline import write_dataset
from ingot.data.tokenizers import ByteTokenizer
from ingot.runs.folder import saved_steps
from ingot.runs.reporter import Reporter
from ingot.runs.state import TrainingResult
from ingot.runtime.tensors import read_tensors
from ingot.train.start import run

TINY = {
    "model.layers": 1, "model.heads": 2, "model.width": 16, "data.seq_len": 16,
    "optimizer.name": "muon", "optimizer.schedule": "budget", "optimizer.learning_rate": 0.01,
    "training.max_steps": 20, "training.tokens_per_step": 64, "training.save_every": 4, "training.keep_every": 4,
    "training.device": "cpu", "tracking.log_every": 1,
    "artifact.quantiser": "none", "artifact.codec": "none", "artifact.score": False,
}  # fmt: skip


def write_text(folder: Path, seed: int) -> Path:
    draw = random.Random(seed)
    pieces = (("train" if i else "val", "".join(draw.choices("abcde \n", k=600))) for i in range(5))
    write_dataset(pieces, folder, ByteTokenizer(), source={})
    return folder


Train = Callable[..., TrainingResult]


def train_tiny(data: Path, folder: Path, reporter: Reporter | None = None, **settings: Any) -> TrainingResult:
    """Train the tiny model into a folder; settings by their dotted names with the dots as `__`."""
    given = {name.replace("__", "."): value for name, value in settings.items()}
    values = {**TINY, "data.path": str(data), "training.output_dir": str(folder), **given}
    return run(load_config(python=values, environment={}), reporter)


def state_of(folder: Path) -> dict[str, str]:
    """Checksums of all that a finished run computed."""
    last = list(saved_steps(folder / "checkpoints").values())[-1]
    tensors, _ = read_tensors(folder / "artifact" / "model.safetensors")
    files = {name: (last / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")}
    files["artifact"] = b"".join(bytes(record.data) for record in tensors.values())
    return {"checkpoint": last.name, **{name: hashlib.sha256(content).hexdigest() for name, content in files.items()}}


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [record for record in lines if record["kind"] == kind]


def killed_after(folder: Path, step: int) -> Path:
    """A copy of a run as a kill after the checkpoint of a step leaves it."""
    copy = folder.with_name(f"killed-{step}")
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "artifact")
    for found, path in saved_steps(copy / "checkpoints").items():
        if found > step:
            shutil.rmtree(path)
    return copy
