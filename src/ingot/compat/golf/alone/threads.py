"""In place of ingot.backends.torch.tune: the one file computes with torch's own number of threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def settle_threads(*_: Any) -> int:
    """How many those are."""
    return torch.get_num_threads()


def seconds_of(attempt: Callable[[], None]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    attempt()
    return time.perf_counter() - began
