"""Measure the speedup of one of our kernels or of a setting: time the steps of each shape with and without it, alternately.

One process has an engine per variant (none, each kernel alone, all kernels, and each setting of --also). All use the micro-batch
and attention kernel that the first variant chose, the same seed and the same batch. Each round times some steps of every variant.
A variant's ratio is the median over the rounds of its ms divided by those of the first variant; below 1 is faster. `loss apart`
is the largest difference between its losses and those of the first variant. --also attention=cudnn-grouped adds a variant with
that attention kernel, and "A=1 + B=2" one with both settings. With --base training.kernels=auto --kernel none the first variant
has the default kernels of a run, and each variant of --also differs from it only in its setting.

--alone times the kernels in isolation, in several block sizes, against the compiler's code for the plain form; --kernel selects
kernels, and `loss` includes the fp8 head.

    python benchmarks/speed_candidates.py [--shape golf-393k ...] [--kernel mlp ...] [--also training.fp8_head=true ...] [--alone]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import date
from typing import Any

import torch
import torch.nn.functional as F
from step_profile import SHAPES, TOY, WARM_UP, Shape, Stepper, open_engine, settings_of
from torch import Tensor

from ingot.backends.torch.tune import KERNELS
from ingot.model.kernels.fused_mlp import ACTIVATIONS, fused_mlp
from ingot.model.kernels.rotary import EPSILON, fused_rotation
from ingot.model.layers import Rotation, rotate
from ingot.model.loss import head_loss

FIRST = "none"
NO_KERNELS = {"training.kernels": "off"}
Variants = dict[str, dict[str, Any]]  # settings by variant name


def variants(model: torch.nn.Module, names: list[str], also: Variants) -> Variants:
    """Return a variant per kernel that the model can use, one with all of them, and the additional ones requested."""
    there = [name for name in names if any(hasattr(module, f"fused_{name}") for module in model.modules())]
    sets = [[name] for name in there] + ([there] if len(there) > 1 else [])
    return {**{" + ".join(kernels): {"training.kernels": kernels} for kernels in sets}, **also}


def measure(
    shape: Shape, names: list[str], also: Variants, rounds: int, steps: int, base: Mapping[str, Any] = NO_KERNELS
) -> dict[str, Any]:
    """Return per variant the median ms of each round, all losses, startup seconds and GiB; `base` applies to all variants."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        steppers: dict[str, Stepper] = {}
        kept: dict[str, Any] = {}
        todo: Variants = {FIRST: {}}
        while todo:
            variant, settings = next(iter(todo.items()))
            del todo[variant]
            began = time.perf_counter()
            changes = {**shape.changes, **base, **settings}
            attention = changes.pop("attention", None)
            config = Shape(shape.recipe, changes).config()
            vocab_size = config.model.vocab_size or 0
            engine = open_engine(config, vocab_size)
            stack.callback(engine.close)
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            used = {**kept, "attention": attention or kept["attention"]} if kept else {}
            if kept and "training.kernels" in settings:
                used["kernels"] = config.training.kernels
            stepper = Stepper(config, engine, vocab_size, used)
            stepper.run(WARM_UP)
            if not kept:
                kept = engine.tuned()
                todo = variants(engine.model, names, also)
                print(f"{kept['attention']} attention, {kept['micro_batch']} rows at once", flush=True)
            steppers[variant] = stepper
            gib = engine.peak_memory()[0] / 2**30
            found[variant] = {"ms": [], "ready": time.perf_counter() - began, "gib": gib}
            print(f"{variant} is ready after {found[variant]['ready']:.0f} s", flush=True)
        for _ in range(rounds):
            for variant, stepper in steppers.items():
                stepper.run(1)  # an untimed step evicts the previous variant's data from the caches
                found[variant]["ms"].append(statistics.median(stepper.run(steps)))
        for variant, stepper in steppers.items():
            found[variant]["losses"] = stepper.losses
    return found


