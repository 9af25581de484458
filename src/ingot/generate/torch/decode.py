"""One token after another, with a key-value cache where the model has one.

What a row draws depends on its own seed alone: neither on the rows beside it nor on the device, whose arithmetic decides only
where two tokens are about equally likely.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

import torch
from torch import Tensor, nn

from ingot.errors import RunError
from ingot.generate.sampling import Sampling
from ingot.generate.torch.ragged import RaggedReader
from ingot.generate.torch.reading import Reader

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
