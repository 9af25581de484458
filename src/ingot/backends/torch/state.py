"""Between torch's tensors and records of raw bytes, by parameter name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ingot.errors import CheckpointError
from ingot.runtime.tensors import TensorRecord

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def record(name: str, tensor: Tensor) -> TensorRecord:
    """A copy of a tensor on the host."""
    host = tensor.detach().to("cpu", copy=True).contiguous()
    data = host.reshape(-1).view(torch.uint8).numpy().data
    return TensorRecord(name, NAMES[tensor.dtype], tuple(tensor.shape), data)


def tensor(source: TensorRecord) -> Tensor:
    """A tensor on the host with a record's contents."""
    buffer = bytearray(source.data)
    if not buffer:
        return torch.empty(source.shape, dtype=DTYPES[source.dtype])
    return torch.frombuffer(buffer, dtype=DTYPES[source.dtype]).reshape(source.shape)


def model_records(model: nn.Module) -> list[TensorRecord]:
    """Every parameter and saved buffer of a model; a tied tensor appears under its first name."""
    seen: set[int] = set()
    records = []
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            records.append(record(name, value))
    return records


@torch.no_grad()
def load_model(model: nn.Module, records: Mapping[str, TensorRecord], where: str) -> None:
    """Copy records into a model; every tensor must be there, with its shape."""
    for value, source in check_fits(model, records, where):
        value.copy_(tensor(source))


def check_fits(model: nn.Module, records: Mapping[str, TensorRecord], where: str) -> list[tuple[Tensor, TensorRecord]]:
    """Every tensor of a model with its record; CheckpointError names what is missing, unknown or of another shape or kind."""
    seen: dict[int, str] = {}
    pairs = []
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in seen:
            continue
        seen[id(value)] = name
        source = records.get(name)
        if source is None:
            raise CheckpointError(f"{where} has no tensor {name}; it belongs to another model")
        if source.shape != tuple(value.shape):
            raise CheckpointError(f"{where}: {name} has shape {list(source.shape)} and the model {list(value.shape)}")
        if DTYPES[source.dtype].is_floating_point != value.dtype.is_floating_point:
            raise CheckpointError(f"{where}: {name} holds {source.dtype} numbers and the model {NAMES[value.dtype]}")
        pairs.append((value, source))
    if unknown := sorted(set(records) - set(seen.values())):
        raise CheckpointError(f"{where} has a tensor {unknown[0]} that the model does not; it belongs to another model")
    return pairs


def optimizer_records(optimizers: Iterable[torch.optim.Optimizer], names: Mapping[nn.Parameter, str]) -> list[TensorRecord]:
    """The state of every parameter in its optimizer, as `parameter/key`."""
    return [record(f"{names[p]}/{key}", value) for p, key, value in _entries(optimizers) if isinstance(value, Tensor)]


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


def _entries(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[Any, str, object]]:
    for optimizer in optimizers:
        for p, state in optimizer.state.items():
            for key, value in state.items():
                yield p, key, value
