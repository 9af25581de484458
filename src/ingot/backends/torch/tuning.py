"""What is found out on the machine itself before a run: how many rows are computed at once, and which attention is fastest."""

from __future__ import annotations

import contextlib
import gc
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ingot.errors import ConfigError, RunError, Setting

Agree = Callable[[Sequence[float]], list[float]]  # each value's maximum over the ranks
HOST_MICRO_BATCH_TOKENS = 16384  # on a CPU larger micro-batches only cost memory
# Trials are not compiled, and what a further micro-batch costs is the beginning and end of each kernel, of which they have about
# twice as many: 2% of their time stands for 1% of a step's (golf seq4096, compiled: 48 rows of 96 take 0.9% more, 24 2.8%).
SLOWER = 1.02


@dataclass(frozen=True)
class Tuned:
    """What was found out for the steps of a stage."""

    micro_batch: int
    attention: str


def largest_micro_batch(rows: int, attempt: Callable[[int], None], maximum: Agree) -> int:
    """The most rows whose forward and backward pass, made by `attempt`, fit into every rank's memory, by halving."""
    size = rows
    while True:
        full = False
        try:
            attempt(size)
        except torch.OutOfMemoryError:
            full = True
        if not maximum([full])[0]:  # all ranks try the same sizes
            return size
        gc.collect()  # not before the error is gone, which holds what it was raised in
        torch.cuda.empty_cache()
        if size == 1:
            raise ConfigError(
                "one row of {0} tokens does not fit into the GPU's memory",
                Setting("data.seq_len"),
                Setting("training.gradient_checkpointing", "true"),
                advice="shorten it, shrink the model or set {1}",
            )
        size = (size + 1) // 2


def memory_is_full(step: int, micro_batch: int, recorded: bool) -> RunError:
    """What ends a run whose step does not fit after all; `recorded`: whether its passes are CUDA graphs."""
    return RunError(
        f"the GPU's memory is full at step {step} with micro-batches of {micro_batch} rows",
        Setting("training.micro_batch"),
        Setting("training.gradient_checkpointing", "true"),
        Setting("training.cuda_graphs", "false"),
        advice="lower {0}, or set {1} or {2}, and start again" if recorded else "lower {0} or set {1}, and start again",
    )


def smallest_micro_batch(largest: int, attempt: Callable[[int, int], None], maximum: Agree) -> int:
    """The least of the halves, quarters and so on of `largest` rows whose passes take hardly longer than the fastest's, per row.

    `attempt` makes passes of so many rows, as often as it is told; one of the largest was made before. Trials end with the first
    size that is slower: each cut adds as many beginnings of kernels as all before it. Where the first cut pays they take the time
    of five passes of the largest.
    """
    chosen = size = largest
    least = math.inf
    while True:
        times = max(1, largest // (2 * size))
        each = maximum([_least_seconds(partial(attempt, size), times, size != largest)])[0] / (size * times)
        if each > SLOWER * least:
            return chosen
        chosen, least = size, min(least, each)
        if size % 2:  # halves of unequal sizes would be two graphs
            return chosen
        size //= 2


def _least_seconds(attempt: Callable[[int], None], times: int, new: bool) -> float:
    """The better of two trials; endless where there is no room, as beside another program that takes some meanwhile."""
    try:
        if new:
            attempt(1)  # kernels are loaded, memory is taken
        return min(seconds_of(partial(attempt, times)) for _ in range(2))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return math.inf


def fastest_attention(names: Sequence[str], attempt: Callable[[str, int], None], deterministic: bool, maximum: Agree) -> str:
    """The attention kernel whose forward and backward passes, made by `attempt` as often as it is told, take the least time.

    The slowest rank's time counts. In deterministic mode the first kernel that there is: times differ from run to run.
    """
    there = []
    for name in names:
        if not maximum([not works(partial(attempt, name, 1))])[0]:
            if deterministic:
                return name
            there.append(name)
    if len(there) < 2:
        return there[0] if there else "default"
    # In turns: what slows the device down for a while, such as having waited for a compiler, then meets no kernel alone.
    turns = [[maximum([seconds_of(partial(attempt, name, 3))])[0] for name in there] for _ in range(2)]
    return min(zip(map(min, *turns), there, strict=True))[1]


def seconds_of(attempt: Callable[[], None]) -> float:
    """The time that something takes."""
    began = time.perf_counter()
    attempt()
    return time.perf_counter() - began


def works(attempt: Callable[[], None]) -> bool:
    """Whether a kernel can take this shape and type: one of torch's that cannot warns and raises a RuntimeError.

    One of a package may raise anything. What is wrong with the pass itself is raised again by the first step.
    """
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attempt()
        return True
    return False
