"""What a step found out, on its way from the device to the host."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from ingot.backends.base import StepResult


class DeviceResult:
    """The numbers of a step: loss, gradient norm, skipped.

    On CUDA they travel as soon as they are there, so that asking for them waits for no later step. A CPU has ended a step when it
    returns; of other devices it is known when the numbers are seen.
    """

    def __init__(self, numbers: Tensor):
        self._numbers, self._ended = numbers, time.perf_counter() if numbers.device.type == "cpu" else None
        self._arrival: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
            self._arrival = torch.cuda.current_stream(numbers.device).record_event()

    def result(self) -> StepResult:
        if self._arrival is not None:
            self._arrival.synchronize()
        loss, grad_norm, skipped = self._numbers.tolist()
        return StepResult(loss, grad_norm, bool(skipped), self._ended)
