"""Several texts side by side, after one prompt or each after its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ingot.errors import RunError
from ingot.generate.sampling import Sampling
from ingot.generate.torch.decode import generate

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
