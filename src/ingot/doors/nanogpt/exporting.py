"""Any model of the gpt2 family as a ckpt.pt, whatever trained it: `ingot export --format nanogpt`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ingot.config.schema import Config
from ingot.doors.nanogpt.checkpoint import write_ckpt
from ingot.doors.nanogpt.keys import PRECISIONS, SETTINGS, TRAIN, theirs
from ingot.trained.weights import Weights, as_checkpoint


def export_ckpt(source: Weights, path: Path) -> int:
    """Write a ckpt.pt and return its bytes; what is not a checkpoint has no optimizer's memory to go with it."""
    write_ckpt(path, as_checkpoint(source), keys_of(source.config))
    return path.stat().st_size


def keys_of(config: Config) -> dict[str, Any]:
    """The 33 keys of train.py that say what a config says; those it says nothing of have their defaults."""
    c, t, o = config, config.training, config.optimizer
    keys = {name: TRAIN[name].default for name in theirs(TRAIN.values())}
    for name, path in SETTINGS.items():
        section, _, field = path.partition(".")
        value = getattr(getattr(c, section), field, None)  # a family that has no such setting is refused when it is written
        if name in keys and value not in (None, "auto"):
            keys[name] = TRAIN[name].of(value, path)
    rows = c.rows_per_step
    micro_batch = rows if t.micro_batch == "auto" else min(t.micro_batch, rows)
    steps = t.max_steps or 1
    names = {precision: dtype for dtype, precision in PRECISIONS.items()}
    return keys | {
        "dataset": Path(c.data.path).name,
        "batch_size": micro_batch,
        "gradient_accumulation_steps": -(-rows // micro_batch),
        "max_iters": steps - 1,
        "decay_lr": o.schedule != "constant",
        "lr_decay_iters": o.decay_steps or steps,
        "min_lr": o.learning_rate * o.floor,
        "dtype": names.get(t.precision, "bfloat16"),
    }
