"""Measure memory and time of head and loss, plain (with the logits of the whole batch in memory) against chunked.

Each pass runs forward and backward from hidden states (B * T, C) and a head (V, C) to their gradients, in the dtype that training
uses on the device. Memory is the peak of the pass beyond its inputs: as reported by the allocator on a GPU, and by the operating
system (in one process per row of the table) on a CPU.

    python benchmarks/loss_memory.py [--tokens N] [--width N] [--vocab N] [--softcap X]
"""

from __future__ import annotations

import argparse
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date

import torch
from torch import Tensor

from ingot.backends.open import find_device
from ingot.model.loss import head_loss

CHUNKS = {"cuda": (None, 16384, 4096, 1024), "cpu": (None, 1024, 256)}
MEGABYTE = 2**20


def inputs(device: torch.device, tokens: int, width: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, head and targets like those of the first training step."""
    torch.manual_seed(0)
    hidden = torch.randn(1, tokens, width, device=device, requires_grad=True)
    weight = (0.02 * torch.randn(vocab, width, device=device)).requires_grad_()
    return hidden, weight, torch.randint(vocab, (1, tokens), device=device)


def measure(arguments: argparse.Namespace, chunk: int | None, compiled: bool) -> tuple[float, float]:
    """Return the peak megabytes and the milliseconds of a pass."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hidden, weight, targets = inputs(device, arguments.tokens, arguments.width, arguments.vocab)
    softcap = arguments.softcap or None
    loss_of = torch.compile(head_loss) if compiled else head_loss

    def once() -> None:
        hidden.grad = weight.grad = None
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(hidden, weight, targets, softcap, chunk)
        loss.backward()

    if device.type == "cuda":
        once()
        once()
        hidden.grad = weight.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        once()
        return (torch.cuda.max_memory_allocated() - before) / MEGABYTE, 1000 * seconds(once, 10)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    once()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return peak / (MEGABYTE if sys.platform == "darwin" else 1024), 1000 * seconds(once, 2)


def seconds(once: Callable[[], None], times: int) -> float:
    """Return the mean seconds of a call, including its work on the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        once()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536 if gpu else 2048, help="tokens in the micro-batch")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--softcap", type=float, default=0.0, help="0 means no softcap")
    parser.add_argument("--row", nargs=2, metavar=("CHUNK", "COMPILED"), help=argparse.SUPPRESS)  # for child processes: one row
    arguments = parser.parse_args()
    if arguments.row:
        print(*measure(arguments, int(arguments.row[0]) or None, arguments.row[1] == "1"))
        return
    a = arguments
    print(f"{date.today()}, {platform.machine()}, {find_device('cuda' if gpu else 'cpu').name}, torch {torch.__version__}")
    print(f"{a.tokens:,} tokens, {a.vocab:,} words, width {a.width}, softcap {a.softcap or 'none'}, {'bf16' if gpu else 'fp32'}")
    print("| logits held at once | compiled | peak memory | time |")
    print("|---|---|---|---|")
    for compiled in (False, True) if gpu else (False,):
        for chunk in CHUNKS["cuda" if gpu else "cpu"]:
            child = [sys.executable, __file__, *sys.argv[1:], "--row", str(chunk or 0), str(int(compiled))]
            megabytes, milliseconds = map(float, subprocess.run(child, check=True, capture_output=True, text=True).stdout.split())
            held = f"{chunk:,} tokens" if chunk else "all"
            print(f"| {held} | {'yes' if compiled else 'no'} | {megabytes:,.0f} MiB | {milliseconds:,.1f} ms |", flush=True)


if __name__ == "__main__":
    main()
