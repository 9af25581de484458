"""Measure how much sooner the demo recipe reaches the final loss of nanoGPT's first CPU example.

Two training runs on the characters of tiny Shakespeare alternate in slices, so that other load on the machine affects both:

1. nanoGPT's README setting for a CPU (4 layers, 4 heads, width 128, rows of 64, 12 rows per step, 2,000 steps) with its AdamW,
2. the demo recipe's shape and optimizer.

Only training is timed. Both are evaluated on the whole validation split, in rows of 64 that do not overlap.

    python benchmarks/first_model.py [--text input.txt]
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ingot.backends.open import find_device, open_backend
from ingot.config.loading import load_config
from ingot.config.schema import Config
from ingot.data.loading.data_path import open_dataset
from ingot.data.loading.rows import make_rows
from ingot.data.prepare.pipeline import prepare
from ingot.data.store.dataset import Dataset
from ingot.eval.evaluator import Evaluator
from ingot.runtime.ranks import Ranks
from ingot.train.reader import RowReader
from ingot.train.step_plan import Position, following, plan_step, shapes

TINY_SHAKESPEARE = Path(__file__).parents[2] / "shared/data/tinyshakespeare/input.txt"  # the path that the tests use too
SLICES = 20

NANOGPT = {
    "model": {"layers": 4, "heads": 4, "width": 128, "bias": False, "gelu": "erf"},
    "data": {"seq_len": 64, "sampling": "random"},
    "optimizer": {"name": "adamw", "learning_rate": 1e-3, "beta2": 0.99, "warmup_steps": 100, "schedule": "cosine", "floor": 0.1},
    "training": {"tokens_per_step": 12 * 64, "max_steps": 2000},
}
DEMO = {"budget": {"seconds": None}, "training": {"max_steps": 500}}


class Lane:
    """A training run that is continued slice by slice."""

    def __init__(self, name: str, config: Config, dataset: Dataset):
        self.name, self.config, self.dataset = name, config, dataset
        self.backend = open_backend(config, dataset.tokenizer.vocab_size, Ranks())
        rows = make_rows(config.data, config.rows_per_step, dataset)
        (first,) = shapes(config)
        self.plan = plan_step(config, Position())
        self.reader = RowReader(rows, Ranks(), self.plan, partial(following, config), [first], self.backend.host_buffer)
        self.max_steps = config.training.max_steps or 0
        self.seconds = 0.0
        self.curve: list[tuple[float, float]] = []  # (training seconds, validation loss)
        self.backend.tune([(first, self.reader.next(self.plan).batch)], {})

    def run(self, until: int) -> None:
        """Train up to a step, timed, then evaluate, untimed."""
        began = time.perf_counter()
        while self.plan.step < until:
            portion = self.reader.next(self.plan)
            self.backend.step(portion.batch, portion.targets, self.plan).result()
            self.plan = following(self.config, self.plan, portion)
        self.seconds += time.perf_counter() - began
        self.curve.append((self.seconds, self._validation_loss()))

    def _validation_loss(self) -> float:
        length = self.config.data.seq_len
        evaluator = Evaluator(self.dataset.split("val"), self.dataset.tokenizer, length, length, 64)
        return evaluator.score(evaluator.rows(), self.backend.score).loss

    @property
    def loss(self) -> float:
        return self.curve[-1][1]

    def seconds_to(self, loss: float) -> float | None:
        """Return the training seconds at the first evaluation that reaches this loss."""
        return next((seconds for seconds, found in self.curve if found <= loss), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="tiny Shakespeare's input.txt (default: the bundled Shakespeare)")
    text = parser.parse_args().text or (TINY_SHAKESPEARE if TINY_SHAKESPEARE.is_file() else None)
    if text is None:
        print("without tiny Shakespeare (--text input.txt): on the characters of the bundled works")
        report(open_dataset("sample:shakespeare", "char"))
        return
    with tempfile.TemporaryDirectory() as folder:
        prepare([text], Path(folder) / "tiny", "char", val_fraction=0.1)
        report(Dataset.open(Path(folder) / "tiny"))


def report(dataset: Dataset) -> None:
    """Run both training runs and print the table."""
    demo: dict[str, Any] = {**DEMO, "data": {"path": str(dataset.folder), "tokenizer": "char"}}
    lanes = [
        Lane("nanoGPT's README setting, AdamW", load_config(python=NANOGPT, environment={}).config, dataset),
        Lane("demo recipe", load_config(recipe="demo", python=demo, environment={}).config, dataset),
    ]
    for part in range(1, SLICES + 1):
        for lane in lanes:
            lane.run(lane.max_steps * part // SLICES)
    for lane in lanes:
        lane.reader.close()
    reference, ours = lanes
    reached = ours.seconds_to(reference.loss)
    print(f"{date.today()}, {platform.machine()}, {find_device('cpu').name}, torch {torch.__version__}")
    print("| training | parameters | steps | tokens | seconds | val loss |")
    print("|---|---|---|---|---|---|")
    for lane in lanes:
        steps = lane.plan.step
        tokens = steps * lane.config.training.tokens_per_step
        print(f"| {lane.name} | {lane.backend.parameters:,} | {steps:,} | {tokens:,} | {lane.seconds:.1f} | {lane.loss:.4f} |")
    if reached is None:
        print(f"The demo recipe did not reach {reference.loss:.4f}.")
    else:
        share = reference.seconds / reached
        print(f"The demo recipe reached {reference.loss:.4f} after {reached:.1f} s, 1/{share:.1f} of the time.")


if __name__ == "__main__":
    main()
