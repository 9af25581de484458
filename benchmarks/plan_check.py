"""Compare `ingot plan` with one H200, and measure there what FSDP2 costs on one rank and how large a model can be.

    python benchmarks/plan_check.py --results plan-h200.jsonl

measures everything within eight minutes and prints four tables: peak memory of 124M, 350M and 774M parameters with and without
gradient checkpointing; tokens/s of the shapes in RESULTS.md; the 124M with FSDP2 on one rank; and the largest model that trains
in micro-batches of one row with gradient checkpointing and CPU offload. Each measurement is appended to the file at once: the
same command continues after an interruption and, without a GPU, prints the tables of the file.

    python benchmarks/plan_check.py

compares with RESULTS.md, whose peaks are those of trials before the run, so that a compiled step stays below them. Measured
here is the peak of the steps alone, with a fixed micro-batch: trials run without the compiler and take more memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from step_profile import SHAPES as PROFILED
from step_profile import TOY, Setting, Shape, Stepper, open_engine

from ingot.preflight.plan import GIB, make_plan
from ingot.runtime.machine import host_bytes

Row = dict[str, Any]


def _gpt2(layers: int, width: int, heads: int, rows: int, length: int = 1024) -> Shape:
    changes: dict[str, Setting] = {
        "model.layers": layers, "model.width": width, "model.heads": heads, "model.bias": False, "model.context": length,
        "data.seq_len": length, "training.micro_batch": rows, "training.tokens_per_step": length * rows,
        "training.gradient_checkpointing": False,
    }  # fmt: skip
    return Shape("gpt2", changes)


def _largest(share: float) -> Shape:
    """Return a model of which weights, gradients and AdamW's moments, 16 bytes per weight, take a share of the host's memory."""
    return _gpt2(int(share * (host_bytes() or 0) / (16 * 12 * 4096**2)), 4096, 32, 1, 4096)


CHANGES: dict[str, dict[str, Setting]] = {
    "": {},
    "checkpointed": {"training.gradient_checkpointing": True},
    "fsdp": {"training.parallel": "fsdp"},
    "offloaded": {
        "training.parallel": "fsdp", "training.cpu_offload": True, "training.gradient_checkpointing": True,
        "optimizer.name": "adamw", "training.kernels": "off",
    },
}  # fmt: skip
PLAIN = {
    **PROFILED, "124m": _gpt2(12, 768, 12, 64), "350m": _gpt2(24, 1024, 16, 32), "774m": _gpt2(36, 1280, 20, 16),
    "largest-70": _largest(0.7), "largest-85": _largest(0.85), "toy": TOY,
}  # fmt: skip
# Peak GiB (of trials) and tokens/s of speed_h200.py, 2026-11-17, one H200: see RESULTS.md and speed-h200.jsonl.
RECORDED = {
    "124m-64x1024": (27.796, 633_641), "124m-12x1024": (6.246, 578_476), "golf-393k": (45.496, 1_791_070),
    "golf-131k": (15.267, 1_770_946), "frontier": (21.780, 1_611_823),
}  # fmt: skip
# The rows of each table, in the order in which they are measured: a model, and after a space the changes to it.
TABLES = {
    "memory": [model + changes for model in ("124m", "350m", "774m") for changes in ("", " checkpointed")],
    "speed": ["124m", *[name for name in RECORDED if name != "124m-64x1024"]],
    "fsdp": ["124m", "124m fsdp"],
    "largest": ["largest-70 offloaded", "largest-85 offloaded"],
}
TOYS = {
    "memory": ["toy", "toy checkpointed"], "speed": ["toy"], "fsdp": ["toy", "toy fsdp"], "largest": ["toy offloaded"],
}  # fmt: skip
PLANNED = ("memory", "speed", "RESULTS.md")  # tables with the predictions of `ingot plan`


def shape_of(name: str) -> Shape:
    """Return the shape of a row."""
    model, _, changes = name.partition(" ")
    return Shape(PLAIN[model].recipe, {**PLAIN[model].changes, **CHANGES[changes]})


def predict(name: str) -> tuple[float, float]:
    """Return the GiB and tokens/s that `ingot plan` predicts for a row."""
    plan = make_plan(shape_of(name).config(), 1, "h200")
    return plan["memory_bytes"] / GIB, plan["tokens_per_second"]


def measure(name: str, steps: int, kept: Mapping[str, Any] | None) -> Row:
    """Train some steps of a row; return their peak GiB and tokens/s. Kernels in `kept` are not chosen anew."""
    config = shape_of(name).config()
    vocab_size = config.model.vocab_size or 50304
    engine = open_engine(config, vocab_size)
    try:
        stepper = Stepper(config, engine, vocab_size, kept)
        stepper.run(2)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        speed = 1000 * config.training.tokens_per_step / statistics.median(stepper.run(steps))
        gib, chosen = engine.peak_memory()[0] / GIB, engine.tuned()
        return {"gib": gib, "tokens_per_second": speed, "parameters": engine.parameters, "choices": chosen}
    finally:
        engine.close()
        torch._dynamo.reset()


def record(name: str, steps: int, results: Path, rows: Mapping[str, Row]) -> Row:
    """Measure a row, or note why that failed, and append it to the file; it uses the kernels of its model without changes."""
    row: Row = {"shape": name, "at": str(date.today()), "torch": torch.__version__}
    try:
        row |= measure(name, steps, rows.get(name.partition(" ")[0], {}).get("choices"))
    except Exception as error:  # continue with the other rows
        row["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")
    return row


def record_apart(name: str, steps: int, results: Path, seconds: float) -> Row:
    """Measure a row in a process of its own, which the system may kill if it takes too much of the host's memory."""
    command = [sys.executable, __file__, "--shape", name, "--results", str(results), "--steps", str(steps)]
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(command, timeout=seconds)
    return read(results).get(name, {"error": "it was killed or ran out of time"})


