"""What interrupts training: seconds that a checkpoint costs, and milliseconds that the change to another shard of the data does.

Steps are timed by when they are told of, in one run each through the engine, and those around an interruption are compared with
the mean of the others. `checkpoints` trains the 124M shape of 64 x 1024 tokens and saves it every 100 steps: 10 steps before a
checkpoint and 60 after it, in which it is written. `shards` trains golf's shape at 131,072 tokens a step on shards of 17 MB, in
their order, which are no longer in the system's memory where that can be asked for: 6 steps before the first of a shard, for
which tokens are read ahead, and 3 after it.

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
SAVE_EVERY, AROUND = 100, (10, 60)  # steps; those before and after a checkpoint that are counted with it
CHECKPOINTS = 4
SHARD_STEPS, SHARDS, AROUND_SHARD = 64, 6, (6, 3)
SKIPPED = 4  # steps at the beginning, in which the memory of the GPU still grows
ALWAYS = {
    "data.tokenizer": "byte", "data.trust_tokens": True, "budget.seconds": None, "budget.artifact_bytes": None,
    "evaluation.every": 0, "evaluation.at_start": False, "evaluation.at_end": False, "artifact.write": False,
    "training.save_seconds": 3600, "training.priming_steps": 2,
}  # fmt: skip


def told_at(shape: Shape, changes: dict[str, Any]) -> list[float]:
    """When each step of a run was told of, in seconds."""
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
    """So many shards of random bytes, and one to validate by, out of the system's memory."""
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
    """Seconds of a checkpoint, and their part of the time between two."""
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
    """Seconds that the change to another shard costs."""
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
    """The mean seconds of a step, and what so many steps before and after each interruption took longer than that.

    An interruption is named by how many steps come before it.
    """
    each = np.diff(times)  # each[i]: from when step i, counted from 0, was told of until step i + 1 was
    near = [slice(step - 1 - around[0], step - 1 + around[1]) for step in interruptions]
    others = np.ones(len(each), bool)
    for part in (slice(SKIPPED), *near):
        others[part] = False
    usual = float(each[others].mean())
    return usual, [float(each[part].sum() - usual * len(each[part])) for part in near]


def tokens_of(shape: Shape) -> int:
    """Tokens of a step."""
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
    parser.add_argument("--results", type=Path, help="file that a line of JSON per row is appended to")
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
