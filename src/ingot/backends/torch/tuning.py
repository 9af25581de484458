"""What is found out on the machine itself before a run: how many rows fit at once, and which attention kernel is fastest."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ingot.backends.torch.precision import ATTENTION
from ingot.errors import ConfigError, Setting

Agree = Callable[[Sequence[float]], list[float]]  # each value's maximum over the ranks
HOST_MICRO_BATCH_TOKENS = 16384  # on a CPU larger micro-batches only cost memory


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
        finally:
            torch.cuda.empty_cache()
        if not maximum([full])[0]:  # all ranks try the same sizes
            return size
        if size == 1:
            raise ConfigError(
                "one row of {0} tokens does not fit into the GPU's memory",
                Setting("data.seq_len"),
                Setting("training.gradient_checkpointing", "true"),
                advice="shorten it, shrink the model or set {1}",
            )
        size = (size + 1) // 2


def fastest_attention(attempt: Callable[[str, int], None], deterministic: bool, maximum: Agree) -> str:
    """The attention kernel whose forward and backward passes, made by `attempt` as often as it is told, take the least time.

    The slowest rank's time counts. In deterministic mode the first kernel that there is: times differ from run to run.
    """
    seconds: dict[str, float] = {}
    for name in ATTENTION:
        if not maximum([not _works(partial(attempt, name, 1))])[0]:
            if deterministic:
                return name
            began = time.perf_counter()
            attempt(name, 3)
            seconds[name] = maximum([time.perf_counter() - began])[0]
    return min(seconds, key=seconds.__getitem__) if seconds else "default"


def _works(attempt: Callable[[], None]) -> bool:
    """Whether a kernel can take this shape and type: one that cannot warns and raises a RuntimeError."""
    with contextlib.suppress(RuntimeError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attempt()
        return True
    return False
