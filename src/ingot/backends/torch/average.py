"""The average of the weights: what a run is scored by where optimizer.ema_decay is set."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ingot.backends.torch.state import Named, tensor
from ingot.runtime.tensors import TensorRecord


class WeightAverage:
    """An exponential moving average in float32, which can take the place of the weights for a while."""

    def __init__(self, model: nn.Module):
        self._names, self._weights = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
        self._average = [p.detach().float().clone() for p in self._weights]
        self._kept: list[Tensor] = []  # the weights themselves, while the average is in their place

    @torch.no_grad()
    def update(self, decay: float, skip: Tensor) -> None:
        """Keep `decay` of itself and move towards the weights as they are after a step, unless it was skipped."""
        way = torch._foreach_sub([p.detach().float() for p in self._weights], self._average)
        torch._foreach_mul_(way, (1 - decay) * (1 - skip.float()))
        torch._foreach_add_(self._average, way)

    @torch.no_grad()
    def swap_in(self) -> None:
        """Put the average where the weights are."""
        if not self._kept:
            self._kept = [p.detach().clone() for p in self._weights]
            torch._foreach_copy_(list(self._weights), self._average)

    @torch.no_grad()
    def swap_out(self) -> None:
        """Put the weights back."""
        if self._kept:
            torch._foreach_copy_(list(self._weights), self._kept)
            self._kept = []

    def tensors(self) -> Named:
        """The average, by parameter name."""
        return zip(self._names, self._average, strict=True)

    @torch.no_grad()
    def load(self, records: Mapping[str, TensorRecord]) -> None:
        """Put back what `tensors` named; without any, the average begins with the weights as they are."""
        for name, average, p in zip(self._names, self._average, self._weights, strict=True):
            average.copy_(tensor(records[name]) if name in records else p)
