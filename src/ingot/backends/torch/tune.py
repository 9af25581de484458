"""What is found out on the machine itself before a run: how many rows are computed at once, and which attention is fastest."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.backends.torch.precision import ATTENTION, CUDNN_FLASH4, FLASH4, GROUPED, has_flash4, keep_compiled
from ingot.config.schema import Config, Kernel
from ingot.config.size import FLOAT, model_size, recomputed_every, state_bytes, step_bytes
from ingot.errors import ConfigError, RunError, Setting
from ingot.model import kernels
from ingot.model.kernels.flash import library, packed_flash_attention
from ingot.model.layers import Form, causal_attention, repeat_kv, uses_flash
from ingot.model.registry import OURS
from ingot.model.settings import FileSettings
from ingot.runtime.devices import Device
from ingot.runtime.files import file_sha256, read_json, user_path, write_atomically
from ingot.runtime.machine import OF_KERNELS, cache_root, host_bytes, installed, made_by
from ingot.runtime.processes import cpu_count
from ingot.runtime.tensors import Batch

Agree = Callable[[Sequence[float]], list[float]]  # each value's maximum over the ranks
HOST_MICRO_BATCH_TOKENS = 16384  # on a CPU larger micro-batches only cost memory
# Trials are not compiled, and what a further micro-batch costs is the beginning and end of each kernel, of which they have about
# twice as many: 2% of their time stands for 1% of a step's (golf seq4096, compiled: 48 rows of 96 take 0.9% more, 24 2.8%).
SLOWER = 1.02


@dataclass(frozen=True)
class Tuned:
    """What was found out for the steps of a stage."""

    micro_batch: int
    attention: str


def largest_micro_batch(rows: int, attempt: Callable[[int], None], maximum: Agree) -> int:
    """The most rows whose forward and backward pass, made by `attempt`, fit into every rank's memory, by halving."""
    size = rows
    while True:
        full = False
        try:
            attempt(size)
        except torch.OutOfMemoryError:
            full = True
        if not maximum([full])[0]:  # all ranks try the same sizes
            return size
        gc.collect()  # not before the error is gone, which holds what it was raised in
        torch.cuda.empty_cache()
        if size == 1:
            raise ConfigError(
                "one row of {0} tokens does not fit into the GPU's memory",
                Setting("data.seq_len"),
                Setting("training.gradient_checkpointing", "true"),
                advice="shorten it, shrink the model or set {1}",
            )
        size = (size + 1) // 2


def memory_is_full(step: int, micro_batch: int, recorded: bool) -> RunError:
    """What ends a run whose step does not fit after all; `recorded`: whether its passes are CUDA graphs."""
    return RunError(
        f"the GPU's memory is full at step {step} with micro-batches of {micro_batch} rows",
        Setting("training.micro_batch"),
        Setting("training.gradient_checkpointing", "true"),
        Setting("training.cuda_graphs", "false"),
        advice="lower {0}, or set {1} or {2}, and start again" if recorded else "lower {0} or set {1}, and start again",
    )


