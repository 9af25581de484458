"""Simulate a training step on fake tensors, which have shapes but no memory, and count the bytes that a GPU would hold.

The step is the real one: the config's model, compiled by the same compiler front end and partitioner, with its optimizers. Only
Inductor's last stage is replaced: instead of kernels, a compiled graph becomes a list of allocations, without the tensors that
Inductor would fuse into their consumers. Fake tensors have device type `cpu`, because torch builds without CUDA cannot
differentiate tensors of type `cuda`.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import destroy_process_group, init_process_group
from torch.fx import GraphModule, Node
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ingot.backends.base import StepMemory
from ingot.backends.torch import tune
from ingot.backends.torch.build import build_outline, checkpoint_blocks, fill_outline, flops_per_token
from ingot.backends.torch.compile import compiled, compiles, uses_cuda_graphs
from ingot.backends.torch.parallel import Parallel
from ingot.backends.torch.state import WeightAverage
from ingot.config.memory import FLOAT
from ingot.config.schema import Config
from ingot.model import chunked_loss, loss
from ingot.model.cross_entropy import loss_and_grad
from ingot.optim.groups import make_optimizers
from ingot.runtime.ranks import Ranks

CPU = torch.device("cpu")
TOKENS_PER_DOCUMENT = 256  # assumed for data.document_mask; only the size of the list of document starts depends on it


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that counts the bytes of all live tensors by category, such as weights, and keeps the counts at the peak."""

    def __init__(self, logits: set[tuple[int, int]]):
        super().__init__()  # type: ignore[no-untyped-call]
        self.part, self.live, self.peak = "workspace", Counter[str](), Counter[str]()
        self.sent = 0  # bytes sent in collectives
        self._logits, self._held = logits, dict[int, tuple[str, int]]()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, so that compiled functions also run compiled in this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            largest = max(x.nbytes for x in tree_leaves(args) if isinstance(x, Tensor))
            self.sent += largest * (2 if "allreduce" in str(func) else 1)
        for t in tree_leaves(result):
            if isinstance(t, Tensor):
                self.hold(getattr(t, "_local_tensor", t))
        return result

    def hold(self, t: Tensor, part: str | None = None) -> None:
        """Count a tensor as `part`; by default, a new tensor counts as logits if it has their shape, else as `self.part`."""
        storage = t.untyped_storage()
        if part is None and storage._cdata not in self._held:
            part = "logits" if t.dim() > 1 and (t.numel() // t.size(-1), t.size(-1)) in self._logits else self.part
        if part is not None:
            self._count(storage, part)

    def _count(self, storage: torch.UntypedStorage, part: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._held:
            before, old = self._held[key]
            self.live[before] -= old
        else:
            weakref.finalize(storage, self._release, key)
        self._held[key] = part, size
        self.live[part] += size
        if self.live.total() > self.peak.total():
            self.peak = self.live.copy()

    @contextlib.contextmanager
    def seeing_resizes(self) -> Iterator[None]:
        """Also count storages that are resized, as FSDP does to free and gather weights."""
        plain: Any = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = plain(storage, size)
            self._count(storage, self._held.get(storage._cdata, ("workspace", 0))[0])
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]

    def _release(self, key: int) -> None:
        part, size = self._held.pop(key)
        self.live[part] -= size


# The allocations of a compiled graph.

FUSED = {
    "_to_copy", "arange", "cat", "constant_pad_nd", "convert_element_type", "embedding", "empty", "expand", "full", "full_like",
    "gather", "index", "iota", "lift_fresh_copy", "rand", "scalar_tensor", "scatter", "slice", "slice_scatter", "where",
}  # fmt: skip
REDUCTIONS = {"amax", "amin", "any", "mean", "sum", "var_mean"}  # fused with their inputs, but their results are stored


def _kind(node: Node) -> str:
    """Return how Inductor treats a node: `fused`, `reduction`, or `kernel` for an operation that needs stored operands."""
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    if name in REDUCTIONS:
        return "reduction"
    pointwise = isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags
    return "fused" if pointwise or name in FUSED else "kernel"


def allocations(graph: GraphModule, live: LiveBytes, forward: bool) -> Callable[[list[Any]], list[Any]]:
    """Return a function with a compiled graph's inputs and outputs that only allocates and frees the tensors the graph would."""
    nodes = list(graph.graph.nodes)
    outputs = [node if isinstance(node, Node) else None for node in nodes[-1].args[0]]
    values = {node: node.meta["val"] for node in nodes if isinstance(node.meta.get("val"), Tensor)}
    root = {node: value.untyped_storage()._cdata for node, value in values.items()}  # views have the storage of their base
    results = {root[node] for node in outputs if node in root}
    inputs = [node for node in nodes if node.op == "placeholder"]
    steps: list[tuple[str, list[Node], set[int]]] = []  # per operation: its kind, the tensors it creates, the storages it reads
    known = {root[node] for node in inputs if node in root}
    stored = known | results
    for node in nodes[:-1]:
        if node.op != "call_function" or node.target is getitem:
            continue
        made = [part for part in (node, *node.users) if part in root and (part is node or part.target is getitem)]
        made = [part for part in made if root[part] not in known]
        known |= {root[part] for part in made}
        kind, read = _kind(node), {root[part] for part in node.all_input_nodes if part in root}
        steps.append((kind, made, read))
        if kind != "fused" and made:
            stored |= {root[part] for part in made} | (read if kind == "kernel" else set())
    sources: dict[int, set[int]] = {}  # maps the storage of a fused tensor to the stored inputs it is computed from
    last: dict[int, int] = {}  # index of the last operation that reads a storage
    for i, (_, made, read) in enumerate(steps):
        read = {origin for key in read for origin in sources.get(key, {key})}
        if fused := [root[part] for part in made if root[part] not in stored]:
            sources |= dict.fromkeys(fused, read)
        if len(fused) < len(made):
            last |= dict.fromkeys(read, i)
    ends = defaultdict(list)
    for key in last.keys() - results:
        ends[last[key]].append(key)
    program = [(kind, [part for part in made if root[part] in stored], ends[i]) for i, (kind, made, _) in enumerate(steps)]
    unread = {root[node] for node in inputs if node in root} - last.keys() - results

    @torch.no_grad()
    def run(args: list[Any]) -> list[Any]:
        part = live.part
        held = {root.get(node): value for node, value in zip(inputs, args, strict=True)}
        args.clear()  # the caller gives up its references, so that saved activations can be freed
        for key in unread:
            del held[key]
        for kind, made, ended in program:
            if kind == "fused":  # the result overwrites an operand that is no longer needed
                for key in ended:
                    del held[key]
            for node in made:
                value, key = values[node], root[node]
                live.part = "workspace" if key not in results else part if forward else "gradients"
                size = value.untyped_storage().nbytes() // value.element_size()
                held[key] = torch.empty(value.shape if size == value.numel() else size, dtype=value.dtype)
            if kind != "fused":
                for key in ended:
                    del held[key]
        live.part = part
        found = ((held[root[node]], values[node]) if node in root else None for node in outputs)
        return [pair and pair[0].as_strided(pair[1].shape, pair[1].stride(), pair[1].storage_offset()) for pair in found]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def compiler(live: LiveBytes) -> Any:
    """Return a backend for torch.compile whose graphs only allocate memory."""
    return aot_autograd(
        fw_compiler=lambda graph, _: allocations(graph, live, forward=True),
        bw_compiler=lambda graph, _: allocations(graph, live, forward=False),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table,
    )


def simulate_step(
    config: Config, vocab_size: int, world_size: int, parallel: str, micro_batch: int, every: int, missing: Collection[str] = ()
) -> StepMemory:
    """Simulate a step of one of `world_size` ranks on a GPU, in micro-batches of `micro_batch` rows.

    `parallel` is ddp or fsdp. Every `every`-th block is checkpointed (0: none). `missing`: kernels that the GPU does not support.
    """
    t, length, tokens = config.training, config.data.seq_len, micro_batch * config.data.seq_len
    passes = -(-config.rows_per_step // (world_size * micro_batch))
    ranks = Ranks(world_size=world_size)
    is_compiled = compiles(t, config.model.family, on_cuda=True)
    dtype = tune.DTYPES["bf16" if t.precision == "auto" else t.precision]
    outline = build_outline(config, vocab_size)
    parameters, flops, matmul_flops = (
        sum(p.numel() for p in outline.parameters()), flops_per_token(outline, length), flops_per_token(outline, 1)
    )  # fmt: skip
    head: Any = getattr(outline, "head", torch.empty(vocab_size, 0, device="meta")).shape
    others = {size for p in outline.parameters() if p.shape != head for size in p.shape}
    # If another matrix has as many rows as the head, logits cannot be recognised by their shape and count as activations.
    live = LiveBytes(set() if head[0] in others else {(rows, head[0]) for rows in (tokens, t.loss_chunk or tokens)})
    torch._dynamo.reset()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))  # outputs of `allocations` are views, which FSDP2 warns of
        placed = Parallel(parallel if world_size > 1 else "none", ranks, CPU, dtype if dtype == torch.bfloat16 else None)
        if world_size > 1:  # ranks of a fake process group, in which collectives return at once
            init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())  # type: ignore[no-untyped-call]
            stack.callback(destroy_process_group)
        if placed.sharded:  # before fake mode, in which sharding takes three times as long
            stack.enter_context(live.seeing_resizes())
            placed.shard(outline)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        model = outline.to_empty(device=CPU) if placed.sharded else fill_outline(outline, CPU)
        if placed.sharded:
            placed.note(model)
        on_graphs = uses_cuda_graphs(config, vocab_size, is_compiled, True, ranks)
        launch_bound = not on_graphs and passes * tokens <= tune.SHORT_STEP_TOKENS
        usable = dtype == torch.bfloat16
        tune.use_kernels(model, {*tune.kernels_to_try(t.kernels if usable else "off", launch_bound)} - {*missing})
        tune.use_form(model, "flash4")
        for module in model.modules():  # dropout in attention takes extra memory on a CPU, but not on a GPU
            if hasattr(module, "form") and hasattr(module, "dropout"):
                module.dropout = 0.0  # type: ignore[assignment]
        if every:
            checkpoint_blocks(model, every)
        step_module = model
        if is_compiled:
            nested, blocks = bool(every) or config.data.document_mask, t.compile == "blocks" or placed.sharded
            step_module = compiled(model, nested, 1, blocks=blocks, backend=compiler(live))
        # The chunked loss compiles its own graph, and the loss function for CPUs differs from that for GPUs.
        grad_of = torch.compile(loss_and_grad, dynamic=False, backend=compiler(live))
        for place, name, used in ((chunked_loss, "_compiled_grad", lambda: grad_of), (loss, "host_loss", lambda *_: None)):
            stack.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, used)
        inputs = [torch.zeros(micro_batch, length, dtype=torch.int64) for _ in range(2)]
        if config.data.document_mask:
            inputs.append(torch.zeros(tokens // TOKENS_PER_DOCUMENT, dtype=torch.int32))

        def run_pass() -> None:
            live.part, live.sent = "activations", 0
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                mean = step_module(*inputs)
            live.part = "workspace"
            mean.float().backward()

        if is_compiled:
            run_pass()  # compile before counting: tracing makes tensors, too
            model.zero_grad()
        stack.enter_context(live)
        for p in model.parameters():
            live.hold(placed.local(p), "weights")
            hook: Any = p.register_post_accumulate_grad_hook
            hook(lambda p: None if p.grad is None else live.hold(placed.local(p.grad), "gradients"))
            if world_size > 1 and not placed.sharded:  # DDP keeps its buckets, of which gradients are views
                p.grad = torch.zeros_like(p)
                live.hold(p.grad, "gradients")
        for x in (*inputs, *model.buffers()):
            live.hold(x, "workspace")
        live.part = "optimizer"
        muon = {"muon_precision": "bf16"} if config.optimizer.muon_precision == "auto" and dtype != torch.float32 else {}
        average = WeightAverage(model, placed.local) if config.optimizer.ema_decay is not None else None
        optimizers = make_optimizers(model, config.optimizer.model_copy(update=muon), CPU, False, placed.local, placed.exchange)
        for first in (True, False):  # the first step creates the optimizer state
            live.peak = Counter()
            for _ in range(min(2, passes)):  # from the second pass on, gradients of earlier passes exist
                run_pass()
            placed.collect()
            live.part = "optimizer" if first else "workspace"
            for optimizer in optimizers:
                optimizer.step()
            if average is not None:
                average.update(0.999, torch.zeros(()))
            model.zero_grad(set_to_none=world_size == 1 or placed.sharded)
            for weights in map(placed.local, model.parameters() if placed.sharded else ()):
                weights.grad = None
    sent = live.sent * passes if placed.sharded else 2 * FLOAT * parameters * (world_size > 1)
    return StepMemory(dict(live.peak), parameters, flops, matmul_flops, sent * (world_size - 1) // world_size, passes)
