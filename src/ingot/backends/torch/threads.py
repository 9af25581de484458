"""How many threads a CPU computes with. Another number adds up in another order, so a run keeps the one that it began with."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from ingot.backends.torch.tuning import Agree, seconds_of
from ingot.runtime.children import cpu_count

VARIABLE = "OMP_NUM_THREADS"  # of OpenMP, which torch follows
FASTER = 0.9  # of the time that more threads take: for less it is not worth to leave torch's own number


def settle_threads(
    asked: int | Literal["auto"], kept: Mapping[str, Any], measures: bool, attempt: Callable[[], None], maximum: Agree
) -> int:
    """Let torch compute with the threads that are asked for, that the run had, or that are fastest; returns how many."""
    threads = torch.get_num_threads()  # also of runs whose checkpoints do not say
    if asked != "auto":
        threads = asked
    elif int(kept.get("threads", threads)) <= cpu_count() and kept:
        threads = int(kept.get("threads", threads))
    elif measures and VARIABLE not in os.environ:
        threads = fastest_threads(attempt, maximum)
    torch.set_num_threads(threads)
    return threads


def fastest_threads(attempt: Callable[[], None], maximum: Agree) -> int:
    """How many threads, torch's own number or halves of it, take the least time for a forward and backward pass by `attempt`.

    The slowest rank's time counts. Where others compute too, threads wait for each other: two took three times as long as one.
    """
    best = count = int(maximum([torch.get_num_threads()])[0])
    least = math.inf
    while count:
        torch.set_num_threads(count)
        attempt()  # threads are started, memory is taken
        seconds = maximum([min(seconds_of(attempt) for _ in range(2))])[0]
        if seconds > FASTER * least:
            break
        best, least, count = count, seconds, count // 2
    return best
