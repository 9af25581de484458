"""Measure the seconds from program start to the first training step, by phase, for a new shape and for one seen before.

Every column is a fresh process that runs the code path of `ingot train` with caches private to this benchmark (compiled code,
kernel choices). `new` starts with empty caches and `seen` with those that `new` filled; with --near a third process, `near`, uses
a shape that differs in one setting, like the next arm of a sweep. The text is the bundled sample, prepared in advance, unless
--data names another; the model is a shape of step_profile.py or a recipe with all of its stages. A phase begins when the progress
display would name it; lines in brackets are parts of phases. Below the table: the number of modules without bytecode, which every
start compiles from source, and for each phase that compiled its graphs, compiler seconds and cache hits.
--sample prints the functions that the main thread spent its time in, sampled 200 times a second; --driver initialises the GPU
driver while Python still imports torch, to see how much time that would save.

    python benchmarks/first_step.py [--shape 124m-64x1024 ...] [--recipe golf/frontier ...] [--set training.compile=blocks ...]
        [--near model.softcap=null ...] [--sample 12] [--driver] [--results first.jsonl]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "QUACK_CACHE_DIR": "quack",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash4", "INGOT_CACHE": "ingot",
}  # fmt: skip
PARTS = (
    "prepare_ahead",
    "find_torch_device",
    "refuse_too_large",
    "build_model",
    "make_optimizers",
    "compiled",
    "settle_kernels",
    "largest_micro_batch",
    "_fastest_attention",
    "_captured",
    "load",
)
COMPILER = {
    "_compile.compile_inner": "forward",
    "backward._backward_impl": "backward",
    "bytecode_tracing": "Dynamo",
    "build_guards": "guards",
    "create_aot_dispatcher_function": "AOTAutograd",
    "fx_codegen_and_compile": "Inductor",
    "async_compile.wait": "waiting for Triton",
}  # the compiler's names of its phases; the times of Inductor and Triton are included in the others
COUNTED = {
    "graphs": ("stats", "unique_graphs"),
    "autograd cache hits": ("aot_autograd", "autograd_cache_hit"),
    "misses": ("aot_autograd", "autograd_cache_miss"),
    "passed by": ("aot_autograd", "autograd_cache_bypass"),
    "graph cache hits": ("inductor", "fxgraph_cache_hit"),
    "graph cache misses": ("inductor", "fxgraph_cache_miss"),
}
RUN = {
    "data.path": "sample:shakespeare", "data.tokenizer": "byte", "data.sampling": "shuffle", "data.spans": 1,
    "training.max_steps": 3, "training.priming_steps": 2, "budget.seconds": None, "budget.artifact_bytes": None,
    "evaluation.every": 0, "evaluation.at_start": False, "evaluation.at_end": False, "evaluation.bytes": "text",
    "artifact.write": False,
}  # fmt: skip


class Phases:
    """Start times of the phases in seconds since the program began, and the total seconds of timed functions."""

    def __init__(self, began: float):
        self.began, self.marks, self.parts = began, [("Python", 0.0)], dict[str, float]()
        self.compiled = [compiler_so_far()]

    def mark(self, name: str) -> None:
        self.marks.append((name, time.time() - self.began))
        self.compiled.append(compiler_so_far())

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that the seconds of its calls are summed under a name."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - start

        return call

    def table(self) -> dict[str, float]:
        """Return the seconds of each phase, in order."""
        ends = [at for _, at in self.marks[1:]]
        return {name: end - at for (name, at), end in zip(self.marks, ends, strict=False)}

    def compiler(self) -> dict[str, dict[str, float]]:
        """Return the compiler's seconds and counts for each phase in which it was active."""
        found = {}
        for (name, _), before, after in zip(self.marks, self.compiled, self.compiled[1:], strict=False):
            did = {what: round(after[what] - before.get(what, 0), 2) for what in after if after[what] != before.get(what, 0)}
            if did:
                found[name] = did
        return found


def compiler_so_far() -> dict[str, float]:
    """Return the compiler's seconds and counts so far, or {} if it has not been imported."""
    module = sys.modules.get("torch._dynamo.utils")
    if module is None or not hasattr(module, "compilation_time_metrics"):
        return {}
    seconds = {name: sum(module.compilation_time_metrics.get(key, ())) for key, name in COMPILER.items()}
    return seconds | {name: module.counters[group][key] for name, (group, key) in COUNTED.items()}


