"""Trials before a run that choose micro-batch size, kernels, attention and threads; checks of memory and the fp8 head.

All ranks make the same choices: a trial fails if it fails on any rank, and its time is that of the slowest rank.
The choices for a configuration are cached on the machine (`Choices`), because the trials take seconds.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn.attention import SDPBackend

from ingot.config.memory import FLOAT, model_size, state_bytes, step_bytes
from ingot.config.schema import Config, DataSection, Kernel, TrainingSection
from ingot.errors import ConfigError, Setting
from ingot.model import kernels
from ingot.model.gpt2 import GPT2
from ingot.model.kernels.flash import packed_flash_attention
from ingot.model.layers import Form, causal_attention, uses_flash
from ingot.model.registry import OURS
from ingot.model.settings import FileSettings, ModelSettings
from ingot.runtime.devices import Device
from ingot.runtime.files import file_sha256, read_json, user_path, write_atomically
from ingot.runtime.machine import OF_KERNELS, cache_root, has_flash4, host_bytes, installed, keep_compiled_kernels, made_by
from ingot.runtime.processes import cpu_count

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GROUPED = "-grouped"  # suffix of the names of kernels that support fewer key and value heads than query heads (GQA)
ATTENTION = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
FLASH4 = "flash4"  # FlashAttention 4 from its own package; models call it directly instead of through SDPA
CUDNN_FLASH4 = "cudnn-flash4"  # FlashAttention 4's backward pass and cuDNN's forward pass

MaxOverRanks = Callable[[Sequence[float]], list[float]]  # returns the maximum of each value over all ranks


def failure_of(attempt: Callable[[], None], maximum: MaxOverRanks) -> str | None:
    """Call `attempt`; return None if it succeeds on all ranks, else a one-line reason. Real bugs will resurface in training."""
    failure = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about attention kernels that do not support a shape or dtype
            attempt()
    except Exception as error:  # compilers and drivers may raise any exception
        failure = f"{type(error).__name__}: {error}".splitlines()[0]
    return (failure or "on another rank") if maximum([failure is not None])[0] else None


def seconds_of(attempt: Callable[[], None]) -> float:
    """Call a function and return the seconds it took."""
    began = time.perf_counter()
    attempt()
    return time.perf_counter() - began


# Micro-batch size: the smallest that is about as fast per row as the largest that fits into memory.

HOST_MICRO_BATCH_TOKENS = 16384  # on a CPU, larger micro-batches take more memory but are no faster
# Trials launch about twice as many kernels as a compiled step, so what slows trials down by 2% slows a step down by about 1%.
# In a compiled step of recipe golf/seq4096 with 96 rows, micro-batches of 48 rows take 0.9% longer, and those of 24 rows 2.8%.
MAX_SLOWDOWN = 1.02


@dataclass(frozen=True)
class Tuned:
    """The micro-batch size and attention kernel that were chosen for the steps of a stage."""

    micro_batch: int
    attention: str


def largest_micro_batch(rows: int, attempt: Callable[[int], None], maximum: MaxOverRanks) -> int:
    """Halve `rows` until `attempt(rows)`, a forward and backward pass, fits into memory on all ranks; return the result."""
    size = rows
    while True:
        full = False
        try:
            attempt(size)
        except torch.OutOfMemoryError:
            full = True
        if not maximum([full])[0]:  # no rank ran out of memory
            return size
        gc.collect()  # after the except block: inside it, the exception would keep tensors alive
        torch.cuda.empty_cache()
        if size == 1:
            raise ConfigError(
                "one row of {0} tokens does not fit into the GPU's memory",
                Setting("data.seq_len"),
                Setting("training.gradient_checkpointing", "true"),
                advice="lower {0}, shrink the model or set {1}",
            )
        size = (size + 1) // 2


def smallest_micro_batch(largest: int, attempt: Callable[[int, int], None], maximum: MaxOverRanks) -> int:
    """Halve the micro-batch size, starting from `largest`; return the smallest that is about as fast per row as the fastest.

    `attempt(rows, times)` runs `times` passes of `rows` rows; a pass of the largest size must have run before. Trials stop at the
    first size that is slower, because each halving doubles the number of kernel launches. Trials of three sizes take about as
    long as five passes of the largest size.
    """
    chosen = size = largest
    least = math.inf
    while True:
        times = max(1, largest // (2 * size))
        seconds = math.inf  # stays infinite if memory runs out, for example because another program takes it
        try:
            if size != largest:
                attempt(size, 1)  # warm up: load kernels, allocate memory
            seconds = min(seconds_of(partial(attempt, size, times)) for _ in range(2))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        per_row = maximum([seconds])[0] / (size * times)
        if per_row > MAX_SLOWDOWN * least:
            return chosen
        chosen, least = size, min(least, per_row)
        if size % 2:  # unequal micro-batches would need two graphs
            return chosen
        size //= 2


# A cache, on this machine, of what the trials chose for each configuration, so that later runs can skip the trials.

SHAPE_KEYS = (
    "tokens_per_step", "stages", "micro_batch", "precision", "compile", "deterministic", "loss_chunk", "kernels",
    "fp8_head", "gradient_checkpointing", "ddp_python_reducer", "cuda_graphs",
)  # fmt: skip
TRIALS_VERSION = 6  # increase this when the trials change: choices of other versions are ignored
FREE_SHARE = 0.98  # reuse choices if free GPU memory is at least this fraction of what it was when they were stored


class Choices:
    """Trial results for one configuration, cached in a file; not for CPUs, on which trials choose only the thread count."""

    def __init__(self, model: ModelSettings, data: DataSection, training: TrainingSection, device: Device, world_size: int):
        self._device, self._path = device, None
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
        """Return the choices that `keep` stored, or {} if there are none or if available GPU memory has dropped by over 2%."""
        if self._path is not None:
            with suppress(OSError, ValueError, KeyError, TypeError):
                note = read_json(self._path)
                if note["free"] * FREE_SHARE <= self._available_bytes():
                    return dict(note["choices"])
        return {}

    def keep(self, choices: dict[str, Any]) -> None:
        """Store the choices, or {} to drop choices that ran out of memory. If writing fails, the next run repeats the trials."""
        if self._path is not None:
            with suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                note = json.dumps({"free": self._available_bytes(), "choices": choices}, indent=1)
                write_atomically(self._path, note, durable=False)

    def _available_bytes(self) -> int:
        """Return how many bytes of GPU memory this process has reserved or could still allocate."""
        return torch.cuda.mem_get_info(self._device.index)[0] + torch.cuda.memory_reserved(self._device.index)


# Our kernels: by default, a model uses every kernel that passes a trial on this machine.

KERNELS: tuple[str, ...] = get_args(Kernel)  # docs/experiments.md gives the speedup of each kernel
PER_LAYER = ("rotary", "qkv", "mlp", "gate")  # kernels that run in each layer: the host needs 0.1 to 0.2 ms to launch one
WITH_FLASH4 = ("qkv",)  # used only with FlashAttention 4
SHORT_STEP_TOKENS = 32768  # shorter steps are launch-bound: 12 x 1,024 tokens took 27.5 ms with the kernel `mlp`, 24.3 without

Requested = Literal["auto", "off"] | Sequence[str]


def tag_compiler_cache() -> None:
    """Add a hash of our kernels' source code to the cache keys of torch's compiler, which otherwise contain only their names.

    Without the hash, a graph cached by another version of Ingot could call a kernel with the wrong arguments.
    """
    settings: Any = torch.compiler.config
    if not settings.cache_key_tag:  # do not replace a tag set by the user
        sources = sorted(Path(kernels.__path__[0]).glob("*.py"))
        settings.cache_key_tag = "ingot " + hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:16]


def kernels_to_try(requested: Requested, launch_bound: bool) -> list[str]:
    """Return the requested kernels; `auto` selects all or, if the run is launch-bound, all except those in PER_LAYER."""
    if requested == "auto":
        return [name for name in KERNELS if not (launch_bound and name in PER_LAYER)]
    return [name for name in KERNELS if requested != "off" and name in requested]


def settle_kernels(
    model: nn.Module,
    requested: Requested,
    previous: Sequence[str] | None,
    supported: bool,
    launch_bound: bool,
    attempt: Callable[[str | None], None] | None,
    maximum: MaxOverRanks,
) -> list[str]:
    """Enable the requested kernels that pass a trial; return their names. If `previous` is given, try only the kernels in it.

    `attempt(attention)` runs a pass with that attention kernel, or with torch's choice if None; if `attempt` is None, kernels are
    enabled without a trial. `supported` is True if our kernels support the device and dtype. Raises ConfigError if a kernel
    requested by name fails.
    """
    chosen: list[str] = []
    for name in kernels_to_try(requested, launch_bound):
        found = supported and any(hasattr(module, f"fused_{name}") for module in model.modules())
        if not found or (previous is not None and name not in previous):
            continue
        use_kernels(model, [*chosen, name])
        trial = attempt and partial(attempt, FLASH4 if name in WITH_FLASH4 else None)
        failure = failure_of(trial, maximum) if trial else None
        if failure is None:
            chosen.append(name)
        elif requested != "auto":
            use_kernels(model, [])
            raise ConfigError(f"{{0}}: {name} failed a test run: {failure}", Setting("training.kernels"))
    use_kernels(model, chosen)
    return chosen


def use_kernels(model: nn.Module, names: Collection[str]) -> None:
    """Enable our kernels with these names in all modules of the model, and disable the others."""
    for module in model.modules():
        for name in KERNELS:
            if hasattr(module, f"fused_{name}"):
                setattr(module, f"fused_{name}", name in names)


# Attention kernels.

ENOUGH_SCORES = 2**32  # attention scores per timed trial, forward and backward: 5 ms on an H200; more would not improve accuracy


def attention_form(name: str) -> Form:
    """Return the `form` that attention modules must have for an attention kernel."""
    forms: dict[str, Form] = {FLASH4: "flash4", CUDNN_FLASH4: "cudnn-flash4"}
    return forms.get(name, "grouped" if name.endswith(GROUPED) else "repeated")


def use_form(model: nn.Module, form: Form) -> None:
    """Set the form of attention in all layers of a built-in model; leave custom models unchanged."""
    if form.endswith("flash4"):
        keep_compiled_kernels()
    for module in model.modules() if isinstance(model, OURS) else ():  # in custom models `form` could mean anything
        if hasattr(module, "form"):
            module.form = form  # type: ignore[assignment]


def query_heads(model: Any) -> int:
    """Return the number of query heads of a built-in model."""
    return int(model.embedding_weight.size(1)) // int(model.head_size)


def candidates(model: Any, alone: bool, documents: bool, maximum: MaxOverRanks) -> list[str]:
    """Return the attention kernels to time. With `documents`, only FlexAttention (`default`) and FlashAttention 4 are possible.

    Set `alone` if only attention is timed, causal and without dropout; without `documents`, FlashAttention 4 requires `alone`.
    """
    flash4 = flash4_everywhere(model, maximum)
    if documents:
        return ["default", FLASH4] if flash4 else []
    fewer = isinstance(model, OURS) and model.kv_heads != query_heads(model)
    torch_kernels = [*ATTENTION, *(f"{name}{GROUPED}" for name in ATTENTION if fewer)]
    fused = any(getattr(module, "fused_qkv", False) for module in model.modules())  # qkv needs FlashAttention 4 in both passes
    return [*torch_kernels, FLASH4, *([] if fewer or fused else [CUDNN_FLASH4])] if alone and flash4 else torch_kernels


def flash4_everywhere(model: nn.Module, maximum: MaxOverRanks) -> bool:
    """Return True if the model is built in and FlashAttention 4 is installed on all ranks: all must try the same kernels."""
    return isinstance(model, OURS) and not maximum([not has_flash4()])[0]


def fastest_attention(
    names: Sequence[str], attempt: Callable[[str, int], None], deterministic: bool, maximum: MaxOverRanks
) -> str:
    """Return the name of the fastest kernel, or `default` if none runs; `attempt(name, times)` runs `times` passes.

    If `deterministic`, return the first kernel that runs, because timings differ from run to run.
    """
    running = []
    for name in names:
        if failure_of(partial(attempt, name, 1), maximum) is None:
            if deterministic:
                return name
            running.append(name)
    if len(running) < 2:
        return running[0] if running else "default"
    # Time all kernels once and then again, so that a temporary slowdown of the device does not affect only one of them.
    turns = [[maximum([seconds_of(partial(attempt, name, 3))])[0] for name in running] for _ in range(2)]
    return min(zip(map(min, *turns), running, strict=True))[1]


def attention_alone(
    model: Any, rows: int, length: int, precision: str, device: torch.device, form: Form, records: bool
) -> Callable[[], None]:
    """Return a function that runs a built-in model's attention on random numbers, forward and backward, at most once per layer.

    The gpt2 family computes queries, keys and values in one matmul, so the time to pack their gradients into one
    tensor is included. With `records`, the passes are replayed as a CUDA graph if possible, which excludes launch times.
    """
    heads, size = query_heads(model), model.head_size
    packed = isinstance(model, GPT2)
    make = partial(torch.randn, dtype=DTYPES[precision], device=device, requires_grad=True)
    shapes = [(3, heads, size)] if packed else [(heads, size), (model.kv_heads, size), (model.kv_heads, size)]
    inputs = [make((rows, length, *shape)) for shape in shapes]
    times = max(1, min(len(model.blocks), ENOUGH_SCORES // (rows * heads * length**2)))

    def passes() -> None:
        for _ in range(times):
            if packed and uses_flash(form, None):
                y = packed_flash_attention(inputs[0], cudnn=form != "flash4")
            else:
                q, k, v = (x.transpose(1, 2) for x in (inputs[0].unbind(2) if packed else inputs))
                y = causal_attention(q, k, v, form=form)
            torch.autograd.grad(y, inputs, y.detach())

    passes()
    with suppress(Exception):
        if records:
            graph = torch.cuda.CUDAGraph()
            # Restore the current stream: a capture that fails leaves its own stream current.
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                passes()
            return graph.replay
    return passes


# CPU threads. Sums are computed in an order that depends on the number of threads, so a resumed run keeps this number.

THREADS_VARIABLE = "OMP_NUM_THREADS"  # OpenMP's variable, which torch respects
MIN_SPEEDUP = 0.9  # use fewer threads only if they take at most this fraction of the time


def settle_threads(
    requested: int | Literal["auto"], kept: Mapping[str, Any], measures: bool, attempt: Callable[[], None], maximum: MaxOverRanks
) -> int:
    """Set and return torch's thread count: `requested` or, if `auto`, the one in `kept`, the fastest or the default."""
    threads = torch.get_num_threads()  # torch's default, also used if `kept` has no thread count
    if requested != "auto":
        threads = requested
    elif kept and int(kept.get("threads", threads)) <= cpu_count():
        threads = int(kept.get("threads", threads))
    elif measures and THREADS_VARIABLE not in os.environ:
        # Halve torch's default thread count while that helps: on a busy machine, two threads took three times as long as one.
        threads = count = int(maximum([threads])[0])
        least = math.inf
        while count:
            torch.set_num_threads(count)
            attempt()  # warm up: start threads, allocate memory
            seconds = maximum([min(seconds_of(attempt) for _ in range(2))])[0]
            if seconds > MIN_SPEEDUP * least:
                break
            threads, least, count = count, seconds, count // 2
    torch.set_num_threads(threads)
    return threads


