"""A profile of some steps, for chrome://tracing, Perfetto or TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from ingot.runtime.devices import Device


def profiled(device: Device, folder: Path, waiting: int, warming: int, active: int) -> Iterator[int]:
    """Count steps: the first are not looked at, the next looked at and dropped, the last recorded and written into `folder`."""
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
