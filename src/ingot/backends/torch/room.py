"""Whether a model can be trained on a device at all, by its size: the system grants more memory than it has and then kills."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ingot.config.schema import Config
from ingot.config.size import FLOAT, model_size, recomputed_every, state_bytes, step_bytes
from ingot.errors import ConfigError, Setting
from ingot.runtime.batch import Batch
from ingot.runtime.devices import Device
from ingot.runtime.memory import host_bytes


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