def smallest_micro_batch(largest: int, attempt: Callable[[int, int], None], maximum: Agree) -> int:
    """The least of the halves, quarters and so on of `largest` rows whose passes take hardly longer than the fastest's, per row.

    `attempt` makes passes of so many rows, as often as it is told; one of the largest was made before. Trials end with the first
    size that is slower: each cut adds as many beginnings of kernels as all before it. Where the first cut pays they take the time
    of five passes of the largest.
    """
    chosen = size = largest
    least = math.inf
    while True:
        times = max(1, largest // (2 * size))
        each = maximum([_least_seconds(partial(attempt, size), times, size != largest)])[0] / (size * times)
        if each > SLOWER * least:
            return chosen
        chosen, least = size, min(least, each)
        if size % 2:  # halves of unequal sizes would be two graphs
            return chosen
        size //= 2


def _least_seconds(attempt: Callable[[int], None], times: int, new: bool) -> float:
    """The better of two trials; endless where there is no room, as beside another program that takes some meanwhile."""
    try:
        if new:
            attempt(1)  # kernels are loaded, memory is taken
        return min(seconds_of(partial(attempt, times)) for _ in range(2))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return math.inf


def fastest_attention(names: Sequence[str], attempt: Callable[[str, int], None], deterministic: bool, maximum: Agree) -> str:
    """The attention kernel whose forward and backward passes, made by `attempt` as often as it is told, take the least time.

    The slowest rank's time counts. In deterministic mode the first kernel that there is: times differ from run to run.
    """
    there = []
    for name in names:
        if not maximum([not works(partial(attempt, name, 1))])[0]:
            if deterministic:
                return name
            there.append(name)
    if len(there) < 2:
        return there[0] if there else "default"
    # In turns: what slows the device down for a while, such as having waited for a compiler, then meets no kernel alone.
    turns = [[maximum([seconds_of(partial(attempt, name, 3))])[0] for name in there] for _ in range(2)]
    return min(zip(map(min, *turns), there, strict=True))[1]


def seconds_of(attempt: Callable[[], None]) -> float:
    """The time that something takes."""
    began = time.perf_counter()
    attempt()
    return time.perf_counter() - began


def works(attempt: Callable[[], None]) -> bool:
    """Whether a kernel can take this shape and type: one of torch's that cannot warns and raises a RuntimeError.

    One of a package may raise anything. What is wrong with the pass itself is raised again by the first step.
    """
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attempt()
        return True
    return False


# What was found out for a shape on this machine, kept for later runs of the same shape: finding it out takes seconds.

SHAPING = (
    "tokens_per_step", "stages", "micro_batch", "precision", "compile", "deterministic", "loss_chunk", "kernels",
    "fp8_head", "gradient_checkpointing", "ddp_python_reducer", "cuda_graphs",
)  # fmt: skip
TRIALS = 6  # changes with what is tried and how: notes of other trials are not believed
FREE = 0.98  # of the memory that was free then has to be free now


class Choices:
    """The note of one shape; without a GPU there is none, as a CPU's choices follow from the settings."""

    def __init__(self, config: Config, device: Device, world_size: int):
        self._device = device
        self._path = cache_root() / "choices" / self._name(config, world_size) if device.kind == "cuda" else None

    def _name(self, config: Config, world_size: int) -> str:
        file = user_path(config.model.file) if isinstance(config.model, FileSettings) else None
        known = {
            "model": config.model.model_dump(mode="json"),
            "file": file_sha256(file) if file is not None else None,
            "data": [config.data.seq_len, config.data.document_mask],
            "training": config.training.model_dump(mode="json", include=set(SHAPING)),
            "device": [self._device.name, world_size],
            "versions": [
                TRIALS,
                made_by(),
                torch.__version__,
                torch.version.cuda,
                torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
                installed(OF_KERNELS),
            ],
        }
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32] + ".json"

    def recall(self) -> dict[str, Any]:
        """What was found out, as `keep` was given it; nothing where there is no note or less memory is free."""
        if self._path is None:
            return {}
        with suppress(OSError, ValueError, KeyError, TypeError):
            note = read_json(self._path)
            if note["free"] * FREE <= self._room():
                return dict(note["choices"])
        return {}

    def keep(self, choices: dict[str, Any]) -> None:
        """Write the note; where that cannot be, the next run finds out anew."""
        if self._path is not None:
            with suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self._path, json.dumps({"free": self._room(), "choices": choices}, indent=1), durable=False)

    def _room(self) -> int:
        """The bytes that this process has of the GPU or could have: what others hold of it is not among them."""
        return torch.cuda.mem_get_info(self._device.index)[0] + torch.cuda.memory_reserved(self._device.index)

    def forget(self) -> None:
        """What the note says did not fit after all."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)


# Which kernels of our own a model uses: all, or those that are asked for, where they run here, as seen by running them.

NAMES: tuple[str, ...] = get_args(Kernel)  # docs/experiments.md says what each is worth
LAUNCHED_SLOWLY = ("rotary", "qkv", "mlp", "gate")  # operations of ours in every layer: the host takes 0.1 to 0.2 ms for one
WITH_FLASH4 = ("qkv",)  # used with that attention alone
SHORT = 32768  # tokens of a rank in a step that waits for the host: 12 rows of 1,024 took 27.5 ms with `mlp` and 24.3 without

Asked = Literal["auto", "off"] | Sequence[str]


def name_operations() -> None:
    """Tell the compiler's caches which operations of ours its graphs call: it knows these by their names alone.

    A graph of another version would be taken from there and call an operation with other arguments.
    """
    settings: Any = torch.compiler.config
    if not settings.cache_key_tag:  # else the user's, who takes care of it
        sources = sorted(Path(kernels.__path__[0]).glob("*.py"))
        settings.cache_key_tag = "ingot " + hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:16]


def is_short(batch: Batch, maximum: Agree) -> bool:
    """Whether a step of such a batch on each rank is over before the host has launched the next one's kernels."""
    return maximum([batch[:, 0].size])[0] <= SHORT  # shares of a step may differ by a row


