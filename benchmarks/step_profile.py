"""Profile a training step: the milliseconds of each class of kernels, next to the lower bound (floor) of the class.

Steps run through the real engine on random tokens. `ms per step` is the median of timed steps without a profiler; to compare two
commits, run this file with each one's `src` on PYTHONPATH. The classes are sums over the kernels recorded by torch's profiler:

- attention, products (matmuls), loss: by the kernel's name; the head counts as a product.
- optimizer: all kernels during an optimizer step, its matmuls included, and multi-tensor kernels outside it (gradient norms).
- element-wise: every other kernel. idle: the step time minus all classes.

Floors: matmuls 6 FLOPs per weight and token; attention 7 FLOPs per layer, width, token and position (two matmuls forward and five
backward, halved by the causal mask); both at 782 TFLOP/s. Element-wise, loss and optimizer: memory traffic at 4.3 TB/s (both
rates measured on one H200). Element-wise traffic assumes one bf16 kernel for each chain of operations between two matmuls, and
twice the forward traffic backward. The loss reads the logits and writes their gradient once. The optimizer reads weight, gradient
and two moments and writes all but the gradient in float32; Muon adds its five iterations.

    python benchmarks/step_profile.py [--shape golf-393k ...] [--set NAME=VALUE ...] [--steps 20] [--kernels 8]
        [--results steps.jsonl]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import re
import statistics
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from ingot.config.loading import load_config
from ingot.config.schema import Config
from ingot.optim.groups import block_matrices
from ingot.runtime.ranks import Ranks
from ingot.train.step_plan import shapes

FLOPS, BANDWIDTH = 782e12, 4.3e12  # per second
PROFILED, WARM_UP = 3, 4  # steps
MUON_ITERATIONS = 5
CLASSES = ("attention", "products", "element-wise", "loss", "optimizer")
Setting = int | float | str | bool | None | list[str]

GOLF_8192: dict[str, Setting] = {
    "model.vocab_size": 8192, "model.layers": 10, "model.heads": 4, "model.mlp_multiple": 4, "data.seq_len": 2048,
    "training.tokens_per_step": 131072,
}  # fmt: skip
ONE_STAGE: dict[str, Setting] = {"training.stages": [], "model.vocab_size": 8192}  # golf/frontier with only its last stage
GPT2: dict[str, Setting] = {"model.bias": False}


@dataclass(frozen=True)
class Shape:
    """A model and batch size, given as a recipe with changed settings."""

    recipe: str
    changes: Mapping[str, Setting]

    def config(self) -> Config:
        return load_config(recipe=self.recipe, overrides=self.changes, environment={}).config


SHAPES = {
    "golf-393k": Shape("golf/seq4096", {}),
    "golf-131k": Shape("golf/seq4096", {"training.tokens_per_step": 131072}),
    "frontier": Shape("golf/baseline", GOLF_8192),
    "frontier-a": Shape("golf/frontier", {**ONE_STAGE, "data.seq_len": 1024}),  # the row length of the recipe's first stage
    "frontier-c": Shape("golf/frontier", ONE_STAGE),
    "124m-64x1024": Shape("gpt2", {**GPT2, "training.tokens_per_step": 65536}),
    "124m-12x1024": Shape("gpt2", {**GPT2, "training.tokens_per_step": 12288}),
    "llama-64x1024": Shape("gpt2", {"model.family": "llama", "training.tokens_per_step": 65536}),  # gpt-simple's 124M
    "packed-64x1024": Shape("gpt2", {"model.family": "llama", "training.tokens_per_step": 65536, "data.document_mask": True}),
}
DOCUMENT = 500  # mean tokens per document in shapes with a document mask
TOY = Shape(
    "golf/baseline",
    {
        "model.vocab_size": 64, "model.layers": 2, "model.heads": 2, "model.width": 32, "model.kv_heads": 1, "data.seq_len": 32,
        "training.tokens_per_step": 256, "training.device": "cpu",
    },
)  # fmt: skip


def open_engine(config: Config, vocab_size: int) -> Any:
    """Open the backend that training uses; this function and `.model` are the only uses of the engine's internals here."""
    from ingot.backends.open import open_backend

    return open_backend(config, vocab_size, Ranks())


def settings_of(given: Iterable[str]) -> dict[str, Any]:
    """Parse settings given as NAME=VALUE; a value that is not valid JSON is a string."""
    found: dict[str, Any] = {}
    for name, _, value in (one.partition("=") for one in given):
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


