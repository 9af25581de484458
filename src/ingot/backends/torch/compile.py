"""The module that a training step calls: compiled, recorded as CUDA graphs, and replicated over ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ingot.backends.torch.tune import SHORT_STEP_TOKENS, tag_compiler_cache
from ingot.config.memory import model_size
from ingot.config.schema import Config, TrainingSection
from ingot.errors import ConfigError, Setting
from ingot.runtime.ranks import Ranks


def compiled_whole(model: nn.Module, cuda_graphs: bool = False) -> nn.Module:
    """Compile a model as one graph per input shape; `cuda_graphs`: record passes and launch each as one."""
    graph: Any = torch.compile(model, dynamic=False, options={"triton.cudagraphs": True} if cuda_graphs else None)
    if callable(make_ready := getattr(model, "make_ready", None)):  # computes what a graph should not, such as masks
        graph.register_forward_pre_hook(lambda _, inputs: make_ready(inputs[0]))
    return graph  # type: ignore[no-any-return]


class CompiledBlocks(nn.Module):
    """A model whose blocks and loss are compiled while it is called through this wrapper; blocks share their graphs."""

    def __init__(self, model: nn.Module):
        super().__init__()
        if not isinstance(getattr(model, "blocks", None), nn.ModuleList):
            raise ConfigError(
                "{0} needs a model with `blocks`, a ModuleList of its repeated part", Setting("training.compile", "blocks")
            )
        self.model, self.on = model, False
        for block in model.blocks:  # type: ignore[union-attr]
            # A recomputed block is one graph: its parts would be recomputed after the call, when `on` is False.
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


GRAPHS_PER_STAGE = 8  # torch's own limit for a function


def compiles(t: TrainingSection, family: str, on_cuda: bool) -> bool:
    """Return True if the model is compiled: as set, otherwise on CUDA; in deterministic mode only if that works."""
    if not (on_cuda and t.deterministic) or family == "gpt2":
        return on_cuda if t.compile == "auto" else bool(t.compile)
    if t.compile in (True, "blocks") and family != "file":
        # torch 2.11 then expects other strides of flash attention's gradients than it gets.
        raise ConfigError(
            f"{{0}} cannot be combined with a compiled {family} model; leave {{1}} out",
            Setting("training.deterministic"),
            Setting("training.compile"),
        )
    return t.compile in (True, "blocks")


def compiles_optimizer(t: TrainingSection, family: str, muon_beta2: float | None, on_cuda: bool) -> bool:
    """Return True if Muon's step is compiled: as set, or for NorMuon, which reads and writes all matrices a dozen times."""
    if t.compile_optimizer == "auto":  # plain Muon takes 0.6% of a golf step
        return on_cuda and compiles(t, family, on_cuda) and muon_beta2 is not None
    return on_cuda and t.compile_optimizer  # a CPU gains nothing


def compiled(
    model: nn.Module, nested: bool, stages: int, python_reducer: bool = False, blocks: bool = False, cuda_graphs: bool = False
) -> nn.Module:
    """Compile a model, again for every shape; `nested`: parts of it are graphs themselves; `blocks`: compile only these.

    `cuda_graphs`: each pass is recorded once and replayed.
    """
    tag_compiler_cache()
    # DDP splits the graph at its buckets, to send one while the next is computed; nested graphs (masked attention, recomputed
    # blocks) do not survive that. Its reducer in Python needs no split: the graph of the backward pass includes the sending.
    torch._dynamo.config.optimize_ddp = "python_reducer" if python_reducer else not nested
    # One graph for all shapes would be slower than a graph for each; past its limit dynamo compiles no more of them.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS_PER_STAGE * stages)
    return CompiledBlocks(model) if blocks else compiled_whole(model, cuda_graphs)


def replicated(module: nn.Module, ranks: Ranks, device: torch.device, some_unused: bool) -> nn.Module:
    """Average a module's gradients over the ranks; `some_unused`: a step may not use every parameter."""
    if ranks.world_size == 1:
        return module
    return DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=some_unused,
    )


def compiled_backward(used: bool) -> contextlib.AbstractContextManager[Any]:
    """Compile backward passes with the communication of DDP's reducer in Python, where that is used."""
    if not used:
        return contextlib.nullcontext()
    from torch._dynamo import compiled_autograd

    return compiled_autograd._enable(torch.compile)  # type: ignore[no-untyped-call]


MAX_RECORDED_WEIGHTS = 200_000_000  # `auto` records no larger models: they do not wait for launches, and need the memory


def uses_cuda_graphs(config: Config, vocab_size: int, compiles: bool, on_cuda: bool, ranks: Ranks) -> bool:
    """Return True if passes are recorded as CUDA graphs: on CUDA, as set; `auto`: if steps are short and all alike."""
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


def begin_pass(parameters: Iterable[nn.Parameter]) -> None:
    """Begin a pass: copy these parameters' gradients out of the recording's memory, which the new pass overwrites."""
    for p in parameters:
        if p.grad is not None:
            p.grad = p.grad.clone()
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
