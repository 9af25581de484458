"""Compile the module that a training step calls, and record it as CUDA graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ingot.backends.torch.tune import SHORT_STEP_TOKENS, tag_compiler_cache
from ingot.config.memory import model_size
from ingot.config.schema import Config, TrainingSection
from ingot.errors import ConfigError, Setting
from ingot.runtime.ranks import Ranks


class CompiledBlocks(nn.Module):
    """A wrapper that runs a model with compiled blocks and a compiled loss; blocks of equal structure share their graphs."""

    def __init__(self, model: nn.Module, backend: Any = None):
        super().__init__()
        if not isinstance(getattr(model, "blocks", None), nn.ModuleList):
            raise ConfigError(
                "{0} needs a model with `blocks`, a ModuleList of its layers", Setting("training.compile", "blocks")
            )
        self.model, self.on, self.options = model, False, {} if backend is None else {"backend": backend}
        for block in model.blocks:  # type: ignore[union-attr]
            # A checkpointed block is one graph, because the backward pass recomputes the block after `on` has been set to False.
            parts = ("forward",) if "forward" in vars(block) else getattr(block, "compiled_parts", ("forward",))
            for name in parts:
                setattr(block, name, self._switched(getattr(block, name)))
        if callable(loss := getattr(model, "head_loss", None)):
            model.head_loss = self._switched(loss)  # type: ignore[assignment]

    def _switched(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        compiled = torch.compile(plain, dynamic=False, **self.options)
        return lambda *args, **kwargs: (compiled if self.on else plain)(*args, **kwargs)

    def forward(self, *inputs: Tensor) -> Any:
        self.on = True
        try:
            return self.model(*inputs)
        finally:
            self.on = False


GRAPHS_PER_STAGE = 8  # maximum number of graphs of a function per stage; torch's default allows this many in a whole run


def compiles(t: TrainingSection, family: str, on_cuda: bool) -> bool:
    """Return True if the model should be compiled; `auto` compiles on CUDA unless deterministic mode prevents it."""
    if not (on_cuda and t.deterministic) or family == "gpt2":
        return on_cuda if t.compile == "auto" else bool(t.compile)
    if t.compile in (True, "blocks") and family != "file":
        # In a compiled model in deterministic mode, torch 2.11 assumes wrong strides for the gradients of flash attention.
        raise ConfigError(
            f"{{0}} cannot be combined with a compiled {family} model; leave {{1}} out",
            Setting("training.deterministic"),
            Setting("training.compile"),
        )
    return t.compile in (True, "blocks")


def compiles_optimizer(t: TrainingSection, family: str, muon_beta2: float | None, on_cuda: bool) -> bool:
    """Return True if Muon's step should be compiled; `auto` compiles only NorMuon's, which has many elementwise operations."""
    if t.compile_optimizer == "auto":  # plain Muon takes only 0.6% of a training step of golf's model
        return on_cuda and compiles(t, family, on_cuda) and muon_beta2 is not None
    return on_cuda and t.compile_optimizer  # compiling gains nothing on a CPU


def compiled(
    model: nn.Module,
    nested: bool,
    stages: int,
    python_reducer: bool = False,
    blocks: bool = False,
    cuda_graphs: bool = False,
    backend: Any = None,
) -> nn.Module:
    """Compile a model, or only its blocks and loss if `blocks` is set, with one graph per input shape.

    Set `nested` if the graph has subgraphs (masked attention, checkpointed blocks), and `cuda_graphs` to record CUDA graphs.
    """
    tag_compiler_cache()
    # DDPOptimizer, which splits graphs to overlap communication, fails on nested graphs (masked attention, checkpointed blocks).
    # DDP's Python reducer needs no split, because all-reduce is part of its graph.
    torch._dynamo.config.optimize_ddp = "python_reducer" if python_reducer else not nested
    # Static shapes are faster than one dynamic graph, but need a graph per shape, so each stage raises dynamo's recompile limit.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS_PER_STAGE * stages)
    if blocks:
        return CompiledBlocks(model, backend)
    options: Any = {"triton.cudagraphs": True} if cuda_graphs else None
    graph: Any = torch.compile(model, dynamic=False, options=options, **({} if backend is None else {"backend": backend}))
    if callable(make_ready := getattr(model, "make_ready", None)):  # computes masks before the graph runs
        graph.register_forward_pre_hook(lambda _, inputs: make_ready(inputs[0]))
    return graph  # type: ignore[no-any-return]


def compiled_backward(used: bool) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which, if `used`, compiled autograd also compiles the all-reduces of DDP's Python reducer."""
    if not used:
        return contextlib.nullcontext()
    from torch._dynamo import compiled_autograd

    return compiled_autograd._enable(torch.compile)  # type: ignore[no-untyped-call]


MAX_RECORDED_WEIGHTS = 200_000_000  # `auto` records no CUDA graphs of larger models: kernel launches do not limit their speed


def uses_cuda_graphs(config: Config, vocab_size: int, compiles: bool, on_cuda: bool, ranks: Ranks) -> bool:
    """Return True if passes should be recorded as CUDA graphs; `auto` records short steps of constant shape."""
    t = config.training
    if not (t.cuda_graphs and on_cuda):
        return False
    if t.cuda_graphs == "auto":
        whole = compiles and t.compile != "blocks" and ranks.world_size == 1 and not t.deterministic
        size = model_size(config, vocab_size)  # None for a custom model, whose size is unknown
        short = size is not None and size.total <= MAX_RECORDED_WEIGHTS and t.tokens_per_step <= SHORT_STEP_TOKENS
        return whole and short and not (config.data.document_mask or t.stages)
    if not compiles or t.compile == "blocks":
        raise ConfigError("{0} needs a model that is compiled as a whole", Setting("training.cuda_graphs"))
    if ranks.world_size > 1:
        raise ConfigError("{0} works on one GPU only, but the run has several ranks", Setting("training.cuda_graphs"))
    return True


def begin_pass(parameters: Iterable[Tensor]) -> None:
    """Copy the gradients of `parameters` out of the CUDA graph's memory, then begin a pass, which may overwrite that memory."""
    for p in parameters:
        if p.grad is not None:
            p.grad = p.grad.clone()
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
