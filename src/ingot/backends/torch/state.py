"""Tensor records, snapshots of a run's state, averaged weights, the fp16 loss scale, and files written by torch.save."""

from __future__ import annotations

import errno
import pickle
import re
import time
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ingot.backends.base import State, StepResult
from ingot.errors import CheckpointError
from ingot.runtime.tensors import TensorRecord

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_EXPANSION = 4  # maximum ratio of total tensor bytes to file size; tensors that share memory make the ratio exceed 1
STAGING_BYTES = 1 << 25  # size of the pinned buffer for copies from a GPU to pageable memory
COPY_MARGIN = 1.1  # memory that a copy on the device takes, relative to its size: the allocator rounds up

Named = Iterable[tuple[str, Tensor]]


def check_held(contents: Any, size: int) -> None:
    """Raise ValueError if the tensors in `contents` are implausibly large for a file of `size` bytes.

    With zero strides or shared storage, a small file can describe huge tensors; copying them would exhaust memory.
    """
    parts, seen, total = [contents], set(), 0
    while parts:
        part = parts.pop()
        if isinstance(part, Tensor):
            if part.layout is torch.strided and (part.device.type != "cpu" or part.nbytes > part.untyped_storage().nbytes()):
                raise ValueError("a tensor is larger than its data in the file")
            total += part.nbytes if part.layout is torch.strided else 0
        elif isinstance(part, dict | list | tuple) and id(part) not in seen:
            seen.add(id(part))
            parts += part.values() if isinstance(part, dict) else part
    if total > MAX_EXPANSION * size:
        raise ValueError("its tensors are larger than the file")


def record(name: str, tensor: Tensor) -> TensorRecord:
    """Copy a tensor to the host and return it as a record."""
    return shared_record(name, tensor.detach().to("cpu", copy=True))


def tensor(source: TensorRecord) -> Tensor:
    """Return a copy of a record as a tensor on the host."""
    copy = torch.empty(source.shape, dtype=DTYPES[source.dtype])
    # Copy with numpy, which releases the GIL, so that the training loop continues while a thread writes files.
    if copy.numel():
        copy.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(source.data, np.uint8)
    return copy


@torch.no_grad()
def snapshot(files: Mapping[str, Named], device: torch.device) -> Callable[[], State]:
    """Capture the current values of tensors; return a function that copies them to the host, to be called once from any thread.

    Copying within GPU memory is a hundred times faster than copying to the host. If the GPU has memory for a copy, training
    continues at once, and the copy is transferred when the function is called. Otherwise, tensors are copied to the host at once.
    """
    named = {file: list(tensors) for file, tensors in files.items()}
    size = sum(t.nbytes for tensors in named.values() for _, t in tensors)
    if device.type == "cuda":  # free memory: unallocated, or cached by torch's allocator
        free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cuda" or COPY_MARGIN * size >= free:
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
            # Free each copy on the device as soon as it is on the host, instead of waiting until the file is written.
            return {file: [record_through(staging, *tensors.pop(0)) for _ in named[file]] for file, tensors in held.items()}

    return bring


def record_through(staging: Tensor, name: str, tensor: Tensor) -> TensorRecord:
    """Copy a tensor to the host in parts, through the pinned buffer `staging`, and return it as a record.

    A direct copy to pageable memory holds a driver lock, which keeps other threads from launching kernels.
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


def model_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and tensor of every parameter and persistent buffer; a tied tensor appears under its first name only."""
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            yield name, value


def model_records(model: nn.Module) -> list[TensorRecord]:
    """Copy a model's tensors to the host and return them as records."""
    return [record(name, value) for name, value in model_tensors(model)]


Put = Callable[[Tensor, Tensor], object]  # put(target, source) copies this rank's part of `source` into a tensor of the model


def put_whole(value: Tensor, source: Tensor) -> None:
    """Copy a tensor into another of the same shape."""
    value.copy_(source)