def read(results: Path) -> dict[str, Row]:
    """Return the measured rows of a file by name."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {row["shape"]: row for row in map(json.loads, lines)}


def show(title: str, names: list[str], rows: Mapping[str, Row], plans: Mapping[str, tuple[float, float]]) -> None:
    """Print a table: measured beside predicted or, in a table without plans, beside its first row."""
    planned, first = set(names) <= plans.keys(), rows.get(names[0], {}).get("tokens_per_second")
    columns = ["GiB predicted", "measured", "ratio", "tokens/s predicted", "measured", "ratio"]
    print(f"\n| {' | '.join([title, *(columns if planned else ['GiB', 'tokens/s', 'of the first'])])} |")
    print("|---" * (7 if planned else 4) + "|")
    for name in names:
        row = rows.get(name, {})
        if "gib" not in row:
            print(f"| {name} | {row.get('error', 'not measured')} |")
            continue
        gib, speed = row["gib"], row["tokens_per_second"]
        size = f", {row['parameters'] / 1e6:,.0f}M parameters" if "parameters" in row else ""
        cells = f"{gib:.2f} | {speed:,.0f} | {speed / first:.3f}" if first else f"{gib:.2f} | {speed:,.0f} |"
        if planned:
            peak, predicted = plans[name]
            cells = f"{peak:.2f} | {gib:.2f} | {peak / gib:.3f} | {predicted:,.0f} | {speed:,.0f} | {predicted / speed:.3f}"
        print(f"| {name}{size} | {cells} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="a file of measurements, to which those that it lacks are appended")
    parser.add_argument("--shape", help="measure only this row")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--seconds", type=float, default=450.0, help="begin no measurement after this time")
    parser.add_argument("--toy", action="store_true", help="tiny shapes, on the CPU")
    arguments = parser.parse_args()
    began, path, steps = time.monotonic(), arguments.results, arguments.steps
    if path is not None and arguments.shape is not None:
        with suppress(OSError):  # if memory runs out, this process is the one to be killed
            Path("/proc/self/oom_score_adj").write_text("1000")
        record(arguments.shape, steps, path, read(path))
        return
    tables = {"RESULTS.md": list(RECORDED)} if path is None else TOYS if arguments.toy else TABLES
    rows = {name: {"gib": gib, "tokens_per_second": speed} for name, (gib, speed) in RECORDED.items()}
    rows = rows if path is None else read(path)
    names = dict.fromkeys(name for table in tables.values() for name in table)
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:  # a plan takes as long as a measurement
        plans = {name: pool.submit(predict, name) for name in names if any(name in tables.get(title, ()) for title in PLANNED)}
        for name in names if path is not None and (torch.cuda.is_available() or arguments.toy) else ():
            left = arguments.seconds - (time.monotonic() - began)
            if "gib" not in rows.get(name, {}) and left > 0:
                apart = name.endswith("offloaded")
                rows[name] = record_apart(name, steps, path, left) if apart else record(name, steps, path, rows)
        for title, table in tables.items():
            show(title, table, rows, {name: plans[name].result() for name in table if title in PLANNED})


if __name__ == "__main__":
    main()