LOSS = r"log_softmax|_softmax|nll_loss|cross_entropy|logsumexp|_loss_of_row"  # the last name is our kernel
PATTERNS = (
    ("attention", r"flash|fmha|sdpa|attention|cudnn_generated"),
    ("loss", LOSS),
    ("optimizer", r"multi_tensor_apply|adam|_foreach_"),
    (
        "products",
        r"gemm|gemv|cutlass|nvjet|cublas|splitk|triton_tem_fused_.*mm|_(?:activated|sloped)_product|"
        r"aten::(?:mm|addmm|bmm|baddbmm|linear|matmul|_scaled_mm)$",
    ),
)
GENERATED = (
    r"^triton_(?!tem)"  # Inductor's kernels between matmuls; the name lists all fused operations, also neighbouring matmuls
)


def class_of(kernel: str) -> str:
    """Return the class of a kernel (on a CPU, of an operation) by its name."""
    name = kernel.lower()
    if re.search(GENERATED, name):
        return "loss" if re.search(LOSS, name) else "element-wise"
    return next((kind for kind, pattern in PATTERNS if re.search(pattern, name)), "element-wise")


Event = dict[str, Any]  # an event of a Chrome trace: cat, name, ts and dur in microseconds


def busy(events: Iterable[Event]) -> list[tuple[str, str, float]]:
    """Return class, name and milliseconds of every kernel in a trace, or of every operation if there is no GPU."""
    whole = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in whole if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    annotations = "gpu_user_annotation" if kernels else "user_annotation"
    stepping = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in whole
        if event.get("cat") == annotations and event["name"].startswith("Optimizer.step")
    )
    starts = np.array([begin for begin, _ in stepping])
    found = []
    for event in kernels or _own_time([event for event in whole if event.get("cat") == "cpu_op"]):
        last = int(np.searchsorted(starts, event["ts"], side="right")) - 1
        inside = last >= 0 and event["ts"] < stepping[last][1]
        found.append(("optimizer" if inside else class_of(event["name"]), event["name"], event["dur"] / 1000))
    return found


def _own_time(operations: list[Event]) -> list[Event]:
    """Return operations whose durations exclude the operations they call on the same thread."""
    by_thread: dict[Any, list[Event]] = defaultdict(list)
    for event in operations:
        by_thread[event.get("tid")].append({**event})
    for events in by_thread.values():
        events.sort(key=lambda event: (event["ts"], -event["dur"]))
        callers: list[tuple[float, Event]] = []  # open operations with their end times, innermost last
        for event in events:
            while callers and event["ts"] >= callers[-1][0]:
                callers.pop()
            if callers:
                callers[-1][1]["dur"] -= event["dur"]
            callers.append((event["ts"] + event["dur"], event))
    return [event for events in by_thread.values() for event in events]


def floors(config: Config, engine: Any, vocab_size: int) -> dict[str, float]:
    """Return the lower bound in milliseconds of each class; see the module docstring."""
    m, length, tokens = config.model, config.data.seq_len, config.training.tokens_per_step
    square = m.layers * m.width * length
    weights = engine.flops_per_token(length) - 12.0 * square  # minus the engine's FLOPs for attention without causal mask
    kv = (getattr(m, "kv_heads", None) or m.heads) * m.width // m.heads
    inner = getattr(m, "mlp_multiple", 4) * m.width
    # Reads and writes of two residual sums with norms (4 widths each), a mix (1), rotated queries and keys, and the activation.
    turned = 2 * (m.width + kv) if hasattr(m, "rope_base") else 0
    elements = m.layers * (9 * m.width + turned + 2 * inner)
    parameters = sum(p.numel() for p in engine.model.parameters())
    polar = 0.0
    if config.optimizer.name == "muon":
        for _, p in block_matrices(engine.model):
            short, long = sorted(p.shape)
            polar += MUON_ITERATIONS * (4.0 * short * short * long + 2.0 * short**3)
    seconds = {
        "attention": 7.0 * square * tokens / FLOPS,
        "products": weights * tokens / FLOPS,
        "element-wise": 3 * 2.0 * elements * tokens / BANDWIDTH,
        "loss": 4.0 * vocab_size * tokens / BANDWIDTH,
        "optimizer": 28.0 * parameters / BANDWIDTH + polar / FLOPS,
    }
    return {kind: 1000 * value for kind, value in seconds.items()}


