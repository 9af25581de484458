"""One token after another, with a key-value cache where the model has one.

Beyond the context, positions shift with every token, so a cache of learned positions is worth nothing: there the last `context`
tokens are computed anew each time, exactly as without a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ingot.errors import RunError


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. temperature 0 is greedy; top_k 0 and top_p 1 leave all tokens in."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1337


@torch.no_grad()
def generate(
    model: nn.Module, prompts: Tensor, sampling: Sampling, vocab_size: int | None = None, use_cache: bool = True
) -> Iterator[Tensor]:
    """Yield the next token of every row of `prompts` (B, T), for ever; only ids below `vocab_size` are drawn."""
    generator = torch.Generator(device="cpu").manual_seed(sampling.seed)
    training = model.training
    model.eval()
    try:
        next_logits = _stepper(model, prompts, use_cache)
        tokens = prompts
        while True:
            logits = next_logits(tokens).float()  # (B, V)
            if not logits.isfinite().all():
                raise RunError("the model's scores are not finite, so it cannot write: its weights are damaged or diverged")
            if vocab_size is not None:
                logits[:, vocab_size:] = -math.inf
            tokens = draw(logits, sampling, generator)  # (B, 1)
            yield tokens.squeeze(1)
    finally:
        model.train(training)


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """One token per row of (B, V) logits, as (B, 1)."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = (logits - logits.max(dim=-1, keepdim=True).values) / sampling.temperature  # none overflows, however cold
    if 0 < sampling.top_k < logits.size(-1):
        kth = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    if sampling.top_p < 1:
        ordered, places = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # the likelier tokens' share
        ordered = ordered.masked_fill(before >= max(sampling.top_p, 1e-9), -math.inf)
        logits = torch.full_like(logits, -math.inf).scatter(-1, places, ordered)
    # Drawn on the host: a seed then gives one text on every device.
    choice = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator)
    return choice.to(logits.device)


def _stepper(model: nn.Module, prompts: Tensor, use_cache: bool) -> Callable[[Tensor], Tensor]:
    """A function from the tokens that are new to the logits behind them."""
    context = getattr(model, "context", None)
    cached = use_cache and all(hasattr(model, name) for name in ("new_cache", "hidden", "logits"))
    cache = model.new_cache(prompts.size(0)) if cached and prompts.size(1) <= (context or math.inf) else None  # type: ignore[operator]
    seen = prompts[:, :0]

    def next_logits(new: Tensor) -> Tensor:
        nonlocal seen, cache
        seen = torch.cat([seen, new], dim=1)
        if cache is not None and (context is None or seen.size(1) <= context):
            return model.logits(model.hidden(new, cache)[:, -1])  # type: ignore[operator]
        cache = None
        window = seen if context is None else seen[:, -context:]
        return model(window)[:, -1]

    return next_logits
