"""Measure how long training is interrupted by a checkpoint and by the change to another shard of the data.

Each case is one run of the engine. Steps are timed by when they are reported, and the steps around an interruption are compared
with the mean of the others. `checkpoints` trains the 124M shape of 64 x 1024 tokens and saves every 100 steps; it counts 10 steps
before a checkpoint and the 60 after it, during which it is written. `shards` trains the golf shape with 131,072 tokens per step
on consecutive shards of 17 MB, evicted from the page cache where the system supports it; it counts 6 steps before a shard's first
step, because tokens are read ahead, and 3 after it.

    python benchmarks/pauses.py [--rows checkpoints shards] [--results pauses.jsonl] [--toy]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from step_profile import SHAPES, Shape
from step_profile import TOY as TINY

TOY = replace(TINY, changes={**TINY.changes, "model.vocab_size": 512})
ROWS = ("checkpoints", "shards")
SAVE_EVERY, AROUND = 100, (10, 60)  # interval in steps; steps before and after a checkpoint attributed to it
CHECKPOINTS = 4
SHARD_STEPS, SHARDS, AROUND_SHARD = 64, 6, (6, 3)
SKIPPED = 4  # first steps, not timed because GPU memory still grows
ALWAYS = {
    "data.tokenizer": "byte", "data.trust_tokens": True, "budget.seconds": None, "budget.artifact_bytes": None,
    "evaluation.every": 0, "evaluation.at_start": False, "evaluation.at_end": False, "artifact.write": False,
    "training.save_seconds": 3600, "training.priming_steps": 2,
}  # fmt: skip


def told_at(shape: Shape, changes: dict[str, Any]) -> list[float]:
    """Train a shape and return the time in seconds at which each step was reported."""
    from ingot.config.loading import load_config
    from ingot.preflight.validate import check_before_training
    from ingot.runs.reporter import Reporter
    from ingot.train.start import run

    class Noting(Reporter):
        def __init__(self) -> None:
            self.times: list[float] = []

        def step(self, report: Any, log: bool) -> None:
            self.times.append(time.perf_counter())

    reporter = Noting()
    resolved = load_config(recipe=shape.recipe, overrides={**shape.changes, **ALWAYS, **changes}, environment={})
    run(resolved, reporter, dataset=check_before_training(resolved.config, 1, lambda text: None))
    return reporter.times


def write_shards(folder: Path, tokens: int, count: int) -> None:
    """Write some training shards of random bytes and one for validation, and evict them from the page cache."""
    from ingot.data.store.shards import TokenWriter

    folder.mkdir()
    draw = np.random.default_rng(0)
    for split, files in (("val", 1), ("train", count)):
        for number in range(files):
            path = folder / f"fineweb_{split}_{number:06}.bin"
            with ExitStack() as opened:
                writer = TokenWriter(path, opened, header=True)
                writer.append(draw.integers(0, 256, tokens, np.uint16))
                writer.close()
            with path.open("rb") as file:
                os.fsync(file.fileno())
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def checkpoints(shape: Shape, folder: Path) -> dict[str, Any]:
    """Measure the seconds that a checkpoint costs and their share of the time between two checkpoints."""
    save_every, around = (SAVE_EVERY, AROUND) if shape is not TOY else (SAVE_EVERY // 10, (1, 6))
    write_shards(folder / "data", 4 * tokens_of(shape), 2)
    steps = CHECKPOINTS * save_every + around[1]
    times = told_at(
        shape,
        {
            "data.path": str(folder / "data"), "training.max_steps": steps, "training.save_every": save_every,
            "training.output_dir": str(folder / "run"),
        },
    )  # fmt: skip
    saved = [save_every * (number + 1) for number in range(CHECKPOINTS)]
    usual, extra = compared(times, saved, around)
    return {"usual": usual, "every": save_every, "extra": extra, "part": sum(extra) / len(extra) / (usual * save_every)}


def shards(shape: Shape, folder: Path) -> dict[str, Any]:
    """Measure the seconds that the change to another shard costs."""
    each, count = (SHARD_STEPS, SHARDS) if shape is not TOY else (16, 4)
    write_shards(folder / "data", each * tokens_of(shape), count)
    times = told_at(
        shape,
        {
            "data.path": str(folder / "data"), "data.sampling": "stream", "training.max_steps": count * each - each // 2,
            "training.output_dir": str(folder / "run"),
        },
    )  # fmt: skip
    usual, extra = compared(times, [each * number for number in range(1, count)], AROUND_SHARD)
    return {"usual": usual, "extra": extra, "median": median(extra), "worst": max(extra)}


def compared(times: Sequence[float], interruptions: Sequence[int], around: tuple[int, int]) -> tuple[float, list[float]]:
    """Return the mean seconds per undisturbed step and, per interruption, the extra seconds of the steps around it.

    An interruption is given as the number of steps before it.
    """
    each = np.diff(times)  # each[i]: seconds between the reports of steps i and i + 1, counted from 0
    near = [slice(step - 1 - around[0], step - 1 + around[1]) for step in interruptions]
    others = np.ones(len(each), bool)
    for part in (slice(SKIPPED), *near):
        others[part] = False
    usual = float(each[others].mean())
    return usual, [float(each[part].sum() - usual * len(each[part])) for part in near]


def tokens_of(shape: Shape) -> int:
    """Return the tokens per step of a shape."""
    from ingot.config.loading import load_config

    return int(load_config(recipe=shape.recipe, overrides=shape.changes, environment={}).config.training.tokens_per_step)


def told(row: str, found: dict[str, Any]) -> str:
    usual = 1000 * found["usual"]
    if row == "checkpoints":
        each = ", ".join(f"{1000 * extra:.0f}" for extra in found["extra"])
        return f"a checkpoint costs {each} ms, every {found['every']} steps of {usual:.1f} ms: {100 * found['part']:.2f}%"
    return (
        f"another shard costs {1000 * found['median']:.2f} ms among steps of {usual:.1f} ms, the median of "
        f"{len(found['extra'])}, and at most {1000 * found['worst']:.2f}"
    )


def measured(rows: list[str], toy: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    shapes = {"checkpoints": SHAPES["124m-64x1024"], "shards": SHAPES["golf-131k"]}
    for row in rows:
        with tempfile.TemporaryDirectory() as folder:
            yield row, (checkpoints if row == "checkpoints" else shards)(TOY if toy else shapes[row], Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--results", type=Path, help="append a line of JSON per row to this file")
    parser.add_argument("--toy", action="store_true", help="a tiny model on the CPU")
    arguments = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() and not arguments.toy else "cpu"
    print(f"{date.today()}, {device}, torch {torch.__version__}", flush=True)
    for row, found in measured(arguments.rows, arguments.toy):
        print(f"{row}: {told(row, found)}", flush=True)
        if arguments.results:
            with arguments.results.open("a") as file:
                file.write(json.dumps({"row": row, "device": device, **found}) + "\n")


if __name__ == "__main__":
    main()
