"""Measurements and checks before a run: micro-batch, kernels, attention, threads, memory, the fp8 head.

Every choice is the same on all ranks: a trial counts as failed if it fails on one rank, and takes the slowest rank's time.
Results for a shape are kept on the machine (`Choices`), because finding them takes seconds.
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
GROUPED = "-grouped"  # suffix of a kernel that takes fewer key and value heads than query heads
ATTENTION = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
FLASH4 = "flash4"  # FlashAttention 4, from its own package: models call it themselves
CUDNN_FLASH4 = "cudnn-flash4"  # FlashAttention 4's backward pass and cuDNN's forward pass

MaxOverRanks = Callable[[Sequence[float]], list[float]]  # each value's maximum over the ranks


def failure_of(attempt: Callable[[], None], maximum: MaxOverRanks) -> str | None:
    """Return the first line of the error if a call fails on any rank; the first step raises an error of the pass itself again."""
    failure = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of attention kernels that do not take a shape or dtype
            attempt()
    except Exception as error:  # a compiler, a driver or a missing package may raise anything
        failure = f"{type(error).__name__}: {error}".splitlines()[0]
    return (failure or "on another rank") if maximum([failure is not None])[0] else None


def seconds_of(attempt: Callable[[], None]) -> float:
    """Call a function and return the seconds it took."""
    began = time.perf_counter()
    attempt()
    return time.perf_counter() - began


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
    """Halve the rows until a forward and backward pass, run by `attempt`, fits into every rank's memory; return the rows."""
    size = rows
    while True:
        full = False
        try:
            attempt(size)
        except torch.OutOfMemoryError:
            full = True
        if not maximum([full])[0]:  # all ranks try the same sizes
            return size
        gc.collect()  # only after the except block: the error keeps its frames alive
        torch.cuda.empty_cache()
        if size == 1:
            raise ConfigError(
                "one row of {0} tokens does not fit into the GPU's memory",
                Setting("data.seq_len"),
                Setting("training.gradient_checkpointing", "true"),
                advice="shorten it, shrink the model or set {1}",
            )
        size = (size + 1) // 2


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
        seconds = math.inf  # stays infinite if memory runs out, for example because another program takes some
        try:
            if size != largest:
                attempt(size, 1)  # loads kernels, allocates memory
            seconds = min(seconds_of(partial(attempt, size, times)) for _ in range(2))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        per_row = maximum([seconds])[0] / (size * times)
        if per_row > MAX_SLOWDOWN * least:
            return chosen
        chosen, least = size, min(least, per_row)
        if size % 2:  # halves of unequal sizes would be two graphs
            return chosen
        size //= 2


# Choices for a shape on this machine, kept for later runs.

SHAPE_KEYS = (
    "tokens_per_step", "stages", "micro_batch", "precision", "compile", "deterministic", "loss_chunk", "kernels",
    "fp8_head", "gradient_checkpointing", "ddp_python_reducer", "cuda_graphs",
)  # fmt: skip
TRIALS_VERSION = 6  # changes with what is tried and how: choices of another version are not used
FREE_SHARE = 0.98  # choices are used if at least this share of the memory that was free then is free now


class Choices:
    """The file with the choices for one shape. CPUs have none: their choices follow from the settings."""

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
        """Return the choices stored by `keep`; empty if there are none or less memory is free now."""
        if self._path is not None:
            with suppress(OSError, ValueError, KeyError, TypeError):
                note = read_json(self._path)
                if note["free"] * FREE_SHARE <= self._available_bytes():
                    return dict(note["choices"])
        return {}

    def keep(self, choices: dict[str, Any]) -> None:
        """Write the choices, or none if they did not fit into memory after all; if that fails, the next run measures again."""
        if self._path is not None:
            with suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                note = json.dumps({"free": self._available_bytes(), "choices": choices}, indent=1)
                write_atomically(self._path, note, durable=False)

    def _available_bytes(self) -> int:
        """Return the bytes of the GPU that this process holds or could allocate."""
        return torch.cuda.mem_get_info(self._device.index)[0] + torch.cuda.memory_reserved(self._device.index)


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