def worth_trying(asked: Asked, waits: bool) -> list[str]:
    """The kernels that a run tries where its model has them; `waits`: whether a step waits for the host to launch them."""
    fast = [name for name in NAMES if not (waits and name in LAUNCHED_SLOWLY)]
    wanted = {"auto": fast, "off": ()}.get(asked, asked) if isinstance(asked, str) else asked
    return [name for name in NAMES if name in wanted]


def settle_kernels(
    model: nn.Module,
    asked: Asked,
    kept: Sequence[str] | None,
    able: bool,
    waits: bool,
    attempt: Callable[[str | None], None] | None,
    maximum: Agree,
) -> list[str]:
    """Switch on the kernels that an earlier session `kept`, or that are asked for and let `attempt` pass; returns their names.

    `attempt` makes a pass, with this attention kernel or with torch's choice; without one those that were kept are known to run
    here. `able`: whether the device and the number format are those that they are made for; `waits`: whether a step waits for the
    host to launch them. A kernel that is asked for by its name and does not run is an error.
    """
    present = [name for name in worth_trying(asked, waits) if able and has_kernel(model, name)]
    if kept is not None:
        present = [name for name in present if name in kept]
    if attempt is None:
        use_kernels(model, present)
        return present
    chosen: list[str] = []
    for name in present:
        use_kernels(model, [*chosen, name])
        failure = failure_of(partial(attempt, FLASH4 if name in WITH_FLASH4 else None))
        if not maximum([failure is not None])[0]:
            chosen.append(name)
        elif asked != "auto":
            use_kernels(model, [])
            raise ConfigError(f"{{0}}: {name} does not run here: {failure or 'on another rank'}", Setting("training.kernels"))
    use_kernels(model, chosen)
    return chosen


def has_kernel(model: nn.Module, name: str) -> bool:
    """Whether a part of the model can use a kernel."""
    return any(hasattr(module, f"fused_{name}") for module in model.modules())


def use_kernels(model: nn.Module, names: Collection[str]) -> None:
    """Let the parts of the model use these kernels and no others."""
    for module in model.modules():
        for name in NAMES:
            if hasattr(module, f"fused_{name}"):
                setattr(module, f"fused_{name}", name in names)


def failure_of(attempt: Callable[[], None]) -> str | None:
    """What went wrong, in a line: a compiler, a driver or a missing package may raise anything."""
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


# The attention of a model by itself: what a pass asks of torch's kernels, so that these can be timed without the model.


class Operand(NamedTuple):
    """Queries, keys or values: their sizes after the batch's, the order in which their dimensions lie, their number format."""

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype


class Call(NamedTuple):
    """A call of attention: what it is given, and whether that is one product's, whose gradient is made of theirs."""

    query: Operand
    key: Operand
    value: Operand
    packed: bool


Calls = Counter[Call]
ENOUGH = 2**32  # scores of all calls together, 5 ms of an H200 with their gradients: more tell kernels apart no better