@torch.no_grad()
def load_model(model: nn.Module, records: Mapping[str, TensorRecord], where: str, put: Put = put_whole) -> None:
    """Copy records into a model; raise CheckpointError if names, shapes or kinds of dtype (floating-point or not) differ."""
    for value, source in check_fits(model, records, where):
        put(value, tensor(source))


def check_fits(model: nn.Module, records: Mapping[str, TensorRecord], where: str) -> list[tuple[Tensor, TensorRecord]]:
    """Pair every tensor of a model with its record; raise CheckpointError for missing, unknown or mismatched tensors."""
    tensors, pairs = dict(model_tensors(model)), []
    for name, value in tensors.items():
        source = records.get(name)
        if source is None:
            raise CheckpointError(f"{where} has no tensor {name}; it belongs to another model")
        if (shape := source.part.whole if source.part else source.shape) != tuple(value.shape):
            raise CheckpointError(f"{where}: {name} has shape {list(shape)}, but {list(value.shape)} in the model")
        if DTYPES[source.dtype].is_floating_point != value.dtype.is_floating_point:
            raise CheckpointError(f"{where}: {name} has dtype {source.dtype}, but {NAMES[value.dtype]} in the model")
        pairs.append((value, source))
    if unknown := sorted(records.keys() - tensors.keys()):
        raise CheckpointError(f"{where} has a tensor {unknown[0]} that the model does not have; it belongs to another model")
    return pairs


