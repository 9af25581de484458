"""What MLX computes on: the GPU of a Mac, elsewhere the CPU."""

from __future__ import annotations

import os
import threading
import time
from importlib import metadata

import mlx.core as mx

from ingot.runtime.devices import Device
from ingot.runtime.processes import cpu_count

VERSION = metadata.version("mlx")
MOST_THREADS = 4  # each holds gradients of its own
WIDTH = "MLX_BFS_MAX_WIDTH"  # how many results MLX looks at side by side when it orders a computation; its own is 20
WIDE = "4096"
_streams = threading.local()  # a stream belongs to the thread that made it


def find_mlx_device() -> Device:
    """The one device that MLX has here."""
    if on_metal():
        return Device("mlx", 0, f"mlx {VERSION}, {mx.device_info().get('device_name', 'GPU')}", None, ("bf16", "fp32"))
    # MLX reads this once, at its first computation. With 20 a backward pass is ordered share after share, and as only ten
    # operations wait at a time, the threads take turns: two were at work together for 0.15 of a step, with 120 to 2000 for 0.8.
    os.environ.setdefault(WIDTH, WIDE)
    return Device("mlx", 0, f"mlx {VERSION}, CPU, {threads()} threads", None, ("fp32", "bf16"))


def threads() -> int:
    """How many parts of a batch are computed at once: on a CPU one by each core, while a GPU works on a whole batch."""
    return 1 if on_metal() else min(cpu_count(), MOST_THREADS)


def streams(count: int) -> list[mx.Stream]:
    """So many streams, each of which has a thread on a CPU; the default one first."""
    made: list[mx.Stream] = vars(_streams).setdefault("made", [mx.default_stream(mx.default_device())])
    made += [mx.new_stream(mx.default_device()) for _ in range(len(made), count)]
    return made[:count]


def on_metal() -> bool:
    """Whether there is an Apple GPU."""
    return bool(mx.metal.is_available())


def measure_flops() -> float:
    """The rate of a matrix multiplication in float32: the best of a few."""
    size = 1024 if on_metal() else 256
    a, seconds = mx.ones((size, size)), []
    for _ in range(5):
        began = time.perf_counter()
        mx.eval(a @ a)
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)