def kernels_to_try(requested: Requested, launch_bound: bool) -> list[str]:
    """Return the kernels that a run tries where its model has them; `launch_bound`: its steps wait for the host's launches."""
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
    """Switch on the requested kernels with which a pass runs, or the `previous` ones of an earlier session; return their names.

    `attempt(attention)` runs a pass, with torch's choice of attention if None; without `attempt` the previous kernels are known
    to run. `supported`: the device and dtype are those the kernels are made for. A kernel requested by name that does not run is
    an error.
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
            raise ConfigError(f"{{0}}: {name} does not run here: {failure}", Setting("training.kernels"))
    use_kernels(model, chosen)
    return chosen


def use_kernels(model: nn.Module, names: Collection[str]) -> None:
    """Let the parts of the model use these kernels and no others."""
    for module in model.modules():
        for name in KERNELS:
            if hasattr(module, f"fused_{name}"):
                setattr(module, f"fused_{name}", name in names)


# Attention kernels.

ENOUGH_SCORES = 2**32  # scores of all timed calls, 5 ms of an H200 with their gradients: more tell kernels apart no better


def attention_form(name: str) -> Form:
    """Return the attention form (`module.form`) that a kernel needs."""
    forms: dict[str, Form] = {FLASH4: "flash4", CUDNN_FLASH4: "cudnn-flash4"}
    return forms.get(name, "grouped" if name.endswith(GROUPED) else "repeated")


def use_form(model: nn.Module, form: Form) -> None:
    """Set the attention form of a built-in model's layers."""
    if form.endswith("flash4"):
        keep_compiled_kernels()
    for module in model.modules() if isinstance(model, OURS) else ():  # skips custom models, where `form` may mean anything
        if hasattr(module, "form"):
            module.form = form  # type: ignore[assignment]


def query_heads(model: Any) -> int:
    """Return the number of query heads of a built-in model."""
    return int(model.embedding_weight.size(1)) // int(model.head_size)


def candidates(model: Any, alone: bool, documents: bool, maximum: MaxOverRanks) -> list[str]:
    """Return the attention kernels to time; rows of documents are FlexAttention's or FlashAttention 4's.

    `alone`: attention is causal and without dropout, so FlashAttention 4 takes it too.
    """
    flash4 = flash4_everywhere(model, maximum)
    if documents:
        return ["default", FLASH4] if flash4 else []
    fewer = isinstance(model, OURS) and model.kv_heads != query_heads(model)
    torch_kernels = [*ATTENTION, *(f"{name}{GROUPED}" for name in ATTENTION if fewer)]
    fused = any(getattr(module, "fused_qkv", False) for module in model.modules())  # one operation, by FlashAttention alone
    return [*torch_kernels, FLASH4, *([] if fewer or fused else [CUDNN_FLASH4])] if alone and flash4 else torch_kernels


def flash4_everywhere(model: nn.Module, maximum: MaxOverRanks) -> bool:
    """Return True if the model is built in and every rank has FlashAttention 4, so that all ranks try the same kernels."""
    return isinstance(model, OURS) and not maximum([not has_flash4()])[0]


def fastest_attention(
    names: Sequence[str], attempt: Callable[[str, int], None], deterministic: bool, maximum: MaxOverRanks
) -> str:
    """Return the attention kernel whose passes, run by `attempt(name, times)`, take the least time.

    In deterministic mode, the first kernel that runs: times differ from run to run.
    """
    running = []
    for name in names:
        if failure_of(partial(attempt, name, 1), maximum) is None:
            if deterministic:
                return name
            running.append(name)
    if len(running) < 2:
        return running[0] if running else "default"
    # Time the kernels in turns, so that a temporary slowdown of the device does not affect only one of them.
    turns = [[maximum([seconds_of(partial(attempt, name, 3))])[0] for name in running] for _ in range(2)]
    return min(zip(map(min, *turns), running, strict=True))[1]


