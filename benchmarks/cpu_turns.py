"""Measure how much faster a new version of Ingot is on a CPU: steps of the old and the new version alternate.

Two processes train the same recipe, each with its own `src`, through the whole training loop: data, step, report. One waits while
the other runs a block of steps. Each ratio is old / new of two consecutive blocks, so other load on the machine affects both; the
result is the median ratio. On a busy machine use one thread and read the CPU seconds; on an idle machine read the wall time.
`losses apart` is the largest difference between the losses of the same steps: 0 if they are bitwise equal, large if one version
reads the text in another order.

    git archive 5755a6d src | tar -x -C OLD
    python benchmarks/cpu_turns.py --old-src OLD/src [--threads 1] [--shape demo] [--rounds 20] [--steps 40]
    python benchmarks/cpu_turns.py --shape demo --set training.compile=true       # this version with and without a setting
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

SRC = Path(__file__).parents[1] / "src"
WARM_UP = 10  # steps of each version before the first timed block
GOLF: dict[str, Any] = {
    "model.family": "golf", "model.layers": 4, "model.width": 128, "model.heads": 4, "model.kv_heads": 2, "data.seq_len": 128,
    "training.tokens_per_step": 2048, "optimizer.name": "muon",
}  # fmt: skip
README: dict[str, Any] = {
    "model.layers": 4, "model.width": 128, "model.heads": 4, "model.bias": False, "model.gelu": "erf", "data.seq_len": 64,
    "data.sampling": "random", "training.tokens_per_step": 768, "optimizer.name": "adamw", "optimizer.learning_rate": 1e-3,
    "optimizer.beta2": 0.99,
}  # fmt: skip
# The model and learning rates of `demo` until 2026-11-19, named here because an old version has its own recipe.
GPT2: dict[str, Any] = {
    "model.family": "gpt2", "model.heads": 4, "model.bias": False, "optimizer.learning_rate": 0.015,
    "optimizer.muon_learning_rate": 0.02,
}  # fmt: skip
SHAPES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "demo": ("demo", GPT2),  # with byte tokens
    "demo-2048": ("demo", {**GPT2, "model.vocab_size": 2048}),
    "golf-toy": (None, GOLF),
    "nanogpt": (None, README),  # the CPU run of nanoGPT's README
}
TOY: dict[str, Any] = {"model.layers": 1, "model.heads": 2, "model.width": 16, "training.tokens_per_step": 128}
LOOP: dict[str, Any] = {
    "data.path": "sample:shakespeare", "training.device": "cpu", "training.max_steps": 10**6, "budget.seconds": None,
    "training.save_seconds": 0, "training.save_every": 10**6, "evaluation.every": 0, "evaluation.sample_tokens": 0,
    "optimizer.schedule": "constant",
}  # fmt: skip


def train(shape: str, settings: dict[str, Any]) -> None:
    """Train in blocks of steps: before each block read its number of steps from stdin, and exit at the end of stdin."""
    from ingot.config.loading import load_config
    from ingot.train.start import run

    try:
        from ingot.runs.reporter import Reporter, StepReport
    except ImportError:  # the module's name in older versions, up to a513adc0
        from ingot.runs.report import Reporter, StepReport  # type: ignore[no-redef]

    class Turns(Reporter):
        """Prints the times and losses of a block when its steps are done."""

        left, losses, began = 0, list[float](), (0.0, 0.0)

        def step(self, report: StepReport, log: bool) -> None:
            self.losses.append(report.loss)
            self.left -= 1
            if self.left > 0:
                return
            cpu, clock = (end - begin for begin, end in zip(self.began, (time.process_time(), time.perf_counter()), strict=True))
            print(json.dumps({"cpu": cpu, "clock": clock, "losses": self.losses}), flush=True)
            line = sys.stdin.readline()
            if not line:
                os._exit(0)
            self.left, self.losses, self.began = int(line), [], (time.process_time(), time.perf_counter())

    recipe, changes = SHAPES[shape]
    with tempfile.TemporaryDirectory() as folder:
        overrides = {**LOOP, **changes, "training.output_dir": f"{folder}/run", **settings}
        run(load_config(recipe=recipe, overrides=overrides, environment={}), Turns())


class Lane:
    """A process that trains with the code in a given source folder."""

    def __init__(self, src: Path, shape: str, settings: dict[str, Any], threads: int, stack: ExitStack):
        environment = {**os.environ, "PYTHONPATH": str(src.resolve()), "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, __file__, "--train", shape, json.dumps(settings)]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        stack.callback(self._process.kill)
        self._read()  # the report of the first step
        self.run(WARM_UP)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None and self._process.stderr is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(self._process.stderr.read())
        found: dict[str, Any] = json.loads(line)
        return found

    def run(self, steps: int) -> dict[str, Any]:
        """Run some steps; return their CPU seconds, wall seconds and losses."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return self._read()


def measure(shape: str, given: argparse.Namespace) -> None:
    """Measure a shape and print its table."""
    from step_profile import settings_of  # imported here because the training processes may run a version without it

    settings = TOY if given.toy else {}
    changed = {**settings, **settings_of(given.set)}
    with ExitStack() as stack:
        old = Lane(given.old_src, shape, settings, given.threads, stack)
        new = Lane(SRC, shape, changed, given.threads, stack)
        turns = [(old.run(given.steps), new.run(given.steps)) for _ in range(given.rounds)]
    print(f"\n{shape}: {given.rounds} rounds of {given.steps} steps, {given.threads} thread{'s' if given.threads > 1 else ''}\n")
    show(turns, given.steps)


def show(turns: list[tuple[dict[str, Any], dict[str, Any]]], steps: int) -> None:
    """Print the table that compares the blocks of the old and new version."""
    print("| seconds of | old, ms per step | least | new | least | old / new, median | quarters |\n|---|---|---|---|---|---|---|")
    for name, key in (("the processor", "cpu"), ("the clock", "clock")):
        lanes = [[1000 * block[key] / steps for block in lane] for lane in zip(*turns, strict=True)]
        shown = " | ".join(f"{statistics.median(lane):.2f} | {min(lane):.2f}" for lane in lanes)
        ratios = [a / b for a, b in zip(*lanes, strict=True)]
        low, middle, high = statistics.quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
        print(f"| {name} | {shown} | {middle:.3f} | {low:.3f} to {high:.3f} |")
    apart = max(abs(a - b) for old, new in turns for a, b in zip(old["losses"], new["losses"], strict=True))
    last = [block["losses"][-1] for block in turns[-1]]
    print(f"\nlosses apart: {apart:.1e} at most, {last[0]:.4f} and {last[1]:.4f} at the end", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old-src", type=Path, default=SRC, help="source folder of the old version (default: this version)")
    parser.add_argument("--shape", action="append", choices=SHAPES, help="may be repeated (default: all shapes)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="setting of the new version; repeatable")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20, help="blocks per version")
    parser.add_argument("--steps", type=int, default=40, help="steps per block")
    parser.add_argument("--toy", action="store_true", help="a tiny model: checks that the script works, measures nothing")
    parser.add_argument("--train", nargs=2, metavar=("SHAPE", "SETTINGS"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.train:
        train(given.train[0], json.loads(given.train[1]))
        return
    processor = next((line for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "").partition(": ")[2]
    print(f"{date.today()}, {processor or 'cpu'}, load {os.getloadavg()[0]:.1f}")
    for shape in given.shape or SHAPES:
        measure(shape, given)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


if __name__ == "__main__":
    main()
