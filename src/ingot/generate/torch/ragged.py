"""The scores after texts of different lengths, side by side: what Reader does for texts of one length.

Rows are filled up at their right end, which no token before it sees, so the prompts are read as if each stood alone. After that
every row has a place of its own in the cache: its next token is put over the filling, and what lies after it is masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.generate.torch.reading import Step, can_record, takes_places


class RaggedReader:
    """Reads the tokens of rows that have `lengths` tokens at first, as they come."""

    def __init__(self, model: nn.Module, lengths: Sequence[int], use_cache: bool = True, record: bool = False):
        self._model = model
        device = next(model.parameters()).device
        context: int | None = getattr(model, "context", None)
        self._context = math.inf if context is None else context
        self._lengths = torch.tensor(lengths, device=device)  # (B)
        self._longest = max(lengths)
        self._rows = torch.arange(len(lengths), device=device)
        self._seen: Tensor | None = None  # (B, T), filled up with zeros
        self._step: Step | None = None
        self._cache: list[Any] | None = None
        if use_cache and takes_places(model) and self._longest <= self._context:
            self._cache = model.new_cache(len(lengths))  # type: ignore[operator]
            self._step = Step(model, self._cache, record and can_record(model), places=len(lengths))

    def read(self, new: Tensor) -> Tensor:
        """The scores (B, V) after the prompts (B, T) at first, then after one new token (B, 1) of every row."""
        first = self._seen is None
        if self._seen is None:
            self._seen = new
        else:
            self._seen = F.pad(self._seen, (0, 1))
            self._seen[self._rows, self._lengths] = new[:, 0]
            self._lengths = self._lengths + 1
            self._longest += 1
        if self._longest > self._context:  # positions shift from now on
            self._cache = self._step = None
        if self._cache is None:
            return self._read_anew(self._seen)
        if first:
            return self._last(new, self._lengths, self._cache)
        assert self._step is not None
        return self._step.read(new, self._longest - 1, self._lengths - 1)

    def _read_anew(self, seen: Tensor) -> Tensor:
        """The scores after the last tokens of every row, as many as the context holds."""
        if self._longest <= self._context:
            return self._last(seen, self._lengths, None)
        context = int(self._context)
        starts = (self._lengths - context).clamp(min=0)
        places = starts[:, None] + torch.arange(context, device=seen.device)
        return self._last(seen.gather(1, places.clamp(max=seen.size(1) - 1)), self._lengths.clamp(max=context), None)

    def _last(self, tokens: Tensor, lengths: Tensor, cache: list[Any] | None) -> Tensor:
        """The scores after the last token of each row."""
        if all(hasattr(self._model, name) for name in ("hidden", "logits")):
            hidden = self._model.hidden(tokens, cache)[self._rows, lengths - 1]  # type: ignore[operator]
            return self._model.logits(hidden)  # type: ignore[operator]
        return self._model(tokens)[self._rows, lengths - 1]
