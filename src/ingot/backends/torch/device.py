"""Find the torch device of a run, and profile training steps on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from ingot.errors import ConfigError, Setting
from ingot.runtime.devices import DEVICES, Device, data_sheet_flops


def find_torch_device(name: str, local_rank: int = 0) -> Device:
    """Return the device that `training.device` names; with `cuda` or `auto`, each local rank gets its own GPU."""
    setting = Setting("training.device", name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "mlx" or not DEVICES.fullmatch(name):
        raise ConfigError("{0} is not a device; use auto, cpu, cuda, cuda:N, mps or mlx", setting)
    kind, _, number = name.partition(":")
    if kind == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = int(number) if number else local_rank
        if index >= count:
            others = f"a GPU index below {count}" if number else "fewer ranks"
            advice = f"use cpu or {others}" if count else "use cpu"
            raise ConfigError(
                f"{{0}} requests GPU {index} (indices start at 0), but this machine has {count}", setting, advice=advice
            )
        gpu = torch.cuda.get_device_name(index)
        # Older GPUs have fast fp16 but only emulate bf16.
        fast = ("bf16", "fp16") if torch.cuda.is_bf16_supported(including_emulation=False) else ("fp16", "bf16")
        return Device("cuda", index, gpu, data_sheet_flops(gpu), (*fast, "fp32"))
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("{0} needs an Apple GPU, but this machine has none; use auto or cpu", Setting("training.device", "mps"))
    if kind == "mps":
        return Device("mps", 0, "mps", None, ("fp32", "bf16", "fp16"))
    return Device("cpu", 0, cpu_name(torch.get_num_threads()), None, ("fp32", "bf16"))


def cpu_name(threads: int) -> str:
    """Return the device name for a CPU with this many torch threads."""
    return f"cpu, {threads} thread{'s' if threads > 1 else ''}"


def make_matmul(device: Device) -> tuple[int, Callable[[], object]]:
    """Return the size of a large square matmul and a function that runs it, in bf16 on CUDA and in float32 elsewhere."""
    size, dtype = (8192, torch.bfloat16) if device.kind == "cuda" else (1024, torch.float32)
    a = torch.ones(size, size, device=str(device), dtype=dtype)
    return size, lambda: (a @ a)[0, 0].item()  # `item` waits for the result


def profiled(device: Device, folder: Path, waiting: int, warming: int, active: int) -> Iterator[int]:
    """Yield step numbers; after `waiting` steps and `warming` warm-up steps, write a trace of `active` steps to `folder`.

    The trace can be opened in chrome://tracing, Perfetto or TensorBoard.
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