def show(name: str, found: dict[str, Any]) -> None:
    """Print the table of a shape."""
    plain = found[FIRST]
    print(f"\n{name}\n\n| variant | ms per step | ratio | of each round | loss apart | GiB | ready after |")
    print("|---|---|---|---|---|---|---|")
    for variant, row in found.items():
        ratios = [mine / theirs for mine, theirs in zip(row["ms"], plain["ms"], strict=True)]
        apart = max(abs(mine - theirs) for mine, theirs in zip(row["losses"], plain["losses"], strict=True))
        print(
            f"| {variant} | {statistics.median(row['ms']):.2f} | {statistics.median(ratios):.4f} "
            f"| {' '.join(f'{ratio:.3f}' for ratio in ratios)} | {apart:.1e} | {row['gib']:.1f} | {row['ready']:.0f} s |"
        )
    print(end="", flush=True)


def milliseconds(once: Callable[[], Any]) -> float:
    """Return the device time of a call, captured and replayed as a CUDA graph so that host launches do not count."""
    for _ in range(3):
        once()
    if not torch.cuda.is_available():
        began = time.perf_counter()
        once()
        return 1000 * (time.perf_counter() - began)
    from triton.testing import do_bench_cudagraph

    return float(do_bench_cudagraph(once))


def host_milliseconds(once: Callable[[], Any], times: int = 50) -> float:
    """Return the host time to launch a call, which limits the speed if the device needs less."""
    once()
    began = time.perf_counter()
    for _ in range(times):
        once()
    return 1000 * (time.perf_counter() - began) / times


