"""What is found out on the machine itself before a run: how many rows fit at once, and which attention kernel is fastest."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ingot.backends.torch.precision import ATTENTION
from ingot.errors import ConfigError, Setting

HOST_MICRO_BATCH_TOKENS = 16384  # on a CPU larger micro-batches only cost memory


@dataclass(frozen=True)
class Tuned:
    """What was found out for the steps of a stage."""

    micro_batch: int
    attention: str


def largest_micro_batch(rows: int, attempt: Callable[[int], None]) -> int:
    """The most rows whose forward and backward pass, made by `attempt`, fit into the memory, by halving."""
    size = rows
    while True:
        try:
            attempt(size)
            return size
        except torch.OutOfMemoryError:
            if size == 1:
                raise ConfigError(
                    "one row of {0} tokens does not fit into the GPU's memory",
                    Setting("data.seq_len"),
                    Setting("training.gradient_checkpointing", "true"),
                    advice="shorten it, shrink the model or set {1}",
                ) from None
            size = (size + 1) // 2
        finally:
            torch.cuda.empty_cache()


def fastest_attention(attempt: Callable[[str, int], None], deterministic: bool) -> str:
    """The attention kernel whose forward and backward passes, made by `attempt` as often as it is told, take the least time.

    In deterministic mode the first one that there is: times differ from run to run.
    """
    seconds: dict[str, float] = {}
    for name in ATTENTION:
        # A kernel that cannot take this shape or type warns and raises a RuntimeError; it is then no candidate.
        with contextlib.suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attempt(name, 1)
            if deterministic:
                return name
            began = time.perf_counter()
            attempt(name, 3)
            seconds[name] = time.perf_counter() - began
    return min(seconds, key=seconds.__getitem__) if seconds else "default"
