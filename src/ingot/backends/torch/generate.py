"""One token after another, with a key-value cache where the model has one.

What a row draws depends on its own seed alone: neither on the rows beside it nor on the device, whose arithmetic decides only
where two tokens are about equally likely.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.backends.sampling import RowScores, Sampling
from ingot.errors import RunError
from ingot.model.registry import OURS

# The scores after a growing text: what the model reads, what is kept of it, and what is read again.

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
            layer.position = self._place
        try:
            return last_scores(self._model, self._tokens, self._cache)
        finally:
            for layer in self._cache:
                layer.position = None

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


# The scores after texts of different lengths, side by side: what Reader does for texts of one length.


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


BLOCK = 64  # random numbers that are brought to the device at once


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Tensor,
    sampling: Sampling,
    vocab_size: int | None = None,
    keep_half: bool = False,
    record: bool = False,
    lengths: Sequence[int] | None = None,
) -> Generator[Tensor, None, None]:
    """Yield the next token of every row of `prompts` (B, T), for ever; only ids below `vocab_size` are drawn.

    Row i draws with its own seed. `keep_half` and `record` are explained in reading.py. With `lengths`, row i has so many tokens,
    at its left; `keep_half` is then of no effect.
    """
    draws = UniformDraws(sampling.row_seeds(prompts.size(0)), prompts.device)
    training = model.training
    model.eval()
    try:
        reader: Reader | RaggedReader = Reader(model, prompts.size(0), sampling.use_cache, keep_half, record)
        if lengths is not None and len(set(lengths)) > 1:
            reader = RaggedReader(model, lengths, sampling.use_cache, record)
        tokens, written = prompts, None
        while True:
            logits = reader.read(tokens).float()  # (B, V)
            if not logits.isfinite().all():
                raise RunError("the model's scores are not finite, so it cannot write: its weights are damaged or diverged")
            if vocab_size is not None:
                logits[:, vocab_size:] = -math.inf
            if sampling.repetition_penalty != 1:
                written = torch.zeros_like(logits, dtype=torch.bool) if written is None else written.scatter(1, tokens, True)
                logits = torch.where(written, penalised(logits, sampling.repetition_penalty), logits)
            tokens = logits.argmax(-1, keepdim=True) if sampling.greedy else choose(logits, sampling, draws.uniform())
            yield tokens.squeeze(1)
    finally:
        model.train(training)


def penalised(logits: Tensor, penalty: float) -> Tensor:
    """Scores of tokens that a text has already: a score above 0 is divided by the penalty, one below is multiplied by it."""
    return torch.where(logits < 0, logits * penalty, logits / penalty)


class UniformDraws:
    """A number from 0 to 1 per row and throw, from a generator of the row's own on the host."""

    def __init__(self, seeds: Sequence[int], device: torch.device):
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._device = device
        self._block: list[Tensor] = []

    def uniform(self) -> Tensor:
        """One number per row, (B, 1)."""
        if not self._block:
            block = torch.stack([torch.rand(BLOCK, generator=generator) for generator in self._generators], dim=1)
            self._block = list(block.to(self._device).unsqueeze(-1).flip(0))
        return self._block.pop()


