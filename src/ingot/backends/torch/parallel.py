"""Distribution of a model over ranks: replicas (DDP), shards (FSDP2), or replicas of shards (HSDP).

This is the only file that knows of sharding. FSDP2 turns each parameter into a DTensor, of which a rank holds some rows. The rest
of the backend works on these local tensors: optimizers, clipping, averaged weights and checkpoints. FSDP2 cannot shard
zero-dimensional parameters or parameters whose dtype is not float32 (golf's embedding), so each rank holds these whole, and their
gradients are averaged here. FSDP2 and DDP are imported only where they are used, because importing them takes two seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from ingot.config.memory import FULL, replica_bytes
from ingot.config.schema import Config
from ingot.errors import ConfigError, RunError, Setting
from ingot.optim.groups import has_custom_optimizers
from ingot.runtime.ranks import Ranks
from ingot.runtime.tensors import Part


def choose(config: Config, vocab_size: int, memory: int | None, ranks: Ranks) -> tuple[str, str]:
    """Return `none`, `ddp`, `fsdp` or `hsdp` and, if `auto` chose to shard the model, the reason: one device is too small."""
    requested = config.training.parallel
    if config.training.cpu_offload and (requested not in ("fsdp", "hsdp") or config.optimizer.name != "adamw"):
        needs = Setting("training.parallel", "fsdp"), Setting("optimizer.name", "adamw")
        raise ConfigError("{0} needs {1} or hsdp, and {2}", Setting("training.cpu_offload", "true"), *needs)
    if requested == "auto":
        needed = replica_bytes(config, vocab_size)
        if ranks.world_size == 1 or needed is None or memory is None or needed <= FULL * memory:
            return ("ddp" if ranks.world_size > 1 else "none"), ""
        kind = "hsdp" if ranks.world_size > ranks.local_world_size > 1 else "fsdp"
        amounts = f"about {needed / 2**30:,.1f} GiB, but a rank has {memory / 2**30:,.1f} GiB"
        return kind, f"parallel {kind}: weights, gradients and optimizer state take {amounts}"
    if requested == "hsdp" and (ranks.local_world_size < 2 or ranks.world_size % ranks.local_world_size):
        per_node = f"{ranks.local_world_size} on this node, {ranks.world_size} in all"
        raise ConfigError(
            f"{{0}} needs several ranks per node and the same number on every node, but there are {per_node}",
            Setting("training.parallel", "hsdp"),
            Setting("training.parallel", "fsdp"),
            advice="set {1}",
        )
    return ("none" if requested == "ddp" and ranks.world_size == 1 else requested), ""


class Parallel:
    """The distribution of one model over the ranks; `kind` is none, ddp, fsdp or hsdp."""

    def __init__(self, kind: str, ranks: Ranks, device: torch.device, dtype: torch.dtype | None = None, offloads: bool = False):
        self.kind, self.sharded, self._ranks, self._device = kind, kind in ("fsdp", "hsdp"), ranks, device
        self.shards = {"fsdp": ranks.world_size, "hsdp": ranks.local_world_size}.get(kind, 1)
        self.exchange: Replicas | Shards | None = Replicas(ranks) if kind == "ddp" else None
        self._dtype, self._offloads = dtype, offloads
        self._sharded: dict[Tensor, nn.Parameter] = {}  # maps this rank's rows of each sharded parameter to the parameter
        self._replicated: list[nn.Parameter] = []
        self._group: dist.ProcessGroup | None = None

    def place(self, model: nn.Module) -> nn.Module:
        """Move a model to the device; if sharded, keep only this rank's rows of every parameter."""
        if not self.sharded:
            return model.to(self._device)
        if has_custom_optimizers(model):
            raise ConfigError("make_optimizers(groups) needs unsharded parameters; set {0}", Setting("training.parallel", "ddp"))
        stays = {p for p in model.parameters() if self._offloads and _can_be_sharded(p)}
        model._apply(lambda t: t if t in stays else t.to(self._device))  # type: ignore[no-untyped-call]  # computes rotary tables
        return self.shard(model)

    def shard(self, model: nn.Module) -> nn.Module:
        """Shard a model in place; if it is on the meta device, call `note` again after moving it to another device."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        if not dist.is_initialized():  # only with a single rank
            backend = "nccl" if self._device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        shape = (self._ranks.world_size // self.shards, self.shards)
        mesh = init_device_mesh(self._device.type, shape, mesh_dim_names=("replicas", "shards"))
        self._group = mesh.get_group("shards")
        self._replicated = [p for p in model.parameters() if not _can_be_sharded(p)]
        options: dict[str, Any] = {
            "mesh": mesh if self.kind == "hsdp" else mesh["shards"],
            "mp_policy": MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy(pin_memory=self._device.type == "cuda") if self._offloads else OffloadPolicy(),
            "ignored_params": set(self._replicated),
            "reshard_after_forward": True,  # weights may then be changed after a forward pass without a backward pass
        }
        for block in getattr(model, "blocks", ()):
            fully_shard(block, **options)
        fully_shard(model, **options)
        self.note(model)
        return model

    def note(self, model: nn.Module) -> None:
        """Record which local tensor belongs to which parameter."""
        self._sharded = {self.local(p): p for p in model.parameters() if self.local(p) is not p}
        assert self._group is not None
        self.exchange = Shards(self._group, {local: p.shape for local, p in self._sharded.items()})

    def wrap(self, module: nn.Module, family: str) -> nn.Module:
        """Return the module to call in a training step, whose backward pass averages gradients over the ranks."""
        if self.kind != "ddp":
            return module
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(
            module,
            device_ids=[self._device.index] if self._device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=family == "file",  # built-in families use all their parameters
        )

    def local(self, p: Tensor) -> Tensor:
        """Return this rank's rows of a parameter; the parameter itself if it is not sharded."""
        return getattr(p, "_local_tensor", p)  # only a DTensor has a local tensor

    def part(self, p: Tensor) -> Part | None:
        """Return which rows of a parameter this rank holds; None if it is not sharded."""
        if self.local(p) is p:
            return None
        return Part((self._first(p), *[0] * (p.dim() - 1)), tuple(p.shape))

    def _first(self, p: Tensor) -> int:
        """Return the index of this rank's first row; all ranks hold equally many rows, but the last ones may hold fewer."""
        return min(-(-p.size(0) // self.shards) * (self._ranks.rank % self.shards), p.size(0))

    def cut(self, value: Tensor, local: Tensor) -> Tensor:
        """Return this rank's rows of a whole tensor, such as optimizer state, that belongs to a sharded parameter."""
        p = self._sharded.get(local)
        if p is None or value.shape != p.shape:  # not sharded, or already cut
            return value
        first = self._first(p)
        return value[first : first + len(local)]

    def put(self, p: Tensor, value: Tensor) -> None:
        """Copy a tensor, whole or already cut, into a parameter or buffer."""
        local = self.local(p)
        local.copy_(self.cut(value, local))

    def whole(self, p: Tensor) -> Tensor:
        """Return a whole parameter or buffer, gathered from all ranks if it is sharded."""
        if self.local(p) is p:
            return p
        moved: Any = p.detach().to(self._device)
        return moved.full_tensor()  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def gathered(self, model: Any) -> Iterator[None]:
        """Gather the parameters outside the blocks, for methods of the model other than `forward`, which gathers them itself."""
        if not self.sharded:
            yield
            return
        model.unshard()
        try:
            yield
        finally:
            model.reshard()

    @contextlib.contextmanager
    def accumulating(self, module: Any, last: bool) -> Iterator[None]:
        """Run a pass over a micro-batch in the block; replicas average their gradients only in the `last` pass of a step."""
        if self.kind == "hsdp":
            for part in module.modules():
                if hasattr(part, "set_requires_all_reduce"):
                    part.set_requires_all_reduce(last, recurse=False)
        with module.no_sync() if self.kind == "ddp" and not last else contextlib.nullcontext():
            yield

    def collect(self) -> None:
        """After the last pass of a step, assign gradients to the local tensors, and average those of unsharded parameters."""
        for local, p in self._sharded.items():
            local.grad = None if p.grad is None else self.local(p.grad)
        grads = [p.grad for p in self._replicated if p.grad is not None]
        if grads and self._ranks.world_size > 1:
            together = torch.cat([grad.flatten().float() for grad in grads])
            dist.all_reduce(together)
            parts = torch.split(together / self._ranks.world_size, [grad.numel() for grad in grads])
            torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])

    def forget_gradients(self) -> None:
        """Drop the gradients of sharded parameters."""
        for p in self._sharded.values():
            p.grad = None

    def recover(self, model: Any) -> None:
        """Make a sharded model usable again after a pass that failed; otherwise FSDP2 would not reduce gradients any more."""
        if not self.sharded:
            return
        if not hasattr(model, "reset_iter_state"):
            needed = Setting("training.micro_batch"), Setting("training.kernels", "off")
            advice = "set {0} to a number that fits and {1}, or install torch 2.13"
            raise RunError("a trial failed, after which this version of torch cannot use a sharded model", *needed, advice=advice)
        model.zero_grad()  # of the weights that are gathered
        model.reset_iter_state()

    def norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """Return the norm of all gradients: those of this rank's local tensors and, if sharded, those on the other ranks."""
        grads: dict[Tensor, Tensor] = {p: p.grad for p in parameters if p.grad is not None}
        if not self.sharded:
            return get_total_norm(grads.values())
        square = get_total_norm([grad for p, grad in grads.items() if p in self._sharded]).to(self._device).square()
        dist.all_reduce(square, group=self._group)
        rest = [grad for p, grad in grads.items() if p not in self._sharded]
        return (square + get_total_norm(rest).square() if rest else square).sqrt()


