"""Compare `ingot plan` with measurements: peak memory and tokens/s on one H200.

For the 124M, 350M and 774M shapes, with and without gradient checkpointing, this trains some steps and prints predicted and
measured values. The micro-batch is fixed, and the peak is that of the steps after tuning: trials run without the compiler and
take more memory than the steps do. Without a GPU, or with --recorded, it compares with the peaks and tokens/s in RESULTS.md
instead; those peaks are of trials, so that a compiled step stays below them.

    python benchmarks/plan_check.py [--recorded] [--shape 350m ...] [--steps 10]
"""

from __future__ import annotations

import argparse
import statistics

import torch
from step_profile import SHAPES as PROFILED
from step_profile import Setting, Shape, Stepper, open_engine

from ingot.config.schema import Config
from ingot.preflight.plan import GIB, make_plan


def _gpt2(layers: int, width: int, heads: int, rows: int, checkpointed: bool) -> Shape:
    changes: dict[str, Setting] = {
        "model.layers": layers, "model.width": width, "model.heads": heads, "model.bias": False, "training.micro_batch": rows,
        "training.tokens_per_step": 1024 * rows, "training.gradient_checkpointing": checkpointed,
    }  # fmt: skip
    return Shape("gpt2", changes)


SIZES = {"124m": (12, 768, 12, 64), "350m": (24, 1024, 16, 32), "774m": (36, 1280, 20, 16)}
SHAPES = {
    f"{name}{'-checkpointed' if checkpointed else ''}": _gpt2(*size, checkpointed)
    for name, size in SIZES.items()
    for checkpointed in (False, True)
}
# Peak GiB (of trials) and tokens/s of speed_h200.py, 2026-11-17, one H200: see RESULTS.md and speed-h200.jsonl.
RECORDED = {
    "124m-64x1024": (27.796, 633_641), "124m-12x1024": (6.246, 578_476), "golf-393k": (45.496, 1_791_070),
    "golf-131k": (15.267, 1_770_946), "frontier": (21.780, 1_611_823),
}  # fmt: skip


def measure(config: Config, steps: int) -> tuple[float, float]:
    """Return the peak GiB and the tokens/s of training steps on this machine's GPU."""
    vocab_size = config.model.vocab_size or 50304
    engine = open_engine(config, vocab_size)
    try:
        stepper = Stepper(config, engine, vocab_size)
        stepper.run(2)
        torch.cuda.reset_peak_memory_stats()
        ms = statistics.median(stepper.run(steps))
        return torch.cuda.max_memory_allocated() / GIB, 1000 * config.training.tokens_per_step / ms
    finally:
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="may be repeated (default: all shapes)")
    parser.add_argument("--recorded", action="store_true", help="compare with RESULTS.md instead of training")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    arguments = parser.parse_args()
    recorded = arguments.recorded or not torch.cuda.is_available()
    shapes = {name: PROFILED[name] for name in RECORDED} if recorded else SHAPES
    print("| shape | GiB predicted | measured | ratio | tokens/s predicted | measured | ratio |\n|---|---|---|---|---|---|---|")
    for name in arguments.shape or shapes:
        config = shapes[name].config()
        plan = make_plan(config, 1, "h200")
        peak, predicted = plan["memory_bytes"] / GIB, plan["tokens_per_second"]
        gib, speed = RECORDED[name] if recorded else measure(config, arguments.steps)
        memory = f"{peak:.2f} | {gib:.2f} | {peak / gib:.3f}"
        rate = f"{predicted:,.0f} | {speed:,.0f} | {predicted / speed:.3f}"
        print(f"| {name} | {memory} | {rate} |", flush=True)
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