# Memory: reject models that are too large to train; otherwise the system would overcommit memory and kill the process later.


def refuse_too_large(
    config: Config, vocab_size: int, device: Device, memory: int | None, world_size: int, shards: int = 1
) -> None:
    """Raise ConfigError if training a built-in model would not fit into memory; `memory` is the GPU's memory in bytes."""
    if (size := model_size(config, vocab_size)) is None:
        return
    state, rows, host = state_bytes(config, size) // shards, step_bytes(config, world_size), host_bytes()

    needs = [("this machine", state + rows, host)]
    if device.kind == "cuda" and not config.training.cpu_offload:  # the host holds only the initial weights and input rows
        needs = [("this machine", FLOAT * size.total + rows, host), (device.name, state, memory)]
    for name, needed, available in needs:
        if available is not None and needed > available:
            raise ConfigError(
                f"training {size.total:,} parameters takes at least {needed / 2**30:,.1f} GiB, but {name} has "
                f"{available / 2**30:,.1f} GiB",
                Setting("training.tokens_per_step"),
                advice="use a smaller model or lower {0}" if rows > state else "use a smaller model",
            )


# The fp8 head: an output head with fp8 matmuls.

FP8_ALIGNMENT = 16  # all dimensions of fp8 matmuls must be multiples of this
FP8_CAPABILITY = (8, 9)  # the lowest compute capability that supports fp8 matmuls
FP8_HEAD = Setting("training.fp8_head", "true")


