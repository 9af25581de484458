"""From a name or a file to a module.

A model is any `nn.Module` whose `forward(tokens)` returns logits (B, T, V) and whose `forward(tokens, targets)` returns the mean
loss over the targets that are not -1. What else it offers is used where present: `blocks` (for Muon and gradient checkpointing),
`control` (parts of the names of parameters that are not matrices to Muon), `context`, `loss_chunk`, a third argument `documents`
of forward (for document masking), `set` (for the numbers of a stage), `windowed` (its attention is masked), `make_ready` (called
with the tokens before a compiled pass, for what its graph need not make), and `new_cache` with `hidden` and `logits` (for cached
generation).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ingot.model.frontier import Frontier
from ingot.model.golf import Golf
from ingot.model.gpt2 import GPT2
from ingot.model.llama import Llama
from ingot.model.own import build_own

FAMILIES: dict[str, Any] = {"gpt2": GPT2, "llama": Llama, "golf": Golf, "frontier": Frontier}
OURS: tuple[Any, ...] = tuple(FAMILIES.values())


def build(settings: Mapping[str, Any]) -> nn.Module:
    """The model that a `model` section describes; ValueError says what is wrong with a file of one's own."""
    if settings["family"] == "file":
        return build_own(settings)
    return FAMILIES[settings["family"]](**{name: value for name, value in settings.items() if name != "family"})