def attention_alone(
    model: Any, rows: int, length: int, precision: str, device: torch.device, form: Form, records: bool
) -> Callable[[], None]:
    """Return a function that runs the attention of all layers of a built-in model, forward and backward, on random numbers.

    The gpt2 family makes queries, keys and values by one matmul: packing their gradients is part of a kernel's cost.
    `records`: as a CUDA graph if possible, without launch times.
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
            # A recording that fails leaves its stream the current one.
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                passes()
            return graph.replay
    return passes


# CPU threads. Their number determines the order of sums, so a run keeps the number it began with.

THREADS_VARIABLE = "OMP_NUM_THREADS"  # OpenMP's, which torch follows
MIN_SPEEDUP = 0.9  # fewer threads must take at most this share of the time to replace torch's own number


def settle_threads(
    requested: int | Literal["auto"], kept: Mapping[str, Any], measures: bool, attempt: Callable[[], None], maximum: MaxOverRanks
) -> int:
    """Set torch's number of threads to the requested one, the run's earlier one, or the fastest for `attempt`; return it."""
    threads = torch.get_num_threads()  # also for runs whose checkpoints do not say
    if requested != "auto":
        threads = requested
    elif kept and int(kept.get("threads", threads)) <= cpu_count():
        threads = int(kept.get("threads", threads))
    elif measures and THREADS_VARIABLE not in os.environ:
        # Torch's own number or halves of it: where other programs compute too, two threads took three times as long as one.
        threads = count = int(maximum([threads])[0])
        least = math.inf
        while count:
            torch.set_num_threads(count)
            attempt()  # starts threads, allocates memory
            seconds = maximum([min(seconds_of(attempt) for _ in range(2))])[0]
            if seconds > MIN_SPEEDUP * least:
                break
            threads, least, count = count, seconds, count // 2
    torch.set_num_threads(threads)
    return threads


# Memory: whether a model can be trained on a device at all. The system grants more memory than it has and then kills.


def refuse_too_large(config: Config, vocab_size: int, device: Device, memory: int | None, world_size: int) -> None:
    """Refuse a built-in model whose state does not fit, before it is built; the size of a custom model is unknown."""
    if (size := model_size(config, vocab_size)) is None:
        return
    state, rows, host = state_bytes(config, size), step_bytes(config, world_size), host_bytes()

    needs = [("this machine", state + rows, host)]
    if device.kind == "cuda":  # weights are drawn on the host
        needs = [("this machine", FLOAT * size.total + rows, host), (device.name, state, memory)]
    for name, needed, available in needs:
        if available is not None and needed > available:
            raise ConfigError(
                f"training {size.total:,} parameters takes at least {needed / 2**30:,.1f} GiB and {name} has "
                f"{available / 2**30:,.1f} GiB",
                Setting("training.tokens_per_step"),
                advice="take a smaller model or lower {0}" if rows > state else "take a smaller model",
            )


# The fp8 head and its requirements.

FP8_ALIGNMENT = 16  # fp8 matmul dimensions must be multiples of this
FP8_CAPABILITY = (8, 9)  # the lowest compute capability with fp8 matmuls
FP8_HEAD = Setting("training.fp8_head", "true")


def use_fp8_head(
    model: nn.Module, seq_len: int, training: TrainingSection, precision: str, capability: tuple[int, int] | None
) -> None:
    """Let a model's head use fp8 matmuls in training, or raise ConfigError; `capability` is the NVIDIA GPU's, if any."""
    if not hasattr(model, "fp8_head"):
        raise ConfigError("{0} needs a built-in model; a custom model computes its loss itself", FP8_HEAD)
    if capability is None or capability < FP8_CAPABILITY:
        raise ConfigError("{0} needs an NVIDIA GPU of compute capability 8.9 or more; leave it out", FP8_HEAD)
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
            raise ConfigError(f"{{0}} needs multiples of {FP8_ALIGNMENT} and {{1}}; the next is {above}", FP8_HEAD, setting)
    model.fp8_head = True  # type: ignore[assignment]
