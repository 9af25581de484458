"""The module that a step calls: compiled if asked, replicated if there are ranks to share with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ingot.backends.torch.tune import SHORT, name_operations
from ingot.config.schema import Config
from ingot.config.size import model_size
from ingot.errors import ConfigError, Setting
from ingot.runtime.ranks import Ranks

# A model compiled as a whole, or in parts: its blocks, which share their graphs, and its loss, but not what lies between.


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


# Passes that are recorded once and replayed as CUDA graphs: when, and what is done with the memory that they share.

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
