"""Between torch's tensors and records of raw bytes, by parameter name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ingot.backends.base import State
from ingot.errors import CheckpointError
from ingot.runtime.tensors import TensorRecord

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SHARED = 4  # of the bytes of a file, what its tensors may come to: some are tied
STAGING_BYTES = 1 << 25  # of pinned memory between a GPU and pageable memory
ROOM = 1.1  # of the memory that a copy on the device takes: the allocator rounds up

Named = Iterable[tuple[str, Tensor]]


def check_held(contents: Any, size: int) -> None:
    """Refuse, by ValueError, tensors of a file of so many bytes that are larger than what it holds.

    A tensor may repeat one number, or many tensors the same ones, by strides: a copy of them would fill any memory.
    """
    parts, seen, total = [contents], set(), 0
    while parts:
        part = parts.pop()
        if isinstance(part, Tensor):
            if part.layout is torch.strided and (part.device.type != "cpu" or part.nbytes > part.untyped_storage().nbytes()):
                raise ValueError("a tensor is larger than what the file holds of it")
            total += part.nbytes if part.layout is torch.strided else 0
        elif isinstance(part, dict | list | tuple) and id(part) not in seen:
            seen.add(id(part))
            parts += part.values() if isinstance(part, dict) else part
    if total > SHARED * size:
        raise ValueError("its tensors are larger than the file")


def record(name: str, tensor: Tensor) -> TensorRecord:
    """A copy of a tensor on the host."""
    host = tensor.detach().to("cpu", copy=True).contiguous()
    data = host.reshape(-1).view(torch.uint8).numpy().data
    return TensorRecord(name, NAMES[tensor.dtype], tuple(tensor.shape), data)


def tensor(source: TensorRecord) -> Tensor:
    """A tensor on the host with a record's contents."""
    found = torch.empty(source.shape, dtype=DTYPES[source.dtype])
    # By numpy, which lets other threads run meanwhile: the loop does not wait while a thread writes another program's files.
    if found.numel():
        found.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(source.data, np.uint8)
    return found


@torch.no_grad()
def snapshot(files: Mapping[str, Named], device: torch.device) -> Callable[[], State]:
    """The tensors as they are now; what is returned brings them to the host, in whichever thread it is called, once.

    A GPU copies its memory to itself a hundred times faster than to the host, so where it has room for that the loop goes on at
    once and the way to the host is another thread's. Elsewhere the tensors are copied to the host now.
    """
    named = {file: list(tensors) for file, tensors in files.items()}
    if device.type != "cuda" or not _has_room(sum(t.nbytes for tensors in named.values() for _, t in tensors), device):
        records = {file: [record(name, t) for name, t in tensors] for file, tensors in named.items()}
        return lambda: records
    held = {file: [(name, t.detach().clone()) for name, t in tensors] for file, tensors in named.items()}
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(device))

    def bring() -> State:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_event(copied)
        with torch.cuda.stream(stream):  # type: ignore[no-untyped-call]
            staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
            # Each copy is given up as soon as the host has it: writing to the disk takes longer than the next step.
            return {file: [record_through(staging, *tensors.pop(0)) for _ in named[file]] for file, tensors in held.items()}

    return bring


def record_through(staging: Tensor, name: str, tensor: Tensor) -> TensorRecord:
    """A copy of a tensor on the host, piece by piece through a pinned buffer.

    A copy straight to pageable memory holds a lock of the driver: meanwhile no other thread launches kernels.
    """
    source, pinned = tensor.detach().contiguous().reshape(-1).view(torch.uint8), staging.numpy()
    host = np.empty(source.numel(), np.uint8)
    for begin in range(0, source.numel(), staging.numel()):
        part = source[begin : begin + staging.numel()]
        staging[: part.numel()].copy_(part, non_blocking=True)
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        host[begin : begin + part.numel()] = pinned[: part.numel()]
    return TensorRecord(name, NAMES[tensor.dtype], tuple(tensor.shape), host.data)


def _has_room(size: int, device: torch.device) -> bool:
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return ROOM * size < torch.cuda.mem_get_info(device)[0] + idle


def model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and saved buffer of a model; a tied tensor appears under its first name."""
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            yield name, value


def model_records(model: nn.Module) -> list[TensorRecord]:
    """Copies of a model's tensors on the host."""
    return [record(name, value) for name, value in model_tensors(model)]


@torch.no_grad()
def load_model(model: nn.Module, records: Mapping[str, TensorRecord], where: str) -> None:
    """Copy records into a model; every tensor must be there, with its shape."""
    for value, source in check_fits(model, records, where):
        value.copy_(tensor(source))


def check_fits(model: nn.Module, records: Mapping[str, TensorRecord], where: str) -> list[tuple[Tensor, TensorRecord]]:
    """Every tensor of a model with its record; CheckpointError names what is missing, unknown or of another shape or kind."""
    tensors, pairs = dict(model_tensors(model)), []
    for name, value in tensors.items():
        source = records.get(name)
        if source is None:
            raise CheckpointError(f"{where} has no tensor {name}; it belongs to another model")
        if source.shape != tuple(value.shape):
            raise CheckpointError(f"{where}: {name} has shape {list(source.shape)} and the model {list(value.shape)}")
        if DTYPES[source.dtype].is_floating_point != value.dtype.is_floating_point:
            raise CheckpointError(f"{where}: {name} holds {source.dtype} numbers and the model {NAMES[value.dtype]}")
        pairs.append((value, source))
    if unknown := sorted(records.keys() - tensors.keys()):
        raise CheckpointError(f"{where} has a tensor {unknown[0]} that the model does not; it belongs to another model")
    return pairs


def optimizer_tensors(optimizers: Iterable[torch.optim.Optimizer], names: Mapping[Any, str]) -> Iterator[tuple[str, Tensor]]:
    """The state of every parameter in its optimizer, as `parameter/key`."""
    for optimizer in optimizers:
        for p, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield f"{names[p]}/{key}", value


def load_optimizers(
    optimizers: Iterable[torch.optim.Optimizer], names: Mapping[nn.Parameter, str], records: Mapping[str, TensorRecord]
) -> None:
    """Put the state back; a parameter that has none in the records starts anew."""
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for name, source in records.items():
        parameter, _, key = name.rpartition("/")
        by_parameter.setdefault(parameter, {})[key] = tensor(source)
    for optimizer in optimizers:
        optimizer.state.clear()
        for group in optimizer.param_groups:
            for p in group["params"]:
                entries = by_parameter.get(names[p], {})
                if entries:
                    optimizer.state[p] = {key: value.to(p.device) for key, value in entries.items()}