def use_fp8_head(
    model: nn.Module, seq_len: int, training: TrainingSection, precision: str, capability: tuple[int, int] | None
) -> None:
    """Enable fp8 matmuls in the output head; raise ConfigError if the model, a setting or the GPU does not support them."""
    if not hasattr(model, "fp8_head"):
        raise ConfigError("{0} needs a built-in model; a custom model computes its loss itself", FP8_HEAD)
    if capability is None or capability < FP8_CAPABILITY:
        raise ConfigError("{0} needs an NVIDIA GPU of compute capability 8.9 or higher; leave it out", FP8_HEAD)
    if precision != "bf16":
        raise ConfigError("{0} needs {1}", FP8_HEAD, Setting("training.precision", "bf16"))
    if (chunk := training.loss_chunk) is not None:
        raise ConfigError("{0} cannot be combined with {1}; keep one", FP8_HEAD, Setting("training.loss_chunk", chunk))
    vocabulary, width = model.head.shape  # type: ignore[misc, union-attr]
    lengths = sorted({seq_len, *(stage.seq_len for stage in training.stages if stage.seq_len)})
    sizes = [("model.vocab_size", vocabulary), ("model.width", width), *(("data.seq_len", length) for length in lengths)]
    for name, size in sizes:
        if size % FP8_ALIGNMENT:
            above = FP8_ALIGNMENT * math.ceil(size / FP8_ALIGNMENT)
            setting = Setting(name, size)
            raise ConfigError(f"{{0}} needs sizes divisible by {FP8_ALIGNMENT}; raise {{1}} to {above}", FP8_HEAD, setting)
    model.fp8_head = True  # type: ignore[assignment]
