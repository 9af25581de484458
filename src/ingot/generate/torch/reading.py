"""The scores after a growing text: what the model reads, what is kept of it, and what is read again.

A cache of keys and values makes a step cost one token. It ends with the context: positions would shift with every token, so then
a part of the text is read anew, from the first position on. The last `context` tokens at each step are the exact but slow way;
half of them, once in context / 2 steps, is what `keep_half` asks for.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ingot.model.registry import OURS

RECORDS_ON = {"cuda"}  # kinds of devices that can replay what was recorded
STEP_ROOM = 512  # tokens that recorded steps have room for at first; each time they run out of it a step is recorded anew


class Reader:
    """Reads the tokens of `rows` texts as they come. `record`: steps of one token are recorded and replayed on a GPU."""

    def __init__(self, model: nn.Module, rows: int, use_cache: bool = True, keep_half: bool = False, record: bool = False):
        self._model, self._rows, self._keep_half = model, rows, keep_half
        context: int | None = getattr(model, "context", None)
        self._context = math.inf if context is None else context
        self._in_parts = all(hasattr(model, name) for name in ("new_cache", "hidden", "logits"))
        self._cache: list[Any] | None = self._new_cache() if use_cache and self._in_parts else None
        self._held = 0  # tokens that the cache holds
        self._seen: Tensor | None = None  # (B, T), no more than a context of it
        self._step = Step(model, self._cache) if record and self._cache is not None and can_record(model) else None

    def read(self, new: Tensor) -> Tensor:
        """The scores (B, V) after (B, T) new tokens."""
        self._seen = new if self._seen is None else torch.cat([self._seen, new], dim=1)
        if self._context < self._seen.size(1):
            self._seen = self._seen[:, -int(self._context) :]
        if self._cache is not None and self._held + new.size(1) > self._context:
            new = self._begin_again()
        if self._cache is None:
            return self._scores(self._seen, None)
        held, self._held = self._held, self._held + new.size(1)
        if self._step is not None and new.size(1) == 1:
            return self._step.read(new, held)
        return self._scores(new, self._cache)

    def _begin_again(self) -> Tensor:
        """Empty the cache and say what goes into it; or do without one from now on."""
        assert self._seen is not None
        if not self._keep_half:
            self._cache = None
            return self._seen
        kept = self._seen if not self._held else self._seen[:, -max(1, int(self._context) // 2) :]
        if self._step is not None:
            self._step.clear()
        else:
            self._cache = self._new_cache()
        self._held = 0
        return kept

    def _new_cache(self) -> list[Any]:
        return self._model.new_cache(self._rows)  # type: ignore[operator]

    def _scores(self, tokens: Tensor, cache: list[Any] | None) -> Tensor:
        if self._in_parts:
            return last_scores(self._model, tokens, cache)
        return self._model(tokens)[:, -1]


class Step:
    """One token per row, at a place that the device knows, as one launch instead of the hundreds that it consists of.

    The host's launches, not the arithmetic, are what a step of a small model takes its time for.
    """

    def __init__(self, model: nn.Module, cache: list[Any], record: bool = True, places: int = 1):
        self._model, self._cache, self._records = model, cache, record
        keys = cache[0].keys
        self._tokens = torch.zeros(keys.size(0), 1, dtype=torch.long, device=keys.device)
        self._place = torch.zeros(places, dtype=torch.long, device=keys.device)  # one for all rows, or one for each
        self._graph: torch.cuda.CUDAGraph | None = None
        self._recorded: Tensor | None = None  # the buffer that the recording writes into
        self._scores = torch.empty(0)

    def read(self, new: Tensor, held: int, places: Tensor | None = None) -> Tensor:
        """The scores after one more token; `held` are in the cache, or as many as `places` (B) says of each row, up to `held`."""
        for layer in self._cache:
            layer.reserve(max(held + 1, min(STEP_ROOM, layer.capacity)))
            layer.length = held + 1
        self._tokens.copy_(new)
        self._place.fill_(held) if places is None else self._place.copy_(places)
        if not (self._records and new.is_cuda):
            return self._compute()
        with torch.cuda.device(new.device):
            if self._recorded is not self._cache[0].keys:
                self._record()
            assert self._graph is not None
            self._graph.replay()
        return self._scores

    def clear(self) -> None:
        """Forget all tokens; the buffers stay where the recording has them."""
        for layer in self._cache:
            layer.length = 0

    def _compute(self) -> Tensor:
        for layer in self._cache:
            layer.place = self._place
        try:
            return last_scores(self._model, self._tokens, self._cache)
        finally:
            for layer in self._cache:
                layer.place = None

    def _record(self) -> None:
        """Compute the step twice to warm up, which only writes what it will write again, and then into a graph."""
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(2):
                self._compute()
        torch.cuda.current_stream().wait_stream(beside)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads of the program may use the GPU meanwhile; that is their business.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._scores = self._compute()
        self._recorded = self._cache[0].keys


def last_scores(model: Any, tokens: Tensor, cache: list[Any] | None) -> Tensor:
    """The scores (B, V) after the last token; those of the others are not computed."""
    return model.logits(model.hidden(tokens, cache)[:, -1])


def can_record(model: nn.Module) -> bool:
    """Whether steps of a model can be recorded: one of ours, where weights are not cast anew at every use."""
    kind = next(model.parameters()).device.type
    return takes_places(model) and kind in RECORDS_ON and not torch.is_autocast_enabled(kind)


def takes_places(model: nn.Module) -> bool:
    """Whether the cache of a model has places that the device knows: one of ours has."""
    # A model of one's own, made of one of ours perhaps, may count its tokens on the host, which such a step would not notice.
    return isinstance(model, OURS) and type(model).__module__.startswith("ingot.")