def choose(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """The token at which the probabilities of a row sum up to its throw (B, 1), as (B, 1)."""
    logits = (logits - logits.max(dim=-1, keepdim=True).values) / sampling.temperature  # none overflows, however cold
    ids: Tensor | None = None
    if 0 < sampling.top_k < logits.size(-1):
        logits, ids = logits.topk(sampling.top_k)
    elif sampling.top_p < 1:
        logits, ids = logits.sort(descending=True)
    p = logits.softmax(-1)
    if sampling.top_p < 1:
        p = p.masked_fill(p.cumsum(-1) - p >= max(sampling.top_p, 1e-9), 0.0)  # the likelier tokens' share
    sums = p.cumsum(-1)
    found = torch.searchsorted(sums, uniform * sums[:, -1:], right=True).clamp(max=p.size(-1) - 1)
    # A sum that is rounded up may lead to a token that cannot be.
    found = torch.where(p.gather(-1, found) > 0, found, p.argmax(-1, keepdim=True))
    return found if ids is None else ids.gather(-1, found)


# Several texts side by side, after one prompt or each after its own.

LOOK_EVERY = 16  # tokens between looks at whether all texts have ended; each look waits for the device


def continue_prompts(
    model: nn.Module, prompts: Sequence[list[int]], sampling: Sampling, vocab_size: int, record: bool
) -> Iterator[list[int]]:
    """The next token of every prompt, for ever; MemoryError: the GPU does not hold so many texts."""
    lengths = [len(prompt) for prompt in prompts]
    filled = [prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts]
    start = torch.tensor(filled, device=next(model.parameters()).device)
    try:
        for tokens in generate(model, start, sampling, vocab_size, record=record, lengths=lengths):
            yield tokens.tolist()
    except torch.OutOfMemoryError:
        raise MemoryError(f"the GPU's memory does not hold {len(prompts)} texts at once") from None


def write_texts(
    model: nn.Module,
    prompt: Sequence[int],
    texts: int,
    tokens: int,
    sampling: Sampling,
    ended: Callable[[list[int]], bool] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **options: Any,
) -> Iterator[list[int]]:
    """The ids that follow a prompt, for each of `texts` texts: `tokens` of them, or fewer once all of them have `ended`.

    All are written at once, or as many as the memory holds; text i draws with the seed plus i, so it is the same either way.
    The options are those of `generate`.
    """
    start = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    at_once, first = texts, 0
    while first < texts:
        rows = min(at_once, texts - first)
        begun = first * tokens

        def show(step: int, begun: int = begun, rows: int = rows) -> None:
            progress(begun + rows * step, texts * tokens)

        seeded = replace(sampling, seed=sampling.seed + first)
        try:
            found = _write(model, start.expand(rows, -1), tokens, seeded, ended, show, options)
        except torch.OutOfMemoryError:
            if rows == 1:
                raise RunError("the GPU's memory does not hold one text; shorten it or use another device") from None
            found = None
        if found is None:
            at_once = rows // 2
            torch.cuda.empty_cache()  # here, where nothing that failed is held any more
            continue
        yield from found
        first += rows


def _write(
    model: nn.Module,
    prompts: Tensor,
    tokens: int,
    sampling: Sampling,
    ended: Callable[[list[int]], bool] | None,
    show: Callable[[int], None],
    options: dict[str, Any],
) -> list[list[int]]:
    written: list[Tensor] = []
    with closing(generate(model, prompts, sampling, **options)) as stream:
        for token in islice(stream, tokens):
            written.append(token)
            if len(written) % LOOK_EVERY == 0:
                show(len(written))
                if ended is not None and all(ended(row) for row in torch.stack(written, dim=1).tolist()):
                    break
    show(tokens)
    return torch.stack(written, dim=1).tolist() if written else [[] for _ in prompts]


# The probabilities of tokens that are there already, of many rows in one pass.

AT_ONCE = 4096  # places whose scores of all words are held at once


@torch.no_grad()
def score_rows(
    model: nn.Module, rows: Sequence[Sequence[int]], firsts: Sequence[int], top: int, vocab_size: int
) -> list[RowScores]:
    """The scores of each row's tokens from its place `first`, which is 1 or more, on, and the `top` likeliest ids there."""
    device = next(model.parameters()).device
    lengths = [len(row) for row in rows]
    filled = [[*row[:-1], *[0] * (max(lengths) - len(row))] for row in rows]
    places = [(row, place) for row, first in enumerate(firsts) for place in range(first, lengths[row])]
    if not places:
        none = np.empty((0, top), np.float32)
        return [RowScores(first, none[:, 0], none.astype(np.int64), none) for first in firsts]
    at_row, at_place = (torch.tensor(part, device=device) for part in zip(*places, strict=True))
    wanted = torch.tensor([rows[row][place] for row, place in places], device=device)
    states = _states(model, torch.tensor(filled, device=device))
    chosen, best_ids, best = [], [], []
    for begin in range(0, len(places), AT_ONCE):
        part = slice(begin, begin + AT_ONCE)
        scores = _scores(model, states[at_row[part], at_place[part] - 1]).float().log_softmax(-1)  # (N, V)
        chosen.append(scores.gather(1, wanted[part, None])[:, 0].cpu())
        found = scores[:, :vocab_size].topk(min(top, vocab_size))
        best_ids.append(found.indices.cpu())
        best.append(found.values.cpu())
    counts = [max(0, length - first) for length, first in zip(lengths, firsts, strict=True)]
    arrays = [torch.cat(parts).split(counts) for parts in (chosen, best_ids, best)]  # type: ignore[no-untyped-call]
    return [RowScores(first, *(part.numpy() for part in found)) for first, *found in zip(firsts, *arrays, strict=True)]


def _states(model: Any, tokens: Tensor) -> Tensor:
    """Hidden states, or the scores of a model that has no head of its own to be asked."""
    return model.hidden(tokens) if _in_parts(model) else model(tokens)


def _scores(model: Any, states: Tensor) -> Tensor:
    return model.logits(states) if _in_parts(model) else states


def _in_parts(model: Any) -> bool:
    return hasattr(model, "hidden") and hasattr(model, "logits")
