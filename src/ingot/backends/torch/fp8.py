"""A head whose products have 8 bits: which runs can have it, and why others cannot."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from ingot.backends.torch.kernels import failure_of
from ingot.backends.torch.tuning import Agree
from ingot.config.schema import Config
from ingot.errors import ConfigError, Setting
from ingot.runtime.devices import Device

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
