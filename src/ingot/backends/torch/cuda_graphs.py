"""Passes that are recorded once and replayed as CUDA graphs: when, and what is done with the memory that they share."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ingot.backends.torch.kernels import SHORT
from ingot.config.schema import Config
from ingot.config.size import model_size
from ingot.errors import ConfigError, Setting
from ingot.runtime.ranks import Ranks

LARGEST = 200_000_000  # weights of a model that `auto` records: larger ones wait for no launch, and miss the memory


def uses_cuda_graphs(config: Config, vocab_size: int, compiles: bool, on_cuda: bool, ranks: Ranks) -> bool:
    """Whether passes are CUDA graphs: where that is asked for, on CUDA; by `auto` where steps are short and all alike."""
    t = config.training
    if not (t.cuda_graphs and on_cuda):
        return False
    if t.cuda_graphs == "auto":
        whole = compiles and t.compile != "blocks" and ranks.world_size == 1 and not t.deterministic
        size = model_size(config, vocab_size)  # None: of a model of one's own, of which nothing is known
        short = size is not None and size.total <= LARGEST and t.tokens_per_step <= SHORT
        return whole and short and not (config.data.document_mask or t.stages)
    if not compiles or t.compile == "blocks":
        raise ConfigError("{0} needs a model that is compiled as a whole", Setting("training.cuda_graphs"))
    if ranks.world_size > 1:
        raise ConfigError("{0} is for one GPU; the run has more ranks", Setting("training.cuda_graphs"))
    return True


def begin_pass(parameters: Iterable[nn.Parameter]) -> None:
    """Before a pass: gradients of these, left by the pass before, are copied out of memory that this one writes over."""
    for p in parameters:
        if p.grad is not None:
            p.grad = p.grad.clone()
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
