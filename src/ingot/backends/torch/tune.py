"""Measurements and checks before a run: micro-batch, attention, kernels, threads, memory, the fp8 head.

Every choice is the same on all ranks: a trial counts as failed if it fails on one rank, and takes the slowest rank's time.
Results for a shape are kept on the machine (`Choices`), because finding them takes seconds.
"""

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
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.backends.torch.precision import ATTENTION, CUDNN_FLASH4, FLASH4, GROUPED
from ingot.config.schema import Config, DataSection, Kernel, TrainingSection
from ingot.config.size import FLOAT, model_size, state_bytes, step_bytes
from ingot.errors import ConfigError, RunError, Setting
from ingot.model import kernels
from ingot.model.kernels.flash import packed_flash_attention
from ingot.model.layers import Form, causal_attention, repeat_kv, uses_flash
from ingot.model.registry import OURS
from ingot.model.settings import FileSettings, ModelSettings
from ingot.runtime.devices import Device
from ingot.runtime.files import file_sha256, read_json, user_path, write_atomically
from ingot.runtime.machine import OF_KERNELS, cache_root, has_flash4, host_bytes, installed, keep_compiled_kernels, made_by
from ingot.runtime.processes import cpu_count
from ingot.runtime.tensors import Batch

MaxOverRanks = Callable[[Sequence[float]], list[float]]  # each value's maximum over the ranks

# Micro-batches: the fewest rows at once that are about as fast per row as the most that fit.

HOST_MICRO_BATCH_TOKENS = 16384  # larger micro-batches only cost memory on a CPU
# Trials are not compiled, and a further micro-batch costs the launch and tail of each kernel, of which they have about twice as
# many: 2% of their time stands for 1% of a step's (golf seq4096, compiled: 48 rows of 96 take 0.9% more, 24 2.8%).
MAX_SLOWDOWN = 1.02


@dataclass(frozen=True)
class Tuned:
    """The choices for the steps of one stage."""

    micro_batch: int
    attention: str


def largest_micro_batch(rows: int, attempt: Callable[[int], None], maximum: MaxOverRanks) -> int:
    """Return the most rows whose forward and backward pass, run by `attempt`, fits into every rank's memory, by halving."""
    size = rows
    while True:
        full = False
        try:
            attempt(size)
        except torch.OutOfMemoryError:
            full = True
        if not maximum([full])[0]:  # all ranks try the same sizes
            return size
        gc.collect()  # only now that the error is gone, which holds the frames it was raised in
        torch.cuda.empty_cache()
        if size == 1:
            raise ConfigError(
                "one row of {0} tokens does not fit into the GPU's memory",
                Setting("data.seq_len"),
                Setting("training.gradient_checkpointing", "true"),
                advice="shorten it, shrink the model or set {1}",
            )
        size = (size + 1) // 2


def out_of_memory(step: int, micro_batch: int, cuda_graphs: bool) -> RunError:
    """Return the error that ends a run whose step does not fit into memory after all."""
    return RunError(
        f"the GPU's memory is full at step {step} with micro-batches of {micro_batch} rows",
        Setting("training.micro_batch"),
        Setting("training.gradient_checkpointing", "true"),
        Setting("training.cuda_graphs", "false"),
        advice="lower {0}, or set {1} or {2}, and start again" if cuda_graphs else "lower {0} or set {1}, and start again",
    )


