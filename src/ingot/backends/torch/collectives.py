"""Communication between ranks, apart from gradient reduction.

Control messages, such as a stop flag, use gloo on the host even if gradients use NCCL: they must not wait for queued GPU work.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from ingot.config.schema import TrainingSection
from ingot.errors import ConfigError, PeerLost, RunError, Setting
from ingot.runtime.devices import Device
from ingot.runtime.files import user_path
from ingot.runtime.ranks import Ranks

ANSWER_SECONDS = 5.0  # seconds that each rank has, after a timeout, to report that it is alive


class Collectives:
    """The torch.distributed implementation of Group (base.py); with a single rank, every method returns its input."""

    def __init__(self, ranks: Ranks, device: Device, training: TrainingSection | None = None):
        self.ranks = ranks
        self.step = 0  # the step in progress, for error messages
        self._seconds = (training or TrainingSection()).collective_timeout_seconds
        self._host: dist.ProcessGroup | None = None  # carries control messages; None with a single rank
        if ranks.world_size == 1:
            return
        if device.kind == "cuda":
            torch.cuda.set_device(device.index)
            # After a timeout, NCCL writes the last collectives of every rank to a file, which torchfrtrace analyses.
            os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
            os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
            if training is not None and training.output_dir is not None:
                os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(user_path(training.output_dir) / "collectives-rank-"))
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise ConfigError(f"{name} is not set; start ranks with torchrun or ingot train --nproc-per-node N")
        timeout = timedelta(seconds=self._seconds)
        if not dist.is_initialized():
            backend = "nccl" if device.kind == "cuda" else "gloo"
            dist.init_process_group(backend, rank=ranks.rank, world_size=ranks.world_size, timeout=timeout)
        self._host = dist.new_group(backend="gloo", timeout=timeout)

    @contextmanager
    def peers_present(self, what: str) -> Iterator[None]:
        """Raise PeerLost if another rank dies during the block; after a timeout, the lowest rank still alive raises RunError."""
        try:
            yield
        except RuntimeError as error:
            timed_out = re.search(r"[Tt]imed out|timeout", str(error))
            if not dist.is_initialized() or not (timed_out or re.search(r"peer|NCCL|gloo", str(error))):
                raise
            if not timed_out:
                raise PeerLost from error
            silent = self._silent_ranks()
            if self.ranks.rank != min(set(range(self.ranks.world_size)) - set(silent)):
                raise PeerLost from error
            missing = f"rank {', '.join(map(str, silent))}" if silent else "another rank, which has answered since"
            waited = f"rank {self.ranks.rank} waited {self._seconds:g} s at step {self.step} in {what} for {missing}"
            setting, advice = (
                Setting("training.collective_timeout_seconds"),
                "check whether that rank or its machine hangs, or raise {0}",
            )
            raise RunError(waited, setting, advice=advice) from None

    def _silent_ranks(self) -> list[int]:
        """Report through the store that this rank is alive, and return the ranks that do not report in time."""
        store, alive = dist.distributed_c10d._get_default_store(), {self.ranks.rank}  # type: ignore[no-untyped-call]
        deadline = time.monotonic() + ANSWER_SECONDS - (self.ranks.rank > 0)  # rank 0 hosts the store, so it waits 1 s longer

        def ask() -> None:
            with suppress(RuntimeError):
                store.set(f"alive/{self.ranks.rank}", "")
                while len(alive) < self.ranks.world_size and time.monotonic() < deadline:
                    time.sleep(0.1)
                    alive.update(rank for rank in range(self.ranks.world_size) if store.check([f"alive/{rank}"]))

        thread = threading.Thread(target=ask, daemon=True)  # the store may hang too, hence the thread
        thread.start()
        thread.join(ANSWER_SECONDS + 1)
        return [0] if 0 not in alive else [rank for rank in range(self.ranks.world_size) if rank not in alive]

    def maximum(self, values: Sequence[float]) -> list[float]:
        return self._reduced(values, dist.ReduceOp.MAX)

    def total(self, values: Sequence[float]) -> list[float]:
        return self._reduced(values, dist.ReduceOp.SUM)

    def _reduced(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self._host is None:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)
        with self.peers_present("a control message"):
            dist.all_reduce(numbers, operation, group=self._host)
        return numbers.tolist()

    def broadcast(self, text: str) -> str:
        if self._host is None:
            return text
        box = [text]
        with self.peers_present("a broadcast"):
            dist.broadcast_object_list(box, src=0, group=self._host)
        return box[0]

    def close(self) -> None:
        if self._host is not None and dist.is_initialized():
            dist.destroy_process_group()
