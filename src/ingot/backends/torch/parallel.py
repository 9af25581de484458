"""The module that a step calls: compiled if asked, replicated if there are ranks to share with."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ingot.backends.torch.kernels import name_operations
from ingot.backends.torch.regions import CompiledBlocks, compiled_whole
from ingot.config.schema import Config
from ingot.errors import ConfigError, Setting
from ingot.runtime.ranks import Ranks

GRAPHS_PER_STAGE = 8  # as many as torch allows a run of one stage


def compiles(config: Config, on_cuda: bool) -> bool:
    """Whether the model is compiled: as asked, else on CUDA; in deterministic mode there only where that was seen to work."""
    t, family = config.training, config.model.family
    if not (on_cuda and t.deterministic) or family == "gpt2":
        return on_cuda if t.compile == "auto" else bool(t.compile)
    if t.compile in (True, "blocks") and family != "file":
        # torch 2.11 then expects other strides of flash attention's gradients than it gets.
        raise ConfigError(
            f"{{0}} does not go together with a compiled {family} model; leave {{1}} out",
            Setting("training.deterministic"),
            Setting("training.compile"),
        )
    return t.compile in (True, "blocks")


def compiles_optimizer(config: Config, on_cuda: bool) -> bool:
    """Whether Muon's step is compiled: as asked, else NorMuon's, which reads and writes all matrices a dozen times."""
    asked = config.training.compile_optimizer
    if asked == "auto":  # plain Muon takes 0.6% of a golf step
        return on_cuda and compiles(config, on_cuda) and config.optimizer.muon_beta2 is not None
    return on_cuda and asked  # a CPU gains nothing


def compiled(
    model: nn.Module, nested: bool, stages: int, python_reducer: bool = False, blocks: bool = False, cuda_graphs: bool = False
) -> nn.Module:
    """A model compiled, for every shape anew; `nested` where parts of it are graphs themselves; with `blocks`, these alone.

    `cuda_graphs`: each pass is recorded once and replayed.
    """
    name_operations()
    # DDP splits the graph at its buckets, to send one while the next is computed; parts that are graphs themselves
    # (masked attention, recomputed blocks) do not survive it. Its reducer in Python needs no split: the graph of the backward
    # pass has the sending in it.
    torch._dynamo.config.optimize_ddp = "python_reducer" if python_reducer else not nested
    # One graph for all shapes would be slower than a graph for each; past its limit dynamo would compile no more of them.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS_PER_STAGE * stages)
    return CompiledBlocks(model) if blocks else compiled_whole(model, cuda_graphs)


def replicated(module: nn.Module, ranks: Ranks, device: torch.device, some_unused: bool) -> nn.Module:
    """A module whose gradients are averaged over the ranks; `some_unused` where a step may leave parameters out."""
    if ranks.world_size == 1:
        return module
    return DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=some_unused,
    )


def compiled_backward(used: bool) -> contextlib.AbstractContextManager[Any]:
    """Backward passes as one graph, with what the reducer in Python sends in between; as they are where it is not used."""
    if not used:
        return contextlib.nullcontext()
    from torch._dynamo import compiled_autograd

    return compiled_autograd._enable(torch.compile)  # type: ignore[no-untyped-call]


def without_sync(module: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Gradients stay on their rank: those of a micro-batch that is not the last."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) else contextlib.nullcontext()