def smallest_micro_batch(largest: int, attempt: Callable[[int, int], None], maximum: MaxOverRanks) -> int:
    """Return the smallest of the halves, quarters and so on of `largest` rows that is about as fast per row as the fastest.

    `attempt(rows, times)` runs passes; one of the largest has been run before. Trials end with the first size that is slower,
    because each halving doubles the number of kernel launches. Where the first halving pays, they take as long as five passes of
    the largest size.
    """
    chosen = size = largest
    least = math.inf
    while True:
        times = max(1, largest // (2 * size))
        per_row = maximum([_least_seconds(partial(attempt, size), times, size != largest)])[0] / (size * times)
        if per_row > MAX_SLOWDOWN * least:
            return chosen
        chosen, least = size, min(least, per_row)
        if size % 2:  # halves of unequal sizes would be two graphs
            return chosen
        size //= 2


def _least_seconds(attempt: Callable[[int], None], times: int, warm_up: bool) -> float:
    """Return the better of two timings; infinite if memory runs out, as beside another program that takes some meanwhile."""
    try:
        if warm_up:
            attempt(1)  # loads kernels, allocates memory
        return min(seconds_of(partial(attempt, times)) for _ in range(2))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return math.inf


def seconds_of(attempt: Callable[[], None]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    attempt()
    return time.perf_counter() - began


def works(attempt: Callable[[], None]) -> bool:
    """Return whether a kernel takes this shape and dtype: one of torch's that does not warns and raises a RuntimeError.

    One of another package may raise anything. An error of the pass itself is raised again by the first step.
    """
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attempt()
        return True
    return False


def score_in_parts(score: Callable[[Batch], float], batch: Batch) -> float:
    """Return the summed score of a batch, halving it where the GPU's memory, tried with a step's rows, does not hold it all."""
    try:
        return score(batch)
    except torch.OutOfMemoryError:
        if len(batch) == 1:
            raise
    half = len(batch) // 2  # outside of the except block, where the error no longer holds what was computed
    return score_in_parts(score, batch[:half]) + score_in_parts(score, batch[half:])


# Choices for a shape on this machine, kept for later runs.

SHAPE_KEYS = (
    "tokens_per_step", "stages", "micro_batch", "precision", "compile", "deterministic", "loss_chunk", "kernels",
    "fp8_head", "gradient_checkpointing", "ddp_python_reducer", "cuda_graphs",
)  # fmt: skip
TRIALS_VERSION = 6  # changes with what is tried and how: choices of another version are not used
FREE_SHARE = 0.98  # choices are used if at least this share of the memory that was free then is free now


class Choices:
    """The file with the choices for one shape; none without a GPU, as a CPU's choices follow from the settings."""

    def __init__(self, model: ModelSettings, data: DataSection, training: TrainingSection, device: Device, world_size: int):
        self._device = device
        self._path = None
        if device.kind == "cuda":
            facts = {
                "model": model.model_dump(mode="json"),
                "file": file_sha256(user_path(model.file)) if isinstance(model, FileSettings) else None,
                "data": [data.seq_len, data.document_mask],
                "training": training.model_dump(mode="json", include=set(SHAPE_KEYS)),
                "device": [device.name, world_size],
                "versions": [
                    TRIALS_VERSION,
                    made_by(),
                    torch.__version__,
                    torch.version.cuda,
                    torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
                    installed(OF_KERNELS),
                ],
            }
            digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
            self._path = cache_root() / "choices" / f"{digest}.json"

    def recall(self) -> dict[str, Any]:
        """Return the choices that `keep` was given; empty where there are none or less memory is free."""
        if self._path is None:
            return {}
        with suppress(OSError, ValueError, KeyError, TypeError):
            note = read_json(self._path)
            if note["free"] * FREE_SHARE <= self._available_bytes():
                return dict(note["choices"])
        return {}

    def keep(self, choices: dict[str, Any]) -> None:
        """Write the choices; if that fails, the next run measures again."""
        if self._path is not None:
            with suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                note = json.dumps({"free": self._available_bytes(), "choices": choices}, indent=1)
                write_atomically(self._path, note, durable=False)

    def _available_bytes(self) -> int:
        """Return the bytes of the GPU that this process holds or could allocate."""
        return torch.cuda.mem_get_info(self._device.index)[0] + torch.cuda.memory_reserved(self._device.index)

    def forget(self) -> None:
        """Remove the choices: they did not fit into memory after all."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)


# Our kernels: a model uses all of them, or the requested ones, if a trial shows that they run on this machine.

KERNELS: tuple[str, ...] = get_args(Kernel)  # docs/experiments.md says what each is worth
PER_LAYER = ("rotary", "qkv", "mlp", "gate")  # operations of ours in every layer: launching one takes the host 0.1 to 0.2 ms
WITH_FLASH4 = ("qkv",)  # used with that attention alone
SHORT_STEP_TOKENS = 32768  # a rank's step up to this waits for the host: 12 x 1,024 took 27.5 ms with `mlp` and 24.3 without

Requested = Literal["auto", "off"] | Sequence[str]


def tag_compiler_cache() -> None:
    """Add the sources of our kernels to the keys of the compiler's caches, which know operations by their names alone.

    Otherwise a cached graph of another version would call an operation with other arguments.
    """
    settings: Any = torch.compiler.config
    if not settings.cache_key_tag:  # else the user has set one and takes care of it
        sources = sorted(Path(kernels.__path__[0]).glob("*.py"))
        settings.cache_key_tag = "ingot " + hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:16]


def is_short(batch: Batch, maximum: MaxOverRanks) -> bool:
    """Return whether a step of such a batch on each rank ends before the host has launched the next one's kernels."""
    return maximum([batch[:, 0].size])[0] <= SHORT_STEP_TOKENS  # shares of a step may differ by a row


def kernels_to_try(requested: Requested, launch_bound: bool) -> list[str]:
    """Return the kernels that a run tries where its model has them; `launch_bound`: its steps wait for the host's launches."""
    fast = [name for name in KERNELS if not (launch_bound and name in PER_LAYER)]
    wanted = {"auto": fast, "off": ()}.get(requested, requested) if isinstance(requested, str) else requested
    return [name for name in KERNELS if name in wanted]


def settle_kernels(
    model: nn.Module,
    requested: Requested,
    previous: Sequence[str] | None,
    supported: bool,
    launch_bound: bool,
    attempt: Callable[[str | None], None] | None,
    maximum: MaxOverRanks,
) -> list[str]:
    """Switch on the requested kernels with which a pass runs, or the `previous` ones of an earlier session; return their names.

    `attempt(attention)` runs a pass, with torch's choice of attention if None; without `attempt` the previous kernels are known
    to run. `supported`: the device and dtype are those the kernels are made for. A kernel requested by name that does not run is
    an error.
    """
    names = [name for name in kernels_to_try(requested, launch_bound) if supported and has_kernel(model, name)]
    if previous is not None:
        names = [name for name in names if name in previous]
    if attempt is None:
        use_kernels(model, names)
        return names
    chosen: list[str] = []
    for name in names:
        use_kernels(model, [*chosen, name])
        failure = failure_of(partial(attempt, FLASH4 if name in WITH_FLASH4 else None))
        if not maximum([failure is not None])[0]:
            chosen.append(name)
        elif requested != "auto":
            use_kernels(model, [])
            raise ConfigError(f"{{0}}: {name} does not run here: {failure or 'on another rank'}", Setting("training.kernels"))
    use_kernels(model, chosen)
    return chosen


def has_kernel(model: nn.Module, name: str) -> bool:
    """Return whether a part of the model can use a kernel."""
    return any(hasattr(module, f"fused_{name}") for module in model.modules())


def use_kernels(model: nn.Module, names: Collection[str]) -> None:
    """Let the parts of the model use these kernels and no others."""
    for module in model.modules():
        for name in KERNELS:
            if hasattr(module, f"fused_{name}"):
                setattr(module, f"fused_{name}", name in names)


def failure_of(attempt: Callable[[], None]) -> str | None:
    """Return the first line of the error that a call raises: a compiler, a driver or a missing package may raise anything."""
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


# Attention kernels, timed by the calls of the model alone.


class Operand(NamedTuple):
    """Queries, keys or values: their sizes after the batch dimension, the order of dimensions in memory, their dtype."""

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype


class Call(NamedTuple):
    """A call of attention: its operands, and whether one matmul packed them, whose gradient is made of theirs."""

    query: Operand
    key: Operand
    value: Operand
    packed: bool


Calls = Counter[Call]
ENOUGH_SCORES = 2**32  # scores of all calls together, 5 ms of an H200 with their gradients: more tell kernels apart no better


@contextmanager
def recorded_attention(model: nn.Module) -> Iterator[Calls]:
    """Count a model's calls of causal attention; others have masks or dropout, which leave no choice or do not train fast.

    None are counted for a custom model with fewer key heads than query heads: only whole passes show which kernels take them.
    """
    calls: Calls = Counter()
    ours, countable = isinstance(model, OURS), True
    plain = F.scaled_dot_product_attention

    def recorded(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal countable
        countable = countable and (ours or key.size(1) == query.size(1))
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
        if not countable:
            calls.clear()


def enough(calls: Calls, rows: int) -> Calls:
    """Return as many of the calls as timing them for `rows` rows takes, in the same proportion, each at least once."""
    scores = sum(rows * math.prod(call.query.sizes[:2]) * call.key.sizes[1] * times for call, times in calls.items())
    return Counter({call: max(1, round(times * min(1.0, ENOUGH_SCORES / scores))) for call, times in calls.items()})


def candidates(model: nn.Module, calls: Calls, documents: bool, maximum: MaxOverRanks) -> list[str]:
    """Return the attention kernels to time; rows of documents are FlexAttention's or FlashAttention 4's."""
    flash4 = _flash4_everywhere(model, maximum)
    if documents:
        return ["default", FLASH4] if flash4 else []
    fewer = any(call.key.sizes[0] != call.query.sizes[0] for call in calls)
    torch_kernels = [*ATTENTION, *(f"{name}{GROUPED}" for name in ATTENTION if fewer)]
    fused = any(getattr(module, "fused_qkv", False) for module in model.modules())  # one operation, by FlashAttention alone
    return [*torch_kernels, FLASH4, *([] if fewer or fused else [CUDNN_FLASH4])] if calls and flash4 else torch_kernels


def without_masks(model: nn.Module, batch: Batch, maximum: MaxOverRanks) -> list[str]:
    """Return the kernels that take the window as a number; for others it is a mask, for which FlexAttention is compiled."""
    windowed = isinstance(model, OURS) and getattr(model, "windowed", False)
    if not windowed or model.window >= batch.shape[2] or batch.shape[1] == 3:  # type: ignore[operator]
        return []
    grouped = model.kv_heads * model.head_size != model.embedding.weight.size(1)  # type: ignore[operator,union-attr]
    return [FLASH4, *([] if grouped else [CUDNN_FLASH4])] if _flash4_everywhere(model, maximum) else []


def _flash4_everywhere(model: nn.Module, maximum: MaxOverRanks) -> bool:
    """Return whether the model is one of ours and every rank has FlashAttention 4: all of them try the same kernels."""
    return isinstance(model, OURS) and not maximum([not has_flash4()])[0]


def fastest_attention(
    names: Sequence[str], attempt: Callable[[str, int], None], deterministic: bool, maximum: MaxOverRanks
) -> str:
    """Return the attention kernel whose passes, run by `attempt(name, times)`, take the least time.

    In deterministic mode, the first kernel that runs: times differ from run to run.
    """
    running = []
    for name in names:
        if not maximum([not works(partial(attempt, name, 1))])[0]:
            if deterministic:
                return name
            running.append(name)
    if len(running) < 2:
        return running[0] if running else "default"
    # In turns: what slows the device down for a while, such as having waited for a compiler, then affects no kernel alone.
    turns = [[maximum([seconds_of(partial(attempt, name, 3))])[0] for name in running] for _ in range(2)]
    return min(zip(map(min, *turns), running, strict=True))[1]


def attention_form(name: str) -> Form:
    """Return the form of attention that a kernel needs."""
    if name == CUDNN_FLASH4:
        return "cudnn-flash4"
    return "flash4" if name == FLASH4 else "grouped" if name.endswith(GROUPED) else "repeated"


def use_form(model: nn.Module, form: Form) -> None:
    """Let the attention of a model have this form."""
    if form.endswith("flash4"):
        keep_compiled_kernels()
    for module in model.modules() if isinstance(model, OURS) else ():  # skips custom models, where `form` may mean anything
        if hasattr(module, "form"):
            module.form = form  # type: ignore[assignment]


def replay(calls: Calls, rows: int, device: torch.device, form: Form = "repeated") -> None:
    """Make the calls for `rows` rows, each with its backward pass and as often as it was counted."""
    for call, times in calls.items():
        run = (_packed_pass if call.packed else _pass)(call, rows, device, form)
        for _ in range(times):
            run()


def _pass(call: Call, rows: int, device: torch.device, form: Form) -> Callable[[], None]:
    q, k, v = (_random(operand, rows, device) for operand in (call.query, call.key, call.value))

    def forward_and_backward() -> None:
        y = causal_attention(q, k, v, form=form)
        torch.autograd.grad(y, (q, k, v), y.detach())

    return forward_and_backward


def _packed_pass(call: Call, rows: int, device: torch.device, form: Form) -> Callable[[], None]:
    """Return a pass of attention as the gpt2 family calls it: packing three gradients is part of a kernel's cost."""
    heads, length, size = call.query.sizes
    qkv = torch.randn(rows, length, 3, heads, size, dtype=call.query.dtype, device=device, requires_grad=True)

    def forward_and_backward() -> None:
        if uses_flash(form, None):
            y = packed_flash_attention(qkv, cudnn=form != "flash4")
        else:
            q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
            y = causal_attention(q, k, v, form=form)
        torch.autograd.grad(y, qkv, y.detach())

    return forward_and_backward


def replayed(calls: Calls, rows: int, device: torch.device, form: Form, records: bool) -> Callable[[], None]:
    """Make the calls once and return what repeats them; `records`: as a CUDA graph if possible, without launch times."""
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


# Threads of a CPU. Another number sums in another order, so a run keeps the one it began with.

THREADS_VARIABLE = "OMP_NUM_THREADS"  # OpenMP's, which torch follows
MIN_SPEEDUP = 0.9  # fewer threads must take at most this share of the time to replace torch's own number


def settle_threads(
    requested: int | Literal["auto"], kept: Mapping[str, Any], measures: bool, attempt: Callable[[], None], maximum: MaxOverRanks
) -> int:
    """Set torch's number of threads to the requested one, the run's earlier one, or the fastest; return it."""
    threads = torch.get_num_threads()  # also for runs whose checkpoints do not say
    if requested != "auto":
        threads = requested
    elif int(kept.get("threads", threads)) <= cpu_count() and kept:
        threads = int(kept.get("threads", threads))
    elif measures and THREADS_VARIABLE not in os.environ:
        threads = fastest_threads(attempt, maximum)
    torch.set_num_threads(threads)
    return threads


def fastest_threads(attempt: Callable[[], None], maximum: MaxOverRanks) -> int:
    """Return the number of threads, torch's own or halves of it, with which a pass by `attempt` takes the least time.

    Where other programs compute too, threads wait for each other: two took three times as long as one.
    """
    best = count = int(maximum([torch.get_num_threads()])[0])
    least = math.inf
    while count:
        torch.set_num_threads(count)
        attempt()  # starts threads, allocates memory
        seconds = maximum([min(seconds_of(attempt) for _ in range(2))])[0]
        if seconds > MIN_SPEEDUP * least:
            break
        best, least, count = count, seconds, count // 2
    return best


# Memory: whether a model can be trained on a device at all. The system grants more memory than it has and then kills.


def device_bytes(device: Device) -> int | None:
    """Return the memory that a model on this device lives in; None where the system does not say."""
    return torch.cuda.get_device_properties(device.index).total_memory if device.kind == "cuda" else host_bytes()


def refuse_too_large(config: Config, vocab_size: int, device: Device, world_size: int) -> None:
    """Refuse a model of ours whose state does not fit, before it is built; the size of a custom model is not known."""
    if (size := model_size(config, vocab_size)) is None:
        return
    state, rows, host = state_bytes(config, size), step_bytes(config, world_size), host_bytes()
    on_gpu = device.kind == "cuda"
    needs = [("this machine", (FLOAT * size.total if on_gpu else state) + rows, host)]  # weights are drawn on the host
    if on_gpu:
        needs.append((device.name, state, device_bytes(device)))
    for name, needed, available in needs:
        if available is not None and needed > available:
            raise ConfigError(
                f"training {size.total:,} parameters takes at least {needed / 2**30:,.1f} GiB and {name} has "
                f"{available / 2**30:,.1f} GiB",
                Setting("training.tokens_per_step"),
                advice="take a smaller model or lower {0}" if rows > state else "take a smaller model",
            )


# The fp8 head: which runs can have it.

FP8_ALIGNMENT = 16  # fp8 matmul dimensions must be multiples of this
FP8_CAPABILITY = (8, 9)  # the lowest compute capability with fp8 matmuls
FP8_HEAD = Setting("training.fp8_head", "true")


def use_fp8_head(model: nn.Module, seq_len: int, training: TrainingSection, device: Device, precision: str) -> None:
    """Let the head of a model use fp8 matmuls while training, or refuse."""
    nvidia = device.kind == "cuda" and torch.version.hip is None
    capability = torch.cuda.get_device_capability(device.index) if nvidia else None
    refuse_fp8_head(model, seq_len, training, precision, capability)
    model.fp8_head = True  # type: ignore[assignment]


def refuse_fp8_head(
    model: nn.Module, seq_len: int, training: TrainingSection, precision: str, capability: tuple[int, int] | None
) -> None:
    """Refuse an fp8 head where it is not possible; `capability` is that of an NVIDIA GPU."""
    if not hasattr(model, "fp8_head"):
        raise ConfigError("{0} needs a model of ours; a custom model computes its loss itself", FP8_HEAD)
    if capability is None or capability < FP8_CAPABILITY:
        has = "is none" if capability is None else f"has {capability[0]}.{capability[1]}"
        raise ConfigError(f"{{0}} needs an NVIDIA GPU of compute capability 8.9 or more and this {has}; leave it out", FP8_HEAD)
    if precision != "bf16":
        raise ConfigError("{0} needs {1}", FP8_HEAD, Setting("training.precision", "bf16"))
    if (chunk := training.loss_chunk) is not None:
        raise ConfigError("{0} cannot be combined with {1}; keep one", FP8_HEAD, Setting("training.loss_chunk", chunk))
    vocabulary, width = model.head.shape  # type: ignore[misc, union-attr]
    lengths = {seq_len, *(stage.seq_len for stage in training.stages if stage.seq_len)}
    sizes = [("model.vocab_size", vocabulary), ("model.width", width), *(("data.seq_len", length) for length in sorted(lengths))]
    for name, size in sizes:
        if size % FP8_ALIGNMENT:
            raise ConfigError(
                f"{{0}} needs multiples of {FP8_ALIGNMENT} and {{1}}; "
                f"the next is {FP8_ALIGNMENT * math.ceil(size / FP8_ALIGNMENT)}",
                FP8_HEAD,
                Setting(name, size),
            )


def refuse_unless_fp8_runs(attempt: Callable[[], None], maximum: MaxOverRanks) -> None:
    """Refuse an fp8 head with which a pass does not run on some rank."""
    failure = failure_of(attempt)
    if maximum([failure is not None])[0]:
        raise ConfigError(f"{{0}} does not run here: {failure or 'on another rank'}", FP8_HEAD)
