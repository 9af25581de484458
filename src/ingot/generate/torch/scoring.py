"""The probabilities of tokens that are there already, of many rows in one pass.

Rows are filled up at their right end, which no token before it sees. The head is computed only for the places that are asked for,
and a part of them at a time: its scores of 50,000 words would be most of the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ingot.generate.scores import RowScores

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
