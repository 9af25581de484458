"""Which framework computes: the only place that names one. It is imported when it is first asked for."""

from __future__ import annotations

from typing import Literal, overload

from ingot.backends.base import Backend, Group, Inference
from ingot.config.schema import Config
from ingot.runtime.devices import Device
from ingot.runtime.ranks import Ranks


@overload
def open_backend(
    config: Config, vocab_size: int, ranks: Ranks, *, train: Literal[True] = True, group: Group | None = None
) -> Backend: ...
@overload
def open_backend(
    config: Config, vocab_size: int, ranks: Ranks, *, train: Literal[False], group: Group | None = None
) -> Inference: ...
def open_backend(
    config: Config, vocab_size: int, ranks: Ranks, *, train: bool = True, group: Group | None = None
) -> Backend | Inference:
    """The model of a config on its device, in the ranks' group or one of its own.

    Without `train` it has no optimizer, is neither compiled nor replicated, and has no weights before `load_weights`.
    """
    if train:
        from ingot.backends.torch.backend import TorchBackend

        return TorchBackend(config, vocab_size, ranks, group)
    from ingot.backends.torch.inference import TorchInference

    return TorchInference.of(config, vocab_size, ranks, group)


def open_group(device: Device, ranks: Ranks) -> Group:
    """The group of the ranks, for those who must agree before there is a config."""
    from ingot.backends.torch.collectives import Collectives

    return Collectives(ranks, device)


def find_device(name: str, local_rank: int = 0) -> Device:
    """The device `training.device` asks for; each local rank has a GPU of its own."""
    from ingot.backends.torch.device import find_torch_device

    return find_torch_device(name, local_rank)


def framework_version() -> str:
    """The framework's version, as it says itself."""
    from ingot.backends.torch.device import torch_version

    return torch_version()
