"""Measure the cost of splitting a step into micro-batches (halves, quarters and so on), in the trial and in real steps.

Trials (`training.micro_batch: auto`) are not compiled, but steps are. `trial` and `step` are the time of each size relative to
the unsplit step. The trial is right if it chooses the smallest size whose step is within 1% of the unsplit one. The unsplit step
is measured again at the end; the distance of its ratio from 1 is the noise.

    INGOT_CACHE=$(mktemp -d) python benchmarks/micro_batch.py [--shape golf-393k ...] [--cuts 3] [--steps 12]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import replace
from datetime import date
from typing import Any

import torch
from step_profile import SHAPES, TOY, WARM_UP, Shape, Stepper, open_engine

from ingot.backends.torch import tune


def trials(shape: Shape) -> tuple[dict[int, float], dict[str, Any], float]:
    """Return the milliseconds per row of each size tried, the settings chosen, and the seconds that the trial took."""
    seconds: dict[int, list[float]] = {}
    plain = tune.smallest_micro_batch

    def watched(largest: int, attempt: Any, maximum: Any) -> int:
        def timed(size: int, times: int) -> None:
            began = time.perf_counter()
            attempt(size, times)
            seconds.setdefault(size, []).append((time.perf_counter() - began) / (size * times))

        return plain(largest, timed, maximum)

    tune.smallest_micro_batch = watched
    try:
        config = shape.config()
        engine = open_engine(config, config.model.vocab_size or 0)
        began = time.perf_counter()
        Stepper(config, engine, config.model.vocab_size or 0)
        took = time.perf_counter() - began
        engine.close()
        if not seconds and torch.cuda.is_available():
            raise SystemExit("this shape has a cached choice from an earlier run; set INGOT_CACHE to an empty folder")
        return {size: 1000 * min(each) for size, each in seconds.items()}, engine.tuned(), took
    finally:
        tune.smallest_micro_batch = plain


def stepped(shape: Shape, size: int, kept: dict[str, Any], steps: int) -> tuple[float, float]:
    """Return the milliseconds and peak GiB of a step split into micro-batches of this size."""
    config = replace(shape, changes={**shape.changes, "training.micro_batch": size}).config()
    engine = open_engine(config, config.model.vocab_size or 0)
    try:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        stepper = Stepper(config, engine, config.model.vocab_size or 0, kept)
        stepper.run(WARM_UP)
        return statistics.median(stepper.run(steps)), engine.peak_memory()[0] / 2**30
    finally:
        engine.close()


def clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="may be repeated (default: golf-393k)")
    parser.add_argument("--cuts", type=int, default=3, help="how many times to halve the step")
    parser.add_argument("--steps", type=int, default=12, help="timed steps per size")
    parser.add_argument("--toy", action="store_true", help="a tiny shape on the CPU, where no trial is made")
    arguments = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(f"{date.today()}, {device}, torch {torch.__version__}", flush=True)
    for name, shape in ({"toy": TOY} if arguments.toy else {n: SHAPES[n] for n in arguments.shape or ["golf-393k"]}).items():
        tried, kept, took = trials(shape)
        clean()
        rows = shape.config().rows_per_step
        sizes = [rows >> cut for cut in range(arguments.cuts + 1) if rows % (1 << cut) == 0]
        print(f"\n{name}: auto takes {kept['micro_batch']} rows, {kept['attention']} attention; choosing took {took:.1f} s\n")
        print("| rows at once | trial, ms per row | trial | step, ms | step | GiB |\n|---|---|---|---|---|---|", flush=True)
        whole = None
        for size in [*sizes, rows]:
            ms, gib = stepped(shape, size, kept, arguments.steps)
            whole = whole or ms
            trial = f"{tried[size]:.3f} | {tried[size] / tried[max(tried)]:.4f}" if size in tried else "- | -"
            print(f"| {size} | {trial} | {ms:.2f} | {ms / whole:.4f} | {gib:.1f} |", flush=True)
            clean()


if __name__ == "__main__":
    main()