def optimizer_tensors(optimizers: Iterable[torch.optim.Optimizer], names: Mapping[Any, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the optimizer state of every parameter as tensors named `parameter/key`."""
    for optimizer in optimizers:
        for p, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield f"{names[p]}/{key}", value


class WeightAverage:
    """An exponential moving average of the weights in float32, which replaces the weights during evaluation."""

    def __init__(self, model: nn.Module, local: Callable[[Tensor], Tensor] = lambda p: p):
        trained = ((name, local(p)) for name, p in model.named_parameters() if p.requires_grad)
        self._names, self._weights = zip(*trained, strict=True)
        self._average = [p.detach().float().clone() for p in self._weights]
        self._kept: list[Tensor] = []  # copies of the training weights while the model holds the average

    @torch.no_grad()
    def update(self, decay: float, skip: Tensor) -> None:
        """Move the average towards the weights by (1 - decay) times their difference, unless the step was skipped."""
        difference = torch._foreach_sub([p.detach().float() for p in self._weights], self._average)
        torch._foreach_mul_(difference, (1 - decay) * (1 - skip.float().to(self._average[0].device)))
        torch._foreach_add_(self._average, difference)

    @torch.no_grad()
    def swap_in(self) -> None:
        """Put the average into the model, and keep a copy of the training weights."""
        if not self._kept:
            self._kept = [p.detach().clone() for p in self._weights]
            torch._foreach_copy_(list(self._weights), self._average)

    @torch.no_grad()
    def swap_out(self) -> None:
        """Restore the training weights."""
        if self._kept:
            torch._foreach_copy_(list(self._weights), self._kept)
            self._kept = []

    def tensors(self) -> Named:
        """Return pairs of a parameter's name and its average."""
        return zip(self._names, self._average, strict=True)

    @torch.no_grad()
    def load(self, records: Mapping[str, TensorRecord], cut: Callable[[Tensor, Tensor], Tensor] = lambda value, p: value) -> None:
        """Restore the average from saved records; for a parameter without a record, restart it from the current weights."""
        for name, average, p in zip(self._names, self._average, self._weights, strict=True):
            average.copy_(cut(tensor(records[name]), p) if name in records else p)


class LossScale:
    """The loss scale of fp16 training, halved when a gradient overflows, doubled after 2,000 good steps; 1 if not `used`."""

    def __init__(self, used: bool, device: torch.device):
        self.used = used
        self.value = torch.tensor(65536.0 if used else 1.0, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def unscale(self, grads: list[Tensor]) -> None:
        """Divide gradients by the loss scale, in place."""
        if self.used:
            torch._foreach_mul_(grads, 1.0 / self.value)

    def update(self, overflow: Tensor) -> None:
        """Adjust the scale after a step; `overflow` is True if a gradient of the step overflowed."""
        if self.used:
            torch._amp_update_scale_(self.value, self._good_steps, overflow.float(), 2.0, 0.5, 2000)

    def tensors(self) -> Named:
        """Return the names and tensors to store in a checkpoint, or nothing if the loss is not scaled."""
        return [("scaler/scale", self.value), ("scaler/good_steps", self._good_steps)] if self.used else []

    def restore(self, state: dict[str, TensorRecord]) -> None:
        """Pop the loss scale's records from the saved optimizer state, and restore the scale from them."""
        scale, good_steps = state.pop("scaler/scale", None), state.pop("scaler/good_steps", None)
        if self.used and scale is not None and good_steps is not None:
            self.value.copy_(tensor(scale))
            self._good_steps.copy_(tensor(good_steps))


class DeviceResult:
    """A step's gradient norm, skipped flag and losses, which the device may still be computing; implements Pending (base.py).

    On CUDA the copy to the host is queued right after the step, so that reading the results does not wait for later steps. The
    end time is recorded only on a CPU, where the step has already ended when this object is created.
    """

    def __init__(self, numbers: Tensor, began: Any, computed: Any):
        self._began, self._computed = began, computed
        self._numbers, self._ended = numbers, time.perf_counter() if numbers.device.type == "cpu" else None
        self._arrival: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._numbers = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
            self._arrival = torch.cuda.current_stream(numbers.device).record_event()

    def result(self) -> StepResult:
        if self._arrival is not None:
            self._arrival.synchronize()
        grad_norm, skipped, loss, *rank_losses = self._numbers.tolist()
        began, computed = self._began, self._computed
        seconds = computed - began if isinstance(began, float) else began.elapsed_time(computed) / 1000
        return StepResult(loss, grad_norm, bool(skipped), self._ended, rank_losses, seconds)


# Files written by torch.save, and the AdamW state in them.

MOMENTS = ("exp_avg", "exp_avg_sq")
ROWWISE = (*MOMENTS, "momentum")  # optimizer state that has the shape of its parameter; other state is the same on all ranks
PREFIXES = ("_orig_mod.", "module.")  # prefixes that torch.compile and DDP add to names
REFUSED = re.compile(r"GLOBAL ([\w.]+)")  # matches, in torch's error, the class or function that torch refuses to load


class DamagedFile(CheckpointError):
    """Raised when a weights file is damaged or was not written by torch.save."""


def load_saved(path: Path, classes: Mapping[str, type] | None = None) -> Any:
    """Load a torch.save file that holds only numbers, text, tensors and instances of `classes`; else raise CheckpointError."""
    whole = False
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):  # could be a zip bomb
                    raise ValueError("its zip entries are compressed, which torch.save never does")
                if archive.testzip() is not None:  # torch.load ignores checksums
                    raise ValueError("its checksums do not match")
            whole = True
        allowed: list[Any] = [(kind, name) for name, kind in (classes or {}).items()]
        with warnings.catch_warnings(), torch.serialization.safe_globals(allowed):
            warnings.simplefilter("ignore")  # a file that torch warns about is rejected below
            contents = torch.load(path, map_location="cpu", weights_only=True)
        check_held(contents, path.stat().st_size)
        return contents
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except MemoryError:
        raise CheckpointError(f"{path} does not fit into memory") from None
    except Exception as error:  # damaged or malicious files can raise almost any exception
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # torch raises EINVAL for some truncated files
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
        if isinstance(error, pickle.UnpicklingError) and (refused := REFUSED.search(str(error))):
            raise CheckpointError(
                f"{path} holds {refused[1]:.80}, but only numbers, text and tensors are loaded, so that no code in a file can "
                "run; save its state_dict and settings again without that object"
            ) from None
        reason = "it was not written by torch.save"
        if isinstance(error, RuntimeError | ValueError):
            reason = " ".join(str(error).split()).split(". ")[0][:150]
        kind = CheckpointError if whole else DamagedFile
        raise kind(f"{path} is damaged, or holds more than weights and settings: {reason}") from None


def state_records(state: Any, path: Path) -> dict[str, TensorRecord]:
    """Return a state dict as records by name, in the same order, without the name prefixes that torch.compile and DDP add."""
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} does not hold a dictionary of tensors")
    records = {}
    for key, value in state.items():
        name = str(key)
        while name.startswith(PREFIXES):
            name = name.partition(".")[2]
        if not isinstance(value, Tensor) or value.dtype not in NAMES or value.layout is not torch.strided:
            raise CheckpointError(f"{path}: {name:.100} is not a dense tensor of a supported dtype")
        records[name] = shared_record(name, value)
    return records


def shared_record(name: str, value: Tensor) -> TensorRecord:
    """Return a record that shares the memory of a contiguous host tensor; other tensors are copied."""
    value = value.detach().contiguous()
    return TensorRecord(name, NAMES[value.dtype], tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().data)


def shared_tensor(source: TensorRecord) -> Tensor:
    """Return a tensor that shares the memory of a record; read-only memory is copied, because torch tensors are writable."""
    if not source.data.nbytes:
        return torch.empty(source.shape, dtype=DTYPES[source.dtype])
    data = bytearray(source.data) if source.data.readonly else source.data
    return torch.frombuffer(data, dtype=DTYPES[source.dtype]).reshape(source.shape)


def adamw_memory(
    optimizer: Any, orders: Iterable[Sequence[Sequence[str]]], weights: Mapping[str, TensorRecord]
) -> tuple[dict[str, TensorRecord], str | None]:
    """Convert AdamW's state dict; return (records named `parameter/key`, None), or ({}, the reason why it cannot be used).

    A state dict refers to parameters by number; each entry of `orders` is a possible order of their names, one list per group.
    """
    try:
        groups = [[int(number) for number in group["params"]] for group in optimizer["param_groups"]]
        state = {int(number): dict(entry) for number, entry in optimizer["state"].items()}
    except (TypeError, KeyError, ValueError, AttributeError):
        return {}, "there is none"
    if not state:
        return {}, "it is empty"

    def fits(entry: Mapping[Any, Any], weight: TensorRecord) -> bool:
        step, moments = entry.get("step"), [entry.get(key) for key in MOMENTS]
        counted = isinstance(step, int | float) or (isinstance(step, Tensor) and step.numel() == 1)
        return counted and all(isinstance(m, Tensor) and m.shape == weight.shape and m.is_floating_point() for m in moments)

    for order in orders:
        if [len(names) for names in order] != [len(numbers) for numbers in groups]:
            continue
        names = dict(zip(chain(*groups), chain(*order), strict=True))
        if all(number in names and fits(entry, weights[names[number]]) for number, entry in state.items()):
            tensors = [
                (f"{names[number]}/{key}", torch.tensor(float(entry[key])) if key == "step" else entry[key].float())
                for number, entry in state.items()
                for key in ("step", *MOMENTS)
            ]
            return {name: shared_record(name, value) for name, value in tensors}, None
    return {}, "it does not match AdamW's state for these parameters"


def adamw_state(
    decayed: Collection[str], rest: Collection[str], memory: Mapping[str, TensorRecord], weight_decay: float, **options: Any
) -> dict[str, Any]:
    """Return a state dict for AdamW with the groups `decayed` and `rest`; the state is empty if `memory` is incomplete."""
    placeholders = {name: torch.nn.Parameter(torch.empty(0)) for name in (*decayed, *rest)}
    parts = ((decayed, weight_decay), (rest, 0.0))
    groups = [{"params": [placeholders[name] for name in names], "weight_decay": decay} for names, decay in parts]
    optimizer = torch.optim.AdamW(groups, **options)
    keys = ("step", *MOMENTS)
    if all(f"{name}/{key}" in memory for name in placeholders for key in keys):
        for name, parameter in placeholders.items():
            optimizer.state[parameter] = {key: shared_tensor(memory[f"{name}/{key}"]) for key in keys}
    return optimizer.state_dict()
