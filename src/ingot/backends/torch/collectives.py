"""Communication between ranks, apart from gradient reduction.

Control messages, such as a stop flag, use gloo on the host even if gradients use NCCL: they must not wait for queued GPU work.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from ingot.errors import ConfigError, PeerLost
from ingot.runtime.devices import Device
from ingot.runtime.ranks import Ranks


@contextmanager
def peers_present() -> Iterator[None]:
    """Raise PeerLost if the block fails because another rank has died."""
    try:
        yield
    except RuntimeError as error:
        if not dist.is_initialized() or not re.search(r"peer|NCCL|gloo", str(error)):
            raise
        raise PeerLost from error


class Collectives:
    """The torch.distributed implementation of Group (base.py); with a single rank, every method returns its input."""

    def __init__(self, ranks: Ranks, device: Device):
        self.ranks = ranks
        self._host: dist.ProcessGroup | None = None  # None with a single rank
        if ranks.world_size == 1:
            return
        if device.kind == "cuda":
            torch.cuda.set_device(device.index)
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise ConfigError(f"{name} is not set; start ranks with torchrun or ingot train --nproc-per-node N")
        if not dist.is_initialized():
            backend = "nccl" if device.kind == "cuda" else "gloo"
            dist.init_process_group(backend, rank=ranks.rank, world_size=ranks.world_size, timeout=timedelta(minutes=30))
        self._host = dist.new_group(backend="gloo")

    def maximum(self, values: Sequence[float]) -> list[float]:
        return self._reduced(values, dist.ReduceOp.MAX)

    def total(self, values: Sequence[float]) -> list[float]:
        return self._reduced(values, dist.ReduceOp.SUM)

    def _reduced(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self._host is None:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)
        with peers_present():
            dist.all_reduce(numbers, operation, group=self._host)
        return numbers.tolist()

    def broadcast(self, text: str) -> str:
        if self._host is None:
            return text
        box = [text]
        with peers_present():
            dist.broadcast_object_list(box, src=0, group=self._host)
        return box[0]

    def close(self) -> None:
        if self._host is not None and dist.is_initialized():
            dist.destroy_process_group()
