"""What was found out for a shape on this machine, kept for later runs of the same shape: finding it out takes seconds.

A note is only believed where nothing that it could depend on has changed: the settings that shape a step, the device, the
versions of what computes, and how much of the device's memory is free.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from typing import Any

import torch

from ingot.config.schema import Config
from ingot.model.settings import FileSettings
from ingot.runtime.cache import cache_root
from ingot.runtime.devices import Device
from ingot.runtime.files import file_sha256, read_json, user_path, write_atomically
from ingot.runtime.packages import OF_KERNELS, installed
from ingot.runtime.version import made_by

SHAPING = (
    "tokens_per_step", "stages", "micro_batch", "precision", "compile", "deterministic", "loss_chunk", "kernels",
    "fp8_head", "gradient_checkpointing", "ddp_python_reducer", "cuda_graphs",
)  # fmt: skip
TRIALS = 6  # changes with what is tried and how: notes of other trials are not believed
FREE = 0.98  # of the memory that was free then has to be free now


class Choices:
    """The note of one shape; without a GPU there is none, as a CPU's choices follow from the settings."""

    def __init__(self, config: Config, device: Device, world_size: int):
        self._device = device
        self._path = cache_root() / "choices" / self._name(config, world_size) if device.kind == "cuda" else None

    def _name(self, config: Config, world_size: int) -> str:
        file = user_path(config.model.file) if isinstance(config.model, FileSettings) else None
        known = {
            "model": config.model.model_dump(mode="json"),
            "file": file_sha256(file) if file is not None else None,
            "data": [config.data.seq_len, config.data.document_mask],
            "training": config.training.model_dump(mode="json", include=set(SHAPING)),
            "device": [self._device.name, world_size],
            "versions": [
                TRIALS,
                made_by(),
                torch.__version__,
                torch.version.cuda,
                torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
                installed(OF_KERNELS),
            ],
        }
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32] + ".json"

    def recall(self) -> dict[str, Any]:
        """What was found out, as `keep` was given it; nothing where there is no note or less memory is free."""
        if self._path is None:
            return {}
        with suppress(OSError, ValueError, KeyError, TypeError):
            note = read_json(self._path)
            if note["free"] * FREE <= self._room():
                return dict(note["choices"])
        return {}

    def keep(self, choices: dict[str, Any]) -> None:
        """Write the note; where that cannot be, the next run finds out anew."""
        if self._path is not None:
            with suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self._path, json.dumps({"free": self._room(), "choices": choices}, indent=1), durable=False)

    def _room(self) -> int:
        """The bytes that this process has of the GPU or could have: what others hold of it is not among them."""
        return torch.cuda.mem_get_info(self._device.index)[0] + torch.cuda.memory_reserved(self._device.index)

    def forget(self) -> None:
        """What the note says did not fit after all."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