def loss_alone(tokens: int, width: int, vocabulary: int, softcap: float | None, device: torch.device) -> None:
    """Time head and loss forward and backward, plain, fused and in fp8; on a GPU also the kernel alone in some block sizes."""
    hidden = torch.randn(1, tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(vocabulary, width, device=device)).requires_grad_()
    targets = torch.randint(vocabulary, (1, tokens), device=device)
    compiled = torch.compile(head_loss, dynamic=False) if device.type == "cuda" else head_loss
    rows = []
    for what, fused, fp8 in (("plain", False, False), ("fused", True, False), ("8 bits", True, True)):
        if fp8 and device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
            continue

        def once(fused: bool = fused, fp8: bool = fp8) -> None:
            with torch.autocast(device.type, torch.bfloat16):
                loss = compiled(hidden, weight, targets, softcap, None, fused, fp8)
            torch.autograd.grad(loss, (hidden, weight))

        rows.append((f"head and loss, {what}", milliseconds(once)))
    if device.type == "cuda":
        from ingot.model.kernels.triton_loss import block_and_warps, losses_of_logits_, transposed

        logits = torch.randn(tokens, vocabulary, device=device, dtype=torch.bfloat16)
        whole = 1 << (vocabulary - 1).bit_length()
        blocks = [(whole, warps) for warps in (2, 4, 8, 16)] if whole <= 16384 else []
        blocks += [(1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (4096, 16), (8192, 8)] if vocabulary > 8192 else []
        for chosen in blocks:
            mark = " (ours)" if chosen == block_and_warps(vocabulary) else ""
            ms = milliseconds(lambda chosen=chosen: losses_of_logits_(logits, targets[0], softcap, True, chosen))
            rows.append((f"kernel, block {chosen[0]}, {chosen[1]} warps{mark}", ms))
        grad = logits.new_empty(logits.shape, dtype=torch.float8_e5m2)
        into = milliseconds(lambda: losses_of_logits_(logits, targets[0], softcap, True, into=grad, factor=2.0**15))
        rows.append(("kernel, gradient in 8 bits", into))
        rows.append(("that gradient transposed", milliseconds(lambda: transposed(grad))))
    floor = 1000 * 4 * tokens * vocabulary / 4.3e12  # the logits are read and written once
    print(f"\nloss: {tokens:,} tokens, width {width}, {vocabulary:,} words, softcap {softcap}; at 4.3 TB/s {floor:.2f} ms")
    for what, ms in rows:
        print(f"    {ms:8.3f} ms  {what}", flush=True)


def rotary_alone(rows: int, length: int, heads: int, size: int, device: torch.device) -> None:
    """Time norm, rotation and gain, forward and backward, plain and fused."""
    x = torch.randn(rows, length, heads, size, device=device, dtype=torch.bfloat16, requires_grad=True)
    gain = torch.ones(heads, device=device, requires_grad=True)
    tables = Rotation(length, size, 10000.0).to(device)(torch.arange(length, device=device))
    dy = torch.randn(rows, length, heads, size, device=device, dtype=torch.bfloat16).transpose(1, 2)

    def plain(x: Tensor, tables: tuple[Tensor, Tensor], gain: Tensor) -> Tensor:
        y = x.transpose(1, 2)
        return rotate(F.rms_norm(y, (size,)), tables) * gain.to(y.dtype)[:, None, None]

    floor = 1000 * 2 * 5 * x.numel() / 4.3e12  # two passes forward, three backward
    print(f"\nrotary: {rows} x {length} tokens, {heads} heads of {size}; at 4.3 TB/s {floor:.3f} ms")
    for what, function in (("plain", plain), ("fused", fused_rotation)):
        compiled = torch.compile(function, dynamic=False) if device.type == "cuda" else function

        def forward(compiled: Any = compiled) -> Tensor:
            return compiled(x, tables, gain)

        def both(forward: Any = forward) -> Any:
            return torch.autograd.grad(forward(), (x, gain), dy)

        host = f"launched in {host_milliseconds(forward):.3f} and {host_milliseconds(both):.3f}"
        print(f"    {milliseconds(forward):8.3f} ms forward, {milliseconds(both):8.3f} with backward  {what}, {host}", flush=True)
    if device.type == "cuda":
        from ingot.model.kernels.triton_rotary import SHAPE, rotation, rotation_backward

        given = (x.detach(), *tables, gain.detach(), EPSILON)
        for shape in ((512, 1), (1024, 2), (1024, 4), (2048, 2), (2048, 4), (4096, 4), (4096, 8), (8192, 8)):
            forward_ms = milliseconds(lambda shape=shape: rotation(*given, shape))
            backward_ms = milliseconds(lambda shape=shape: rotation_backward(dy.transpose(1, 2), *given, shape))
            mark = " (ours)" if shape == SHAPE else ""
            print(
                f"    {forward_ms:8.3f} ms forward, {backward_ms:8.3f} backward  kernels, {shape} numbers and warps{mark}",
                flush=True,
            )


def mlp_alone(tokens: int, width: int, inner: int, activation: str, device: torch.device) -> None:
    """Time an MLP forward and backward, plain and fused; on a GPU also the kernels alone with several tile shapes."""
    from torch import nn

    first, second = (nn.Linear(*sizes, bias=False, device=device) for sizes in ((width, inner), (inner, width)))
    x = torch.randn(1, tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    wanted = (x, first.weight, second.weight)

    def plain(x: Tensor, up: Tensor, bias: None, down: Tensor, activation: str) -> Tensor:
        return F.linear(ACTIVATIONS[activation](F.linear(x, up, bias)), down)

    peak = 1000 * 12 * tokens * width * inner / 782e12
    print(f"\nmlp: {tokens:,} tokens, {width} x {inner}, {activation}; products at 782 TFLOP/s {peak:.3f} ms")
    for what, function in (("plain", plain), ("fused", fused_mlp)):
        compiled = torch.compile(function, dynamic=False) if device.type == "cuda" else function

        def forward(compiled: Any = compiled) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16):
                return compiled(x, first.weight, None, second.weight, activation)

        def both(forward: Any = forward) -> Any:
            return torch.autograd.grad(y := forward(), wanted, y.detach())

        host = f"launched in {host_milliseconds(forward):.3f} and {host_milliseconds(both):.3f}"
        print(f"    {milliseconds(forward):8.3f} ms forward, {milliseconds(both):8.3f} with backward  {what}, {host}", flush=True)
    if device.type == "cuda":
        mlp_cuts(x.detach()[0], first.weight.detach().bfloat16(), second.weight.detach().bfloat16(), activation)


def mlp_cuts(x: Tensor, up: Tensor, down: Tensor, activation: str) -> None:
    """Time the two kernels with several tile shapes; the library's bare matmuls of the same sizes are the lower bound."""
    from ingot.model.kernels.triton_mlp import PAIRED, WIDE, Tiles, activated_matmul, forward_tiles, sloped_matmul

    keeps = biased = activation != "relu2"  # our GELU models have biases, whose gradient the backward kernel sums
    bare = milliseconds(lambda: x @ up.T), milliseconds(lambda: x @ down)
    print(f"    {bare[0]:8.3f} ms forward, {bare[1]:8.3f} backward  the library's products alone", flush=True)
    kept = activated_matmul(x, up, None, activation, keeps)[1]
    cuts = [
        WIDE, PAIRED, Tiles(128, 128, 64, 2, 4, 2), Tiles(128, 128, 32, 5, 4, 2), Tiles(128, 128, 64, 4, 4, 1),
        Tiles(128, 128, 64, 4, 8, 1), Tiles(64, 256, 64, 2, 4, 2), Tiles(128, 256, 64, 3, 8, 1),
        Tiles(256, 128, 64, 3, 8, 1), Tiles(64, 128, 64, 2, 4, 3),
    ]  # fmt: skip
    for cut in cuts:
        mark = " (ours forward)" * (cut == forward_tiles(keeps)) + " (ours backward)" * (cut == PAIRED)
        try:
            forward = milliseconds(lambda cut=cut: activated_matmul(x, up, None, activation, keeps, cut))
            back = milliseconds(lambda cut=cut: sloped_matmul(x, down, kept, activation, biased, cut))
        except Exception as error:  # report a tile shape that does not fit and continue
            print(f"    does not run: {tuple(cut)}: {type(error).__name__}: {str(error).splitlines()[0][:90]}", flush=True)
            continue
        print(f"    {forward:8.3f} ms forward, {back:8.3f} backward  kernels, {tuple(cut)}{mark}", flush=True)


def alone(device: torch.device, names: list[str]) -> None:
    """Time the kernels in isolation, in the sizes of the shapes."""
    if device.type == "cpu":
        loss_alone(64, 32, 100, 15.0, device)
        rotary_alone(2, 16, 2, 8, device)
        mlp_alone(64, 32, 64, "relu2", device)
        return
    if "loss" in names:
        loss_alone(65536, 768, 50304, None, device)
        loss_alone(131072, 512, 8192, 30.0, device)
        loss_alone(393216, 512, 1024, 30.0, device)
    if "rotary" in names:
        rotary_alone(96, 4096, 8, 64, device)
        rotary_alone(64, 2048, 4, 128, device)
    if "mlp" in names:
        mlp_alone(393216, 512, 1024, "relu2", device)
        mlp_alone(131072, 512, 2048, "relu2", device)
        mlp_alone(65536, 768, 3072, "gelu-tanh", device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=SHAPES, help="may be repeated (default: all shapes)")
    parser.add_argument("--kernel", action="append", choices=(*KERNELS, FIRST), help="may be repeated (default: all)")
    parser.add_argument(
        "--also", action="append", default=[], metavar="NAME=VALUE", help="add a variant with this setting; repeatable"
    )
    parser.add_argument(
        "--base",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of all variants (default: none of our kernels)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds per variant")
    parser.add_argument("--steps", type=int, default=6, help="timed steps per round")
    parser.add_argument("--alone", action="store_true", help="time the kernels in isolation instead of whole steps")
    parser.add_argument("--toy", action="store_true", help="a tiny shape on the CPU, where the kernels are not used")
    arguments = parser.parse_args()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    print(f"{date.today()}, {name}, torch {torch.__version__}", flush=True)
    also = {given: settings_of(given.split(" + ")) for given in arguments.also}
    base = settings_of(arguments.base) if arguments.base else NO_KERNELS
    if arguments.alone:
        alone(torch.device("cuda" if torch.cuda.is_available() else "cpu"), arguments.kernel or list(KERNELS))
        return
    for name, shape in ({"toy": TOY} if arguments.toy else {name: SHAPES[name] for name in arguments.shape or SHAPES}).items():
        began = time.perf_counter()
        try:
            show(name, measure(shape, arguments.kernel or list(KERNELS), also, arguments.rounds, arguments.steps, base))
        except Exception:  # continue with the other shapes
            traceback.print_exc()
            print(f"\n{name}: FAILED")
        print(f"\n{name} took {time.perf_counter() - began:.0f} s", flush=True)
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
