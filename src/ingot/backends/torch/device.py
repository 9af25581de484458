"""The devices that torch finds on this machine, a profile of steps on one, and the arithmetic of passes: dtype, attention kernel,
order of sums, and the scale of an fp16 loss."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from ingot.backends.torch.state import Named, tensor
from ingot.errors import ConfigError, Setting
from ingot.runtime.devices import Device, data_sheet_flops
from ingot.runtime.tensors import TensorRecord

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GROUPED = "-grouped"  # suffix of a kernel that takes fewer key and value heads than query heads
ATTENTION = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
FLASH4 = "flash4"  # FlashAttention 4, from its own package: models call it themselves
CUDNN_FLASH4 = "cudnn-flash4"  # FlashAttention 4's backward pass and cuDNN's forward pass


def find_torch_device(name: str, local_rank: int = 0) -> Device:
    """Return the device that `training.device` names; each local rank has its own GPU."""
    setting = Setting("training.device", name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError("{0} is not a device; use auto, cpu, cuda, cuda:N, mps or mlx", setting) from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = local_rank if device.index is None else device.index
        if index >= count:
            others = "fewer ranks" if device.index is None else f"one of the first {count}"
            advice = f"use cpu or {others}" if count else "use cpu"
            raise ConfigError(f"{{0}} requests GPU {index}, but this machine has {count}", setting, advice=advice)
        return _gpu(index)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("{0} needs an Apple GPU, and there is none here; use auto or cpu", Setting("training.device", "mps"))
    if device.type == "mps":
        return Device("mps", 0, "mps", None, ("fp32", "bf16", "fp16"))
    if device.type != "cpu":
        raise ConfigError("{0} is not supported; use auto, cpu, cuda, cuda:N, mps or mlx", setting)
    return Device("cpu", 0, cpu_name(torch.get_num_threads()), None, ("fp32", "bf16"))


def cpu_name(threads: int) -> str:
    """Return the device name of a CPU with this number of threads."""
    return f"cpu, {threads} thread{'s' if threads > 1 else ''}"


def _gpu(index: int) -> Device:
    name = torch.cuda.get_device_name(index)
    # Older GPUs compute fp16 fast and only emulate bf16.
    fast = ("bf16", "fp16") if torch.cuda.is_bf16_supported(including_emulation=False) else ("fp16", "bf16")
    return Device("cuda", index, name, data_sheet_flops(name), (*fast, "fp32"))


def torch_device(device: Device) -> torch.device:
    """Return torch's device."""
    return torch.device(str(device))


def torch_version() -> str:
    """Return torch's version, with its build."""
    return str(torch.__version__)


def measure_flops(device: Device) -> float:
    """Return the FLOPS of a large matmul: the best of a few, in bf16 on a GPU and in float32 elsewhere."""
    size, dtype = (8192, torch.bfloat16) if device.kind == "cuda" else (1024, torch.float32)
    a, b = (torch.ones(size, size, device=torch_device(device), dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        product = a @ b
        product[0, 0].item()  # waits for the result
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)


def profiled(device: Device, folder: Path, waiting: int, warming: int, active: int) -> Iterator[int]:
    """Yield step numbers; `waiting` steps are not profiled, `warming` are dropped, `active` are written to `folder`.

    The trace opens in chrome://tracing, Perfetto or TensorBoard.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.kind == "cuda" else [])]
    with profile(
        activities=activities,
        schedule=schedule(wait=waiting, warmup=warming, active=active, repeat=1),
        on_trace_ready=tensorboard_trace_handler(str(folder)),
        record_shapes=True,
        profile_memory=True,
        with_flops=True,
    ) as profiler:
        for step in range(waiting + warming + active):
            yield step
            profiler.step()


# The arithmetic of forward and backward passes.


def make_kernel_choice_deterministic() -> None:
    """Let cuBLAS and the compiler choose kernels deterministically; call this before either is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    compiler: Any = import_module("torch._inductor.config")
    compiler.deterministic = True


@contextlib.contextmanager
def arithmetic(kind: str, precision: str, attention: str = "default", deterministic: bool = False) -> Iterator[None]:
    """Set the precision, the attention kernel and, if deterministic, a fixed order of sums for the passes in the block."""
    with contextlib.ExitStack() as stack:
        if deterministic:  # only bit-reproducible algorithms; sampling tokens has none, and happens outside the block
            before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
            stack.callback(torch.use_deterministic_algorithms, before[0], warn_only=before[1])
            torch.use_deterministic_algorithms(True)
        if precision != "fp32":
            stack.enter_context(torch.autocast(kind, DTYPES[precision]))
        if (kernel := attention.removesuffix(GROUPED)) in ATTENTION:
            stack.enter_context(sdpa_kernel(ATTENTION[kernel]))
        yield


class LossScale:
    """The scale of an fp16 loss: halved when a gradient overflows, doubled after 2,000 good steps. 1 in other precisions."""

    def __init__(self, used: bool, device: torch.device):
        self.used = used
        self.value = torch.tensor(65536.0 if used else 1.0, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def unscale(self, grads: list[Tensor]) -> None:
        """Divide gradients by the scale, in place."""
        if self.used:
            torch._foreach_mul_(grads, 1.0 / self.value)

    def update(self, overflow: Tensor) -> None:
        """Adjust the scale, given whether a gradient of this step overflowed."""
        if self.used:
            torch._amp_update_scale_(self.value, self._good_steps, overflow.float(), 2.0, 0.5, 2000)

    def tensors(self) -> Named:
        """Return the state to store in a checkpoint."""
        return [("scaler/scale", self.value), ("scaler/good_steps", self._good_steps)] if self.used else []

    def restore(self, state: dict[str, TensorRecord]) -> None:
        """Restore the state from the tensors that `tensors` returned, and remove them from the optimizer's state."""
        scale, good_steps = state.pop("scaler/scale", None), state.pop("scaler/good_steps", None)
        if self.used and scale is not None and good_steps is not None:
            self.value.copy_(tensor(scale))
            self._good_steps.copy_(tensor(good_steps))
