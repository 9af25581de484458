"""Autoregressive generation, with a key-value cache if the model supports one, and scoring of given tokens.

The tokens sampled for a row depend on its seed, not on the other rows or the device, unless rounding decides between tokens of
almost equal probability.
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

RECORDS_ON = {"cuda"}  # device types on which a decoding step can be captured as a CUDA graph and replayed
STEP_CAPACITY = 512  # initial cache size of recorded steps, in tokens; a step is recorded again when the cache grows


def in_parts(model: Any) -> bool:
    """Return True if a model has separate methods `hidden` and `logits`."""
    return hasattr(model, "hidden") and hasattr(model, "logits")


def last_logits(model: Any, tokens: Tensor, cache: list[Any] | None = None, lengths: Tensor | None = None) -> Tensor:
    """Return the logits (B, V) at each row's last token, which is at index lengths[i] - 1 if `lengths` is given."""
    at = (slice(None), -1) if lengths is None else (torch.arange(len(tokens), device=tokens.device), lengths - 1)
    if not in_parts(model):
        return model(tokens)[at]
    return model.logits((model.hidden(tokens) if cache is None else model.hidden(tokens, cache))[at])


class Reader:
    """Incremental decoding: feeds a model the prompts, then one new token per row at a time, and returns next-token logits.

    `lengths` gives the prompt lengths if they differ; `record` runs single-token steps as CUDA graphs. Once the context is full,
    every step recomputes all of it without a cache. With `keep_half` and prompts of equal length, the first half of a full
    context is dropped instead, and the cache is recomputed.
    """

    def __init__(
        self, model: Any, rows: int, lengths: Sequence[int] | None, use_cache: bool, keep_half: bool = False, record: bool = False
    ):
        self._model, self._keep_half = model, keep_half and lengths is None
        self._context = getattr(model, "context", None) or math.inf  # a custom model may have no context limit
        self._lengths: Tensor | None = None  # (B)
        self._seen: Tensor | None = None  # (B, T), the tokens so far, at most a whole context; shorter rows are right-padded
        self._cached = 0  # tokens in the cache
        # Recorded steps keep the position on the device, so they would not update a token count that a model keeps on the host.
        # Built-in models keep no such count, but a custom model may, even if it is a subclass of a built-in one.
        takes_positions = isinstance(model, OURS) and type(model).__module__.startswith("ingot.")
        cached, device = use_cache and in_parts(model) and hasattr(model, "new_cache"), next(model.parameters()).device
        if lengths is not None:
            self._lengths = torch.tensor(lengths, device=device)
            cached = cached and takes_positions and max(lengths) <= self._context
        self._cache: list[Any] | None = model.new_cache(rows) if cached else None
        self._step: Step | None = None
        # Do not record under autocast, which casts the weights at every use.
        record = record and takes_positions and device.type in RECORDS_ON and not torch.is_autocast_enabled(device.type)
        if self._cache is not None and (record or lengths is not None):
            self._step = Step(model, self._cache, record, positions=1 if lengths is None else rows)

    def read(self, new: Tensor) -> Tensor:
        """Append (B, T) new tokens to the rows and return the logits (B, V) of each row's next token."""
        if self._seen is None:
            self._seen = new
        elif self._lengths is None:
            self._seen = torch.cat([self._seen, new], dim=1)
        else:
            self._seen = F.pad(self._seen, (0, 1)).scatter(1, self._lengths[:, None], new)
            self._lengths = self._lengths + 1
        if self._context < self._seen.size(1):
            context = int(self._context)
            if self._lengths is None:
                self._seen = self._seen[:, -context:]
            else:
                index = (self._lengths - context).clamp(min=0)[:, None] + torch.arange(context, device=new.device)
                self._seen = self._seen.gather(1, index.clamp(max=self._seen.size(1) - 1))
                self._lengths = self._lengths.clamp(max=context)
        if self._cache is not None and self._cached + new.size(1) > self._context:
            if self._keep_half:
                new = self._seen[:, -max(1, int(self._context) // 2) :] if self._cached else self._seen
                if self._step is not None:
                    for layer in self._cache:
                        layer.length = 0  # reuse the buffers, because the recorded graph refers to them
                else:
                    self._cache = self._model.new_cache(len(new))
                self._cached = 0
            else:  # from now on each new token shifts the positions of all others
                self._cache = None
        if self._cache is None:
            return last_logits(self._model, self._seen, None, self._lengths)
        cached, self._cached = self._cached, self._cached + new.size(1)
        if self._step is not None and new.size(1) == 1:
            return self._step.read(new, cached, None if self._lengths is None else self._lengths - 1)
        return last_logits(self._model, new, self._cache, self._lengths)


class Step:
    """A single-token decoding step whose position is stored on the device, so that a CUDA graph can replay it in one launch.

    In a small model, launching the kernels one by one takes longer than running them.
    """

    def __init__(self, model: nn.Module, cache: list[Any], record: bool = True, positions: int = 1):
        self._model, self._cache, self._records = model, cache, record
        keys = cache[0].keys
        self._tokens = torch.zeros(keys.size(0), 1, dtype=torch.long, device=keys.device)
        self._position = torch.zeros(positions, 1, dtype=torch.long, device=keys.device)  # one for all rows, or one per row
        self._graph: torch.cuda.CUDAGraph | None = None
        self._recorded: Tensor | None = None  # the cache buffer that the recorded graph writes to
        self._scores = torch.empty(0)

    def read(self, new: Tensor, cached: int, positions: Tensor | None = None) -> Tensor:
        """Append a token to each row, at index `cached` or at the row's entry in `positions`; return the next logits (B, V)."""
        for layer in self._cache:
            layer.reserve(max(cached + 1, min(STEP_CAPACITY, layer.capacity)))
            layer.length = cached + 1
        self._tokens.copy_(new)
        self._position.fill_(cached) if positions is None else self._position.copy_(positions[:, None])
        if not (self._records and new.is_cuda):
            return self._compute()
        with torch.cuda.device(new.device):
            if self._recorded is not self._cache[0].keys:
                self._record()
            assert self._graph is not None
            self._graph.replay()
        return self._scores

    def _compute(self) -> Tensor:
        for layer in self._cache:
            layer.position = self._position
        try:
            return last_logits(self._model, self._tokens, self._cache)
        finally:
            for layer in self._cache:
                layer.position = None

    def _record(self) -> None:
        """Record the step as a CUDA graph after two warm-up runs; the first replay overwrites the cache entries they wrote."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._compute()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of the process may use the GPU while this one captures.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._scores = self._compute()
        self._recorded = self._cache[0].keys


DRAWS_AT_ONCE = 64  # number of random numbers per row that are copied to the device at once


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
    """Yield the next token of every row of `prompts` (B, T), indefinitely; only ids below `vocab_size` are sampled.

    Reader explains `keep_half` and `record`. With `lengths`, row i has lengths[i] tokens and is right-padded to T.
    """
    draws = uniform_draws(sampling.row_seeds(prompts.size(0)), prompts.device)
    training = model.training
    model.eval()
    try:
        ragged = lengths if lengths is not None and len(set(lengths)) > 1 else None
        reader = Reader(model, prompts.size(0), ragged, sampling.use_cache, keep_half, record)
        tokens, written = prompts, None
        while True:
            logits = reader.read(tokens).float()  # (B, V)
            if not logits.isfinite().all():
                raise RunError("the logits are not finite, so generation stops: the weights are damaged or training diverged")
            if vocab_size is not None:
                logits[:, vocab_size:] = -math.inf
            if sampling.repetition_penalty != 1:
                written = torch.zeros_like(logits, dtype=torch.bool) if written is None else written.scatter(1, tokens, True)
                penalty = sampling.repetition_penalty
                logits = torch.where(written, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
            tokens = logits.argmax(-1, keepdim=True) if sampling.greedy else choose(logits, sampling, next(draws))
            yield tokens.squeeze(1)
    finally:
        model.train(training)


def uniform_draws(seeds: Sequence[int], device: torch.device) -> Iterator[Tensor]:
    """Yield uniform random numbers (B, 1) indefinitely; each row has its own generator on the host."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    while True:
        block = torch.stack([torch.rand(DRAWS_AT_ONCE, generator=generator) for generator in generators], dim=1)
        yield from block.to(device).unsqueeze(-1).unbind()


def choose(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """Sample a token (B, 1) per row: the first whose cumulative probability exceeds `uniform` (B, 1)."""
    logits = (logits - logits.max(dim=-1, keepdim=True).values) / sampling.temperature  # avoids overflow at low temperatures
    ids: Tensor | None = None
    if 0 < sampling.top_k < logits.size(-1):
        logits, ids = logits.topk(sampling.top_k)
    elif sampling.top_p < 1:
        logits, ids = logits.sort(descending=True)
    p = logits.softmax(-1)
    if sampling.top_p < 1:
        p = p.masked_fill(p.cumsum(-1) - p >= max(sampling.top_p, 1e-9), 0.0)  # drop a token if likelier ones add up to top_p
    sums = p.cumsum(-1)
    token = torch.searchsorted(sums, uniform * sums[:, -1:], right=True).clamp(max=p.size(-1) - 1)
    # Rounding in the cumulative sum could select a token of probability 0.
    token = torch.where(p.gather(-1, token) > 0, token, p.argmax(-1, keepdim=True))
    return token if ids is None else ids.gather(-1, token)


TEXTS_AT_ONCE = 64  # maximum number of completions that are generated in one batch
REPORT_EVERY = 16  # number of tokens per completion between two progress reports


def write_texts(
    model: nn.Module,
    prompt: Sequence[int],
    texts: int,
    tokens: int,
    sampling: Sampling,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **options: Any,
) -> Iterator[list[int]]:
    """Yield `texts` completions of a prompt, each a list of `tokens` ids.

    Completion i uses seed + i, so it does not depend on the other completions. `options` are passed to `generate`.
    """
    start = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    for first in range(0, texts, TEXTS_AT_ONCE):
        rows = min(TEXTS_AT_ONCE, texts - first)
        written: list[Tensor] = []
        seeded = replace(sampling, seed=sampling.seed + first)
        with closing(generate(model, start.expand(rows, -1), seeded, **options)) as stream:
            for token in islice(stream, tokens):
                written.append(token)
                if len(written) % REPORT_EVERY == 0:
                    progress(first * tokens + rows * len(written), texts * tokens)
        progress((first + rows) * tokens, texts * tokens)
        yield from torch.stack(written, dim=1).tolist() if written else [[] for _ in range(rows)]


POSITIONS_AT_ONCE = 4096  # maximum number of positions whose logits are in memory at the same time


@torch.no_grad()
def score_rows(
    model: nn.Module, rows: Sequence[Sequence[int]], firsts: Sequence[int], top: int, vocab_size: int
) -> list[RowScores]:
    """Score each row's tokens from its position in `firsts` (>= 1) on; also return the `top` likeliest tokens per position."""
    lengths = [len(row) for row in rows]
    positions = [(row, position) for row, first in enumerate(firsts) for position in range(first, lengths[row])]
    if not positions:
        none = np.empty((0, top), np.float32)
        return [RowScores(first, none[:, 0], none.astype(np.int64), none) for first in firsts]
    device = next(model.parameters()).device
    tokens = torch.tensor([[*row, *[0] * (max(lengths) - len(row))] for row in rows], device=device)
    inputs = tokens[:, :-1].contiguous()
    states = model.hidden(inputs) if in_parts(model) else model(inputs)  # type: ignore[operator]
    chosen, best_ids, best = [], [], []
    for part in torch.tensor(positions, device=device).split(POSITIONS_AT_ONCE):  # type: ignore[no-untyped-call]
        row, position = part.unbind(1)
        logits = states[row, position - 1]
        if in_parts(model):
            logits = model.logits(logits)  # type: ignore[operator]
        scores = logits.float().log_softmax(-1)  # (N, V)
        chosen.append(scores.gather(1, tokens[row, position, None])[:, 0].cpu())
        likeliest = scores[:, :vocab_size].topk(min(top, vocab_size))
        best_ids.append(likeliest.indices.cpu())
        best.append(likeliest.values.cpu())
    counts = [max(0, length - first) for length, first in zip(lengths, firsts, strict=True)]
    arrays = [torch.cat(parts).split(counts) for parts in (chosen, best_ids, best)]  # type: ignore[no-untyped-call]
    return [RowScores(first, *(part.numpy() for part in parts)) for first, *parts in zip(firsts, *arrays, strict=True)]
