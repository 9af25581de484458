"""Model FLOPs utilisation: which part of what the device could compute went into the model.

nanoGPT divides by an A100's 312e12 whatever runs it. Here the peak is the device's own and the log says where it is from.
"""

from __future__ import annotations

from dataclasses import dataclass

from ingot.runtime.devices import Device

SETTLING = 5  # iterations that are slow at first and not counted
KEPT = 0.9  # of the running value, at each iteration


@dataclass(frozen=True)
class Peak:
    """FLOP/s of one device, and where that is known from."""

    flops: float
    source: str

    def __str__(self) -> str:
        return f"mfu is a part of {self.flops / 1e12:.4g} TFLOP/s, {self.source}"


def find_peak(asked: float | None, device: Device) -> Peak:
    """The peak of a device: as asked, by its data sheet, or measured."""
    from ingot.backends.open import measure_flops

    if asked:
        return Peak(asked, "as mfu_peak says")
    if device.peak_flops:
        return Peak(device.peak_flops, f"the bf16 rate in the data sheet of {device.name}")
    return Peak(measure_flops(device), f"measured with large matrices on {device.name}")


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