class Stepper:
    """Steps an engine on one batch of random tokens; choices in `kept`, from another engine, replace its own trials."""

    def __init__(self, config: Config, engine: Any, vocab_size: int, kept: Mapping[str, Any] | None = None):
        self._engine, (self._plan,) = engine, shapes(config)
        self.losses: list[float] = []
        drawn, masked = np.random.default_rng(0), config.data.document_mask
        self._batch = engine.host_buffer((config.rows_per_step, 3 if masked else 2, config.data.seq_len))
        self._batch[:, :2] = drawn.integers(0, vocab_size, self._batch[:, :2].shape, np.int32)
        if masked:
            self._batch[:, 2] = (drawn.random(self._batch[:, 2].shape) < 1 / DOCUMENT).cumsum(1)
        engine.tune([(self._plan, self._batch)], kept or {})

    def run(self, steps: int) -> list[float]:
        """Return the milliseconds between the ends of consecutive steps; as in training, the host runs one step ahead."""
        ends: list[float] = []
        before = None
        for _ in range(steps + 1):
            pending = self._engine.step(self._batch, self._batch[:, 1].size, self._plan)
            self._plan = replace(self._plan, step=self._plan.step + 1)
            if before is not None:
                self.losses.append(before.result().loss)
                ends.append(time.perf_counter())
            before = pending
        assert before is not None
        self.losses.append(before.result().loss)
        ends.append(time.perf_counter())
        return [1000 * (end - begin) for begin, end in itertools.pairwise(ends)]


def measure(name: str, shape: Shape, steps: int) -> dict[str, Any]:
    """Measure and profile a shape; return everything that is printed about it."""
    config = shape.config()
    vocab_size = config.model.vocab_size or 0
    began = time.perf_counter()
    engine = open_engine(config, vocab_size)
    try:
        stepper = Stepper(config, engine, vocab_size)
        stepper.run(WARM_UP)
        ready = time.perf_counter() - began
        ms = statistics.median(stepper.run(steps))
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        with profile(activities=activities) as profiler:
            stepper.run(PROFILED - 1)  # run() takes one step more than it times
            engine.wait()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            kernels = busy(json.loads(path.read_text())["traceEvents"])
        by_class = dict.fromkeys(CLASSES, 0.0)
        by_name: dict[str, float] = defaultdict(float)
        for kind, kernel, taken in kernels:
            by_class[kind] += taken / PROFILED
            by_name[f"{kind}: {kernel}"] += taken / PROFILED
        return {
            "shape": name,
            "ms": ms,
            "tokens_per_second": round(1000 * config.training.tokens_per_step / ms),
            "classes": {**by_class, "idle": max(0.0, ms - sum(by_class.values()))},
            "floors": floors(config, engine, vocab_size),
            "kernels": dict(sorted(by_name.items(), key=lambda item: -item[1])),
            "choices": engine.tuned(),
            "peak_gib": engine.peak_memory()[0] / 2**30,
            "ready_seconds": ready,
        }
    finally:
        engine.close()


def show(found: dict[str, Any], kernels: int) -> None:
    """Print the table of a shape."""
    chosen = found["choices"]
    print(
        f"\n{found['shape']}: {found['ms']:.2f} ms per step, {found['tokens_per_second']:,} tokens/s, {found['peak_gib']:.1f} GiB"
    )
    print(f"{chosen['attention']} attention, {chosen['micro_batch']} rows at once, ready after {found['ready_seconds']:.1f} s\n")
    print("| class | ms | floor | over the floor |\n|---|---|---|---|")
    for kind, ms in found["classes"].items():
        floor = found["floors"].get(kind, 0.0)
        print(f"| {kind} | {ms:.2f} | {floor:.2f} | {ms - floor:.2f} |")
    print(f"| sum | {found['ms']:.2f} | {sum(found['floors'].values()):.2f} | |")
    for kernel, ms in list(found["kernels"].items())[:kernels]:
        print(f"    {ms:8.3f} ms  {kernel[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="may be repeated (default: all shapes)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting for all shapes; repeatable")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--kernels", type=int, default=8, help="number of slowest kernels to list")
    parser.add_argument("--results", type=Path, help="append a line of JSON per shape to this file")
    parser.add_argument("--toy", action="store_true", help="a tiny shape on the CPU")
    arguments = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(f"{date.today()}, {device}, torch {torch.__version__}, median of {arguments.steps} steps", flush=True)
    shapes = {"toy": TOY} if arguments.toy else {name: SHAPES[name] for name in arguments.shape or SHAPES}
    for name, shape in shapes.items():
        try:
            found = measure(name, replace(shape, changes={**shape.changes, **settings_of(arguments.set)}), arguments.steps)
            show(found, arguments.kernels)
        except Exception as error:  # continue with the other shapes
            traceback.print_exc()
            found = {"shape": name, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
            print(f"\n{name}: FAILED: {found['error']}")
        if arguments.results:
            with arguments.results.open("a") as file:
                file.write(json.dumps(found) + "\n")
        print(end="", flush=True)
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