@contextmanager
def recorded_attention(model: nn.Module) -> Iterator[Calls]:
    """Count a model's calls of causal attention; others have masks or dropout, which leave no choice or do not train fast.

    None are counted where a model of one's own has fewer heads of keys and values in its own way: only whole passes tell then
    which kernels take them.
    """
    calls: Calls = Counter()
    ours, all_known = isinstance(model, OURS), True
    plain = F.scaled_dot_product_attention

    def recorded(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal all_known
        all_known = all_known and (ours or key.size(1) == query.size(1))
        grouped = kwargs.pop("enable_gqa", False)
        if kwargs == {"is_causal": True, "dropout_p": 0.0} and not args and query.size(-2) == key.size(-2):
            packed = (
                query.dim() == 4
                and query.shape == key.shape == value.shape
                and len({x.untyped_storage().data_ptr() for x in (query, key, value)}) == 1
            )
            calls[Call(_operand(query), _operand(key), _operand(value), packed)] += 1
        if grouped:  # without a kernel that takes fewer heads torch would hold the scores of all pairs
            key, value = repeat_kv(key, query.size(1)), repeat_kv(value, query.size(1))
        return plain(query, key, value, *args, **kwargs)

    F.scaled_dot_product_attention = recorded
    try:
        yield calls
    finally:
        F.scaled_dot_product_attention = plain
        if not all_known:
            calls.clear()


def enough(calls: Calls, rows: int) -> Calls:
    """As many of the calls as it takes to time them for so many rows, in the same proportion, each at least once."""
    scores = sum(rows * math.prod(call.query.sizes[:2]) * call.key.sizes[1] * times for call, times in calls.items())
    return Counter({call: max(1, round(times * min(1.0, ENOUGH / scores))) for call, times in calls.items()})


def candidates(model: nn.Module, calls: Calls, documents: bool, maximum: Agree) -> list[str]:
    """The kernels that calls leave a choice of; without fewer heads of keys and values there is nothing to group.

    Rows of documents are FlexAttention's or FlashAttention 4's.
    """
    takes_flash4 = _takes_flash4(model, maximum)
    if documents:
        return ["default", FLASH4] if takes_flash4 else []
    fewer = any(call.key.sizes[0] != call.query.sizes[0] for call in calls)
    theirs = [*ATTENTION, *(f"{name}{GROUPED}" for name in ATTENTION if fewer)]
    whole = any(getattr(module, "fused_qkv", False) for module in model.modules())  # one operation, by FlashAttention alone
    return [*theirs, FLASH4, *([] if fewer or whole else [CUDNN_FLASH4])] if calls and takes_flash4 else theirs


def without_masks(model: nn.Module, batch: Batch, maximum: Agree) -> list[str]:
    """The kernels that count the windows that such rows have; to others they are masks, for which FlexAttention is compiled."""
    windowed = isinstance(model, OURS) and getattr(model, "windowed", False)
    if not windowed or model.window >= batch.shape[2] or batch.shape[1] == 3:  # type: ignore[operator]
        return []
    grouped = model.kv_heads * model.head_size != model.embedding.weight.size(1)  # type: ignore[operator,union-attr]
    return [FLASH4, *([] if grouped else [CUDNN_FLASH4])] if _takes_flash4(model, maximum) else []


def form_of(name: str) -> Form:
    """How a kernel is given heads."""
    if name == CUDNN_FLASH4:
        return "cudnn-flash4"
    return "flash4" if name == FLASH4 else "grouped" if name.endswith(GROUPED) else "repeated"


def _takes_flash4(model: nn.Module, maximum: Agree) -> bool:
    """Whether the model is one of ours and every rank has the package: all of them try the same kernels."""
    return isinstance(model, OURS) and not maximum([not has_flash4()])[0]


def load_flash4() -> None:
    """Import the package and that of products, which comes with it, where they are installed.

    That takes seconds, for which a run need not wait. What is wrong with them is told later.
    """
    if has_flash4():
        keep_compiled()
        with suppress(Exception):
            library()
            import_module("ingot.model.kernels.quack_matmul")


def use_form(model: nn.Module, form: Form) -> None:
    """Let the attention of a model have this form."""
    if form.endswith("flash4"):
        keep_compiled()
    for module in model.modules() if isinstance(model, OURS) else ():  # of one's own it may mean anything
        if hasattr(module, "form"):
            module.form = form  # type: ignore[assignment]


def replay(calls: Calls, rows: int, device: torch.device, form: Form = "repeated") -> None:
    """Make the calls for so many rows, each with its backward pass and as often as it was counted."""
    for call, times in calls.items():
        attend = _packed_pass if call.packed else _pass
        again = attend(call, rows, device, form)
        for _ in range(times):
            again()


def _pass(call: Call, rows: int, device: torch.device, form: Form) -> Callable[[], None]:
    q, k, v = (_random(operand, rows, device) for operand in (call.query, call.key, call.value))

    def both_ways() -> None:
        y = causal_attention(q, k, v, form=form)
        torch.autograd.grad(y, (q, k, v), y.detach())

    return both_ways


def _packed_pass(call: Call, rows: int, device: torch.device, form: Form) -> Callable[[], None]:
    """A pass of attention as the gpt2 family calls it: bringing three gradients together is a part of what a kernel costs."""
    heads, length, size = call.query.sizes
    qkv = torch.randn(rows, length, 3, heads, size, dtype=call.query.dtype, device=device, requires_grad=True)

    def both_ways() -> None:
        if uses_flash(form, None):
            y = packed_flash_attention(qkv, cudnn=form != "flash4")
        else:
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
            y = causal_attention(q, k, v, form=form)
        torch.autograd.grad(y, qkv, y.detach())

    return both_ways


def replayed(calls: Calls, rows: int, device: torch.device, form: Form, records: bool) -> Callable[[], None]:
    """The calls, made once, to be made again; with `records` as a CUDA graph, where it can be one: no launch then takes time."""
    run = partial(replay, calls, rows, device, form)
    run()
    with suppress(Exception):
        if records:
            graph = torch.cuda.CUDAGraph()
            # A recording that fails leaves its stream the current one.
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                run()
            return graph.replay
    return run


def _operand(x: Tensor) -> Operand:
    return Operand(tuple(x.shape[1:]), tuple(sorted(range(x.dim()), key=x.stride, reverse=True)), x.dtype)


def _random(operand: Operand, rows: int, device: torch.device) -> Tensor:
    empty = torch.empty_permuted((rows, *operand.sizes), operand.order, dtype=operand.dtype, device=device)
    return empty.normal_().requires_grad_()


# How many threads a CPU computes with. Another number adds up in another order, so a run keeps the one that it began with.

VARIABLE = "OMP_NUM_THREADS"  # of OpenMP, which torch follows
FASTER = 0.9  # of the time that more threads take: for less it is not worth to leave torch's own number


def settle_threads(
    asked: int | Literal["auto"], kept: Mapping[str, Any], measures: bool, attempt: Callable[[], None], maximum: Agree
) -> int:
    """Let torch compute with the threads that are asked for, that the run had, or that are fastest; returns how many."""
    threads = torch.get_num_threads()  # also of runs whose checkpoints do not say
    if asked != "auto":
        threads = asked
    elif int(kept.get("threads", threads)) <= cpu_count() and kept:
        threads = int(kept.get("threads", threads))
    elif measures and VARIABLE not in os.environ:
        threads = fastest_threads(attempt, maximum)
    torch.set_num_threads(threads)
    return threads


def fastest_threads(attempt: Callable[[], None], maximum: Agree) -> int:
    """How many threads, torch's own number or halves of it, take the least time for a forward and backward pass by `attempt`.

    The slowest rank's time counts. Where others compute too, threads wait for each other: two took three times as long as one.
    """
    best = count = int(maximum([torch.get_num_threads()])[0])
    least = math.inf
    while count:
        torch.set_num_threads(count)
        attempt()  # threads are started, memory is taken
        seconds = maximum([min(seconds_of(attempt) for _ in range(2))])[0]
        if seconds > FASTER * least:
            break
        best, least, count = count, seconds, count // 2
    return best


# Whether a model can be trained on a device at all, by its size: the system grants more memory than it has and then kills.


def device_bytes(device: Device) -> int | None:
    """The memory that a model on this device lives in; None where the system does not tell."""
    return torch.cuda.get_device_properties(device.index).total_memory if device.kind == "cuda" else host_bytes()


def recomputed(config: Config, vocab_size: int, device: Device) -> int:
    """Every how many-th block is computed again in the backward pass; 0: none."""
    return recomputed_every(config, vocab_size, device_bytes(device))


def in_parts(score: Callable[[Batch], float], batch: Batch) -> float:
    """The summed score of a batch, in halves where the GPU's memory, which was tried with a step's rows, does not hold it all."""
    try:
        return score(batch)
    except torch.OutOfMemoryError:
        if len(batch) == 1:
            raise
    half = len(batch) // 2  # out here, where the error no longer holds what was computed
    return in_parts(score, batch[:half]) + in_parts(score, batch[half:])


def refuse_too_large(config: Config, vocab_size: int, device: Device, world_size: int) -> None:
    """Refuse a model of ours whose state does not fit, before any of it is made; one of one's own says nothing of its size."""
    if (size := model_size(config, vocab_size)) is None:
        return
    state, rows, host = state_bytes(config, size), step_bytes(config, world_size), host_bytes()
    on_gpu = device.kind == "cuda"
    needs = [("this machine", (FLOAT * size.total if on_gpu else state) + rows, host)]  # weights are drawn on the host
    if on_gpu:
        needs.append((device.name, state, device_bytes(device)))
    for name, needed, there in needs:
        if there is not None and needed > there:
            raise ConfigError(
                f"training {size.total:,} parameters takes at least {needed / 2**30:,.1f} GiB and {name} has "
                f"{there / 2**30:,.1f} GiB",
                Setting("training.tokens_per_step"),
                advice="take a smaller model or lower {0}" if rows > state else "take a smaller model",
            )


# A head whose products have 8 bits: which runs can have it, and why others cannot.

MULTIPLE = 16  # that sizes of 8-bit products have to be of
LEAST = (8, 9)  # compute capability
ASKED = Setting("training.fp8_head", "true")


def use_fp8_head(model: nn.Module, config: Config, device: Device, precision: str) -> None:
    """Let the head of a model have 8-bit products while it trains, or say why it cannot."""
    nvidia = device.kind == "cuda" and torch.version.hip is None
    refuse_fp8_head(model, config, precision, torch.cuda.get_device_capability(device.index) if nvidia else None)
    model.fp8_head = True  # type: ignore[assignment]


def refuse_fp8_head(model: nn.Module, config: Config, precision: str, capability: tuple[int, int] | None) -> None:
    """Refuse what 8-bit products do not take; `capability` is that of an NVIDIA GPU."""
    training = config.training
    if not hasattr(model, "fp8_head"):
        raise ConfigError("{0} needs a model of ours; one of your own computes its loss itself", ASKED)
    if capability is None or capability < LEAST:
        has = "is none" if capability is None else f"has {capability[0]}.{capability[1]}"
        raise ConfigError(f"{{0}} needs an NVIDIA GPU of compute capability 8.9 or more and this {has}; leave it out", ASKED)
    if precision != "bf16":
        raise ConfigError("{0} needs {1}", ASKED, Setting("training.precision", "bf16"))
    if training.loss_chunk is not None:
        raise ConfigError(
            "{0} does not go together with {1}; keep one", ASKED, Setting("training.loss_chunk", training.loss_chunk)
        )
    words, width = model.head.shape  # type: ignore[misc, union-attr]
    lengths = {config.data.seq_len, *(stage.seq_len for stage in training.stages if stage.seq_len)}
    sizes = [("model.vocab_size", words), ("model.width", width), *(("data.seq_len", length) for length in sorted(lengths))]
    for name, size in sizes:
        if size % MULTIPLE:
            raise ConfigError(
                f"{{0}} needs multiples of {MULTIPLE} and {{1}}; the next is {MULTIPLE * math.ceil(size / MULTIPLE)}",
                ASKED,
                Setting(name, size),
            )


def refuse_unless_it_runs(attempt: Callable[[], None], maximum: Agree) -> None:
    """Say that a pass with such a head does not run here, where it does not."""
    failure = failure_of(attempt)
    if maximum([failure is not None])[0]:
        raise ConfigError(f"{{0}} does not run here: {failure or 'on another rank'}", ASKED)
