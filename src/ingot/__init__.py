"""Ingot pre-trains small GPTs to the lowest bits per byte that a budget of seconds and bytes allows.

import ingot
result = ingot.train(recipe="demo")
print(result.val_bpb, ingot.generate(result.run_dir, "HAMLET."))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingot.api import LoadedModel, generate, load, train
    from ingot.config.schema import Config
    from ingot.errors import CheckpointError, ConfigError, DataError, IngotError, RunError
    from ingot.train.session import TrainingResult

# Loaded when they are first asked for: `ingot --help` must not wait for torch.
_HOMES = {
    "ingot.api": ("LoadedModel", "generate", "load", "train"),
    "ingot.config.schema": ("Config",),
    "ingot.errors": ("CheckpointError", "ConfigError", "DataError", "IngotError", "RunError"),
    "ingot.train.session": ("TrainingResult",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "DataError",
    "IngotError",
    "LoadedModel",
    "RunError",
    "TrainingResult",
    "generate",
    "load",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ingot' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)
