"""Seconds from the start of a program to its first training step, by phase: of a shape new to the machine and of one seen before.

Every row is a fresh process that goes the way of `ingot train`, with caches of its own (compiled code, what was found out about
kernels): `new` finds them empty, `seen` as `new` left them. The text is the packaged sample, prepared before; the model is one of
step_profile.py. Phases in brackets are parts of the one before them. A phase begins when the display would name it.

    python benchmarks/first_step.py [--shape 124m-64x1024 ...] [--set training.compile=blocks ...] [--results first.jsonl]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "INGOT_CACHE": "ingot"}
PARTS = (
    "find_torch_device",
    "build_model",
    "make_optimizers",
    "settle_kernels",
    "largest_micro_batch",
    "_fastest_attention",
    "without_trace",
)
COMPILER = {
    "entire_frame_compile": "tracing and compiling forward",
    "entire_backward_compile": "compiling backward",
    "bytecode_tracing": "Dynamo",
    "create_aot_dispatcher_function": "AOTAutograd",
    "inductor_compile": "Inductor",
    "async_compile.wait": "waiting for Triton",
}
RUN = {
    "data.path": "sample:shakespeare", "data.tokenizer": "byte", "data.sampling": "shuffle", "data.spans": 1,
    "training.max_steps": 3, "training.priming_steps": 2, "budget.seconds": None, "budget.artifact_bytes": None,
    "evaluation.every": 0, "evaluation.at_start": False, "evaluation.at_end": False, "evaluation.bytes": "text",
    "artifact.write": False,
}  # fmt: skip


class Phases:
    """Seconds since the program began, each with what begins then; and the seconds of parts that are called."""

    def __init__(self, began: float):
        self.began, self.marks, self.parts = began, [("Python", 0.0)], dict[str, float]()

    def mark(self, name: str) -> None:
        self.marks.append((name, time.time() - self.began))

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose seconds are added up under a name."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - start

        return call

    def table(self) -> dict[str, float]:
        """Seconds of each phase, in order."""
        ends = [at for _, at in self.marks[1:]]
        return {name: end - at for (name, at), end in zip(self.marks, ends, strict=False)}


def child(settings: dict[str, Any], began: float) -> dict[str, Any]:
    """Train to the first step in this process; what it took."""
    phases = Phases(began)
    phases.mark("imports")
    import torch

    from ingot.backends.torch import backend
    from ingot.config.loading import load_config
    from ingot.plan.validate import check_before_training
    from ingot.runs.report import Reporter
    from ingot.train.start import run

    for name in PARTS:
        owner = backend if hasattr(backend, name) else backend.TorchBackend
        setattr(owner, name, phases.timed(name, getattr(owner, name)))

    class Marking(Reporter):
        steps = 0

        def waiting(self, what: str, done: int = 0, total: int = 0) -> None:
            if not done and not self.steps:
                phases.mark(what)

        def primed(self, step: int, steps: int) -> None:
            phases.mark(f"priming step {step + 1}" if step < steps else "undoing the priming")

        def step(self, report: Any, log: bool) -> None:
            self.steps += 1
            if self.steps == 1:
                phases.mark("first step")

    recipe = settings.pop("recipe")
    resolved = load_config(recipe=recipe, overrides=settings, environment={})
    reporter = Marking()
    reporter.waiting("checking the run")
    dataset = check_before_training(resolved.config, 1, lambda text: None)
    run(resolved, reporter, dataset=dataset)
    from torch._dynamo.utils import calculate_time_spent, counters

    compiler = {COMPILER[key]: seconds for key, seconds in calculate_time_spent().items() if key in COMPILER}
    hits = {key: count for key, count in counters["inductor"].items() if key.startswith("fxgraph_cache")}
    total = next(at for name, at in phases.marks if name == "first step")
    return {
        "total": total, "phases": phases.table(), "parts": phases.parts, "compiler": compiler, "cache": hits,
        "aot": dict(counters["aot_autograd"]), "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
    }  # fmt: skip


def started(shape: Any, changes: dict[str, Any], folder: Path, number: int) -> dict[str, Any]:
    """What a fresh process with the caches of this folder took."""
    caches = {name: str(folder / place) for name, place in CACHES.items()}
    settings = {
        **shape.changes, **RUN, "recipe": shape.recipe, "training.output_dir": str(folder / f"run-{number}"), **changes,
    }  # fmt: skip
    command = [sys.executable, __file__, "--child", json.dumps(settings), str(time.time())]
    ended = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"the program failed:\n{ended.stdout[-2000:]}\n{ended.stderr[-6000:]}")
    return dict(json.loads(ended.stdout.splitlines()[-1]))


def prepare(folder: Path) -> None:
    """Have the sample's text ready: preparing it is no part of a run."""
    code = "from ingot.data.loading.open import open_dataset; open_dataset('sample:shakespeare', 'byte', False, None)"
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "INGOT_CACHE": str(folder / CACHES["INGOT_CACHE"])}, check=True
    )


def show(name: str, rows: dict[str, dict[str, Any]]) -> None:
    """A shape as a table: a line per phase, a column per program."""
    print(f"\n{name}, {next(iter(rows.values()))['device']}, torch {next(iter(rows.values()))['torch']}\n")
    print(f"| phase | {' | '.join(rows)} |\n|---|{'---|' * len(rows)}")
    for kind, form in (("phases", "{}"), ("parts", "({})"), ("compiler", "(compiler: {})")):
        names = dict.fromkeys(phase for row in rows.values() for phase in row[kind])
        for phase in names:
            print(f"| {form.format(phase)} | {' | '.join(f'{row[kind].get(phase, 0.0):.2f}' for row in rows.values())} |")
    totals = [f"**{row['total']:.1f} s**" for row in rows.values()]
    print(f"| **to the first step** | {' | '.join(totals)} |")
    for kind, row in rows.items():
        print(f"{kind}: graph cache {row['cache']}, autograd cache {row['aot']}", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(json.loads(sys.argv[2]), float(sys.argv[3]))))
        return
    from step_profile import SHAPES, TOY, settings_of

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="may be given often; 124m-64x1024 and golf-131k without")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="another setting of the run; JSON or text"
    )
    parser.add_argument("--results", type=Path, help="file that a line of JSON per program is appended to")
    parser.add_argument("--toy", action="store_true", help="a tiny shape on the CPU")
    arguments = parser.parse_args()
    changes = settings_of(arguments.set)
    print(f"{date.today()}, {changes or 'no other settings'}", flush=True)
    shapes = {"toy": TOY} if arguments.toy else {name: SHAPES[name] for name in arguments.shape or ("124m-64x1024", "golf-131k")}
    for name, shape in shapes.items():
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            prepare(folder)
            more = {**changes, "model.vocab_size": 260} if arguments.toy else changes
            rows = {kind: started(shape, more, folder, number) for number, kind in enumerate(("new", "seen"))}
        show(name, rows)
        if arguments.results:
            with arguments.results.open("a") as file:
                file.writelines(json.dumps({"shape": name, "kind": kind, **changes, **row}) + "\n" for kind, row in rows.items())


if __name__ == "__main__":
    main()