def _can_be_sharded(p: nn.Parameter) -> bool:
    return p.dim() > 0 and p.dtype == torch.float32


class Replicas:
    """Muon's communication between replicas (see Exchange in optim/muon.py)."""

    def __init__(self, ranks: Ranks):
        self._rank, self._size = ranks.rank, ranks.world_size
        self._group: dist.ProcessGroup | None = None

    def shape(self, p: Tensor) -> tuple[int, int]:
        return p.size(0), p.size(1)

    def own(self, stack: Tensor) -> Tensor:
        each = -(-len(stack) // self._size)
        return stack[self._rank * each : (self._rank + 1) * each]

    def all(self, share: Tensor, count: int) -> Tensor:
        each = -(-count // self._size)
        padded = torch.cat([share, share.new_zeros(each - len(share), *share.shape[1:])])
        shares = share.new_empty(self._size, *padded.shape)
        dist.all_gather(list(shares.unbind()), padded.contiguous(), group=self._group)
        return shares.flatten(0, 1)[:count]

    def whole(self, parts: Tensor, rows: int) -> Tensor:
        return self.own(parts)

    def parts(self, share: Tensor, shape: torch.Size) -> Tensor:
        return self.all(share, shape[0])


class Shards(Replicas):
    """Muon's communication between shards: each matrix is gathered on one rank, which sends every rank its rows of the update."""

    def __init__(self, group: dist.ProcessGroup, shapes: Mapping[Tensor, torch.Size]):
        self._group, self._shapes = group, shapes
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    def shape(self, p: Tensor) -> tuple[int, int]:
        rows, columns = self._shapes[p]
        return rows, columns

    def whole(self, parts: Tensor, rows: int) -> Tensor:
        count, held, columns = parts.shape
        each, chunk = -(-count // self._size), -(-rows // self._size)
        sent = parts.new_zeros(self._size * each, chunk, columns)
        sent[:count, :held] = parts
        own = self._swapped(sent).view(self._size, each, chunk, columns).transpose(0, 1).flatten(1, 2)  # (each, padded rows, n)
        return own[: len(self.own(parts)), :rows]

    def parts(self, share: Tensor, shape: torch.Size) -> Tensor:
        (count, held, columns), rows = shape, share.size(1)
        each, chunk = -(-count // self._size), -(-rows // self._size)
        sent = share.new_zeros(each, self._size * chunk, columns)
        sent[: len(share), :rows] = share
        sent = sent.view(each, self._size, chunk, columns).transpose(0, 1).flatten(0, 1).contiguous()
        return self._swapped(sent)[:count, :held]

    def _swapped(self, sent: Tensor) -> Tensor:
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        return received
