"""Model FLOPs utilisation: which part of what the device could compute went into the model.

nanoGPT divides by an A100's 312e12 whatever runs it. Here the peak is the device's own and the log says where it is from.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SETTLING = 5  # iterations that are slow at first and not counted
KEPT = 0.9  # of the running value, at each iteration


@dataclass(frozen=True)
class Peak:
    """FLOP/s of one device, and where that is known from."""

    flops: float
    source: str

    def __str__(self) -> str:
        return f"mfu is a part of {self.flops / 1e12:.4g} TFLOP/s, {self.source}"


def find_peak(asked: float | None, device: torch.device) -> Peak:
    """The peak of a device: as asked, by its data sheet, or measured."""
    from ingot.runtime.device import describe, peak_flops

    if asked:
        return Peak(asked, "as mfu_peak says")
    if known := peak_flops(device):
        return Peak(known, f"the bf16 rate in the data sheet of {describe(device)}")
    return Peak(measure(device), f"measured with large matrices on {describe(device)}")


def measure(device: torch.device) -> float:
    """The rate of a large matrix multiplication: the best of a few, in bf16 on a GPU and in float32 elsewhere."""
    import torch

    on_gpu = device.type == "cuda"
    size, dtype = (8192, torch.bfloat16) if on_gpu else (1024, torch.float32)
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        product = a @ b
        product[0, 0].item()  # returns when it is computed
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)


class RunningMfu:
    """The utilisation as nanoGPT shows it: -1 while the run settles, then a running mean."""

    def __init__(self, flops_per_iteration: float, peak: float) -> None:
        self._flops, self._peak = flops_per_iteration, peak
        self.value = -1.0

    def update(self, iterations: int, seconds: float) -> None:
        """Take in an iteration; `iterations` of this process came before it."""
        if iterations < SETTLING or seconds <= 0:
            return
        now = utilisation(self._flops, seconds, self._peak)
        self.value = now if self.value < 0 else KEPT * self.value + (1 - KEPT) * now


def utilisation(flops: float, seconds: float, peak: float) -> float:
    """The part of the peak at which so many FLOPs were computed."""
    return flops / seconds / peak
