"""A model compiled as a whole, or in parts: its blocks, which share their graphs, and its loss, but not what lies between.

A whole model is traced and compiled layer by layer; of equal blocks the first is compiled and the others reuse it. The compiler
then sees no further than a block, or than one of the methods that the block names as its `compiled_parts`: those that rows do
not matter to are compiled once for all row lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ingot.errors import ConfigError, Setting


def compiled_whole(model: nn.Module, cuda_graphs: bool = False) -> nn.Module:
    """A model as one graph for every shape of its inputs; `cuda_graphs`: passes are recorded and launched as one."""
    graph: Any = torch.compile(model, dynamic=False, options={"triton.cudagraphs": True} if cuda_graphs else None)
    return MadeReady(graph, model.make_ready) if callable(getattr(model, "make_ready", None)) else graph  # type: ignore[arg-type]


class MadeReady(nn.Module):
    """A compiled model that is given what its passes have in common, such as masks, before each: its graph does not make them."""

    def __init__(self, compiled: nn.Module, make_ready: Callable[[Tensor], None]):
        super().__init__()
        self.compiled, self._make_ready = compiled, make_ready

    def forward(self, *inputs: Tensor) -> Any:
        self._make_ready(inputs[0])
        return self.compiled(*inputs)


class CompiledBlocks(nn.Module):
    """A model whose parts are compiled while it is called by this name; called by its own it is not."""

    def __init__(self, model: nn.Module):
        super().__init__()
        if not isinstance(getattr(model, "blocks", None), nn.ModuleList):
            raise ConfigError(
                "{0} needs a model with `blocks`, a ModuleList of its repeated part", Setting("training.compile", "blocks")
            )
        self.model, self.on = model, False
        for block in model.blocks:  # type: ignore[union-attr]
            # One that is recomputed is a graph as a whole: its parts would be computed again after the call, when this is off.
            parts = ("forward",) if "forward" in vars(block) else getattr(block, "compiled_parts", ("forward",))
            for name in parts:
                setattr(block, name, self._switched(getattr(block, name)))
        if callable(loss := getattr(model, "head_loss", None)):
            model.head_loss = self._switched(loss)  # type: ignore[assignment]

    def _switched(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        compiled = torch.compile(plain, dynamic=False)
        return lambda *args, **kwargs: (compiled if self.on else plain)(*args, **kwargs)

    def forward(self, *inputs: Tensor) -> Any:
        self.on = True
        try:
            return self.model(*inputs)
        finally:
            self.on = False