class Samples:
    """A sampling profiler of the main thread: counts per phase how often each function is anywhere on the stack."""

    interval = 0.005

    def __init__(self, phases: Phases):
        self.phases, self.seen, self.ended = phases, dict[str, Counter[str]](), False
        self._main = threading.get_ident()
        threading.Thread(target=self._watch, name="samples", daemon=True).start()

    def _watch(self) -> None:
        while not self.ended:
            frame, stack = sys._current_frames().get(self._main), set()
            while frame is not None and frame.f_code is not child.__code__:
                stack.add(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}")
                frame = frame.f_back
            self.seen.setdefault(self.phases.marks[-1][0], Counter()).update(stack)
            time.sleep(self.interval)

    def most(self, count: int) -> dict[str, list[tuple[str, float]]]:
        """Stop sampling; return the most frequent functions of each phase with their seconds."""
        self.ended = True
        return {
            phase: [(name, round(times * self.interval, 2)) for name, times in found.most_common(count)]
            for phase, found in self.seen.items()
        }


def wake_driver(phases: Phases) -> None:
    """Create the CUDA context of the first GPU from another thread; ctypes calls release the GIL, so imports continue."""
    began = time.perf_counter()
    with contextlib.suppress(OSError):  # no driver
        driver, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
        driver.cuInit(0)
        phases.parts["driver: init"] = time.perf_counter() - began
        driver.cuDeviceGet(ctypes.byref(device), 0)
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    phases.parts["driver: init and context, beside the imports"] = time.perf_counter() - began


def without_bytecode() -> int:
    """Count imported modules without bytecode, which every start compiles from source (copied or read-only packages)."""
    specs = [getattr(module, "__spec__", None) for module in list(sys.modules.values())]
    return sum(1 for spec in specs if getattr(spec, "cached", None) and not Path(spec.cached).exists())


def priming_names(config: Any) -> list[str]:
    """Return the phase names of the priming steps and of restoring the state after the last one."""
    from ingot.train.step_plan import shapes

    plans, steps = shapes(config), config.training.priming_steps
    where = [f", stage {plan.stage + 1} (rows of {plan.seq_len})" if len(plans) > 1 else "" for plan in plans]
    return [f"priming step {step + 1}{stage}" for stage in where for step in range(steps)] + ["undoing the priming"]


def time_parts(phases: Phases) -> None:
    """Time the backend functions of PARTS and each kernel trial."""
    from ingot.backends.torch import backend
    from ingot.backends.torch import tune as kernels

    for name in PARTS:
        owner = next(owner for owner in (backend, kernels, backend.TorchBackend) if hasattr(owner, name))
        setattr(owner, name, phases.timed(name, getattr(owner, name)))
    use, fails = kernels.use_kernels, kernels.failure_of
    tried: list[str] = []

    def use_kernels(model: Any, names: Any) -> None:
        tried[:] = names
        use(model, names)

    kernels.use_kernels = use_kernels
    kernels.failure_of = lambda attempt: phases.timed(f"trying {tried[-1] if tried else 'a pass'}", fails)(attempt)


def child(settings: dict[str, Any], began: float) -> dict[str, Any]:
    """Train to the first step in this process and return the measurements."""
    phases, count = Phases(began), settings.pop("sample", 0)
    samples = Samples(phases) if count else None
    if settings.pop("driver", False):
        threading.Thread(target=wake_driver, args=[phases], name="driver", daemon=True).start()
    phases.mark("imports")
    from ingot.backends.torch import startup as builders
    from ingot.config.loading import load_config
    from ingot.preflight.validate import check_before_training
    from ingot.runs.reporter import Reporter
    from ingot.runtime.ranks import Ranks
    from ingot.train.start import run

    resolved = load_config(recipe=settings.pop("recipe"), overrides=settings, environment={})
    phases.mark("checking the run")
    dataset = check_before_training(resolved.config, 1, lambda text: None)
    # Start the builders here, as `open_backend` does, so that torch is imported and its functions are wrapped before the run.
    begun = builders.Builders(resolved.config, resolved.config.model.vocab_size or 260, Ranks())
    builders.Builders = lambda *_: begun
    begun.wait = phases.timed("waiting for builders", begun.wait)
    phases.mark("importing torch")
    import torch

    time_parts(phases)
    names = priming_names(resolved.config)

    class Marking(Reporter):
        steps = 0

        def waiting(self, what: str, done: int = 0, total: int = 0) -> None:
            if not done and not self.steps:
                phases.mark(names[0] if what in ("compiling", "priming") else what)

        def primed(self, step: int, steps: int) -> None:
            phases.mark(names[step])

        def step(self, report: Any, log: bool) -> None:
            self.steps += 1
            if self.steps == 1:
                phases.mark("first step")

    run(resolved, Marking(), dataset=dataset)
    total = next(at for name, at in phases.marks if name == "first step")
    return {
        "total": total, "phases": phases.table(), "parts": phases.parts, "compiler": phases.compiler(),
        "samples": samples.most(count) if samples is not None else {}, "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "without_bytecode": without_bytecode(),
    }  # fmt: skip


