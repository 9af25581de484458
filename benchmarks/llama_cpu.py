"""Measure the overhead of `ingot train` over a bare loop of the same llama model on a CPU, run alternately.

The bare loop draws rows from the text, steps the same model with the same optimizer and prints a line: no metrics, no heartbeat,
no read-ahead. `ingot train` logs every step into its run folder but, like the bare loop, neither evaluates nor saves. Its first
steps, which allocate the optimizer's memory, are left out. On a busy machine read the CPU seconds: they include all threads of
the process, also those for read-ahead and heartbeat.

    python benchmarks/llama_cpu.py [--blocks 7] [--iterations 60] [--layers 4] [--width 256] [--length 256] [--rows 8]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from nanogpt_cpu import decayed, quiet, random_rows, tell, timed_loop

from ingot.config.loading import load_config
from ingot.config.schema import Config
from ingot.data.loading.data_path import open_dataset
from ingot.model.llama import Llama
from ingot.runs.reporter import Reporter, StepReport
from ingot.train.start import run

SKIPPED = 5  # first steps of `ingot train` that are not timed
RATE, BETAS, DECAY, CLIP = 1e-3, (0.9, 0.95), 0.1, 1.0


class Times(Reporter):
    """Prints a line for every step and records wall and CPU time at its end."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def step(self, report: StepReport, log: bool) -> None:
        print(f"iter {report.step}: loss {report.loss:.4f}")
        self.ends.append((time.perf_counter(), time.process_time()))


def settings(given: argparse.Namespace, steps: int, out: Path) -> dict[str, Any]:
    """Return the settings of the `ingot train` run."""
    return {
        "model.family": "llama", "model.layers": given.layers, "model.heads": 4, "model.width": given.width,
        "data.path": "sample:shakespeare", "data.tokenizer": "byte", "data.seq_len": given.length,
        "optimizer.learning_rate": RATE, "optimizer.beta1": BETAS[0], "optimizer.beta2": BETAS[1],
        "optimizer.weight_decay": DECAY, "optimizer.clip_norm": CLIP, "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 0,
        "training.max_steps": steps, "training.tokens_per_step": given.rows * given.length, "training.micro_batch": given.rows,
        "training.device": "cpu", "training.threads": 1, "training.save_every": 0, "training.output_dir": str(out),
        "evaluation.every": 0, "evaluation.at_start": False, "evaluation.at_end": False, "artifact.write": False,
        "tracking.log_every": 1,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in {"blocks": 7, "iterations": 60, "layers": 4, "width": 256, "length": 256, "rows": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as work, quiet():
        config = load_config(python=settings(given, 1, Path(work) / "none"), environment={}).config
        bare = bare_loop(config)

        def ours(iterations: int, name: str) -> tuple[float, float]:
            asked = settings(given, SKIPPED + iterations, Path(work) / name)
            times = Times()
            run(load_config(python=asked, environment={}), times)
            (began, before), (ended, after) = times.ends[SKIPPED - 1], times.ends[-1]
            return ended - began, after - before

        bare(SKIPPED), ours(SKIPPED, "warm-up")
        turns = []
        for block in range(given.blocks):
            before = time.process_time()
            seconds = bare(given.iterations)
            turns.append(((seconds, time.process_time() - before), ours(given.iterations, f"block-{block}")))
    for which, what in enumerate(("clock", "processor")):
        print(f"\nseconds of the {what}")
        tell([(a[which], b[which]) for a, b in turns], given.iterations, "ingot train")


def bare_loop(config: Config) -> Any:
    """Return a function that trains for some iterations and returns the seconds they took."""
    dataset = open_dataset(config.data.path, config.data.tokenizer)
    split = dataset.split("train")
    tokens = split.read(0, split.tokens)
    torch.manual_seed(0)
    m = config.model
    model = Llama(dataset.tokenizer.vocab_size, config.data.seq_len, layers=m.layers, heads=m.heads, width=m.width)
    optimizer = torch.optim.AdamW(decayed(model, DECAY), lr=RATE, betas=BETAS, fused=True)
    rows = config.training.tokens_per_step // config.data.seq_len
    return timed_loop(model, optimizer, lambda: random_rows(tokens, config.data.seq_len, rows), lambda it: RATE, CLIP)


if __name__ == "__main__":
    main()