def started(shape: Any, changes: dict[str, Any], folder: Path, number: int) -> dict[str, Any]:
    """Run a fresh process with the caches of a folder and return its measurements."""
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
    """Prepare the sample text in advance so that runs do not include it."""
    code = "from ingot.data.loading.data_path import open_dataset; open_dataset('sample:shakespeare', 'byte', False, None)"
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "INGOT_CACHE": str(folder / CACHES["INGOT_CACHE"])}, check=True
    )


def show(name: str, rows: dict[str, dict[str, Any]]) -> None:
    """Print a shape's table (a line per phase, a column per process), then the compiler's counts and the samples."""
    print(f"\n{name}, {next(iter(rows.values()))['device']}, torch {next(iter(rows.values()))['torch']}\n")
    print(f"| phase | {' | '.join(rows)} |\n|---|{'---|' * len(rows)}")
    for kind, form in (("phases", "{}"), ("parts", "({})")):
        names = dict.fromkeys(phase for row in rows.values() for phase in row[kind])
        for phase in names:
            print(f"| {form.format(phase)} | {' | '.join(f'{row[kind].get(phase, 0.0):.2f}' for row in rows.values())} |")
    totals = [f"**{row['total']:.1f} s**" for row in rows.values()]
    print(f"| **to the first step** | {' | '.join(totals)} |\n")
    for kind, row in rows.items():
        if row["without_bytecode"]:
            print(f"{kind}: {row['without_bytecode']:,} modules had no bytecode; python -m compileall of their folders makes it")
        for phase, did in row["compiler"].items():
            print(f"{kind}, {phase}: {', '.join(f'{what} {much:g}' for what, much in did.items())}", flush=True)
        for phase, found in row["samples"].items():
            print(f"{kind}, {phase}:", *(f"    {seconds:6.2f} {where}" for where, seconds in found), sep="\n", flush=True)


def shapes_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the requested shapes and recipes by name."""
    from step_profile import SHAPES, TOY, Shape

    if arguments.toy:
        return {"toy": TOY}
    recipes = {name: Shape(name, {"model.vocab_size": 8192} if "frontier" in name else {}) for name in arguments.recipe or ()}
    named = arguments.shape or (() if recipes else ("124m-64x1024", "golf-131k"))
    return {name: SHAPES[name] for name in named} | recipes


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(json.loads(sys.argv[2]), float(sys.argv[3]))))
        return
    from step_profile import SHAPES, settings_of

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="may be repeated (default: 124m-64x1024 and golf-131k)")
    parser.add_argument("--recipe", action="append", help="a recipe with all of its stages; may be repeated")
    parser.add_argument("--data", help="prepared data to use instead of the sample; needs --tokenizer")
    parser.add_argument("--tokenizer", help="tokenizer of --data")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the run, as JSON or text; may be repeated"
    )
    parser.add_argument("--near", action="append", default=[], metavar="NAME=VALUE", help="setting changed in the `near` column")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="print the N most frequent functions of each phase")
    parser.add_argument("--driver", action="store_true", help="initialise the GPU driver while torch is imported")
    parser.add_argument("--results", type=Path, help="append a line of JSON per process to this file")
    parser.add_argument("--toy", action="store_true", help="a tiny shape on the CPU")
    arguments = parser.parse_args()
    changes = settings_of(arguments.set)
    if arguments.data:
        changes = {"data.path": arguments.data, "data.tokenizer": arguments.tokenizer} | changes
    print(f"{date.today()}, {changes or 'no other settings'}", flush=True)
    for name, shape in shapes_of(arguments).items():
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            prepare(folder)
            more = changes | {"sample": arguments.sample, "driver": arguments.driver}
            more |= {"model.vocab_size": 260} if arguments.toy else {}
            near = settings_of(arguments.near)
            kinds: dict[str, dict[str, Any]] = {"new": {}, "seen": {}} | ({"near": near} if near else {})
            rows = {kind: started(shape, more | other, folder, number) for number, (kind, other) in enumerate(kinds.items())}
        show(name, rows)
        if arguments.results:
            with arguments.results.open("a") as file:
                file.writelines(json.dumps({"shape": name, "kind": kind, **changes, **row}) + "\n" for kind, row in rows.items())


if __name__ == "__main__":
    main()
