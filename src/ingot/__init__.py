"""Ingot pre-trains small GPTs to the lowest bits per byte that a budget of seconds and bytes allows.

import ingot
result = ingot.train(recipe="demo")
print(result.val_bpb, ingot.generate(result.run_dir, "HAMLET."))
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ingot.api import generate, load, train
    from ingot.config.schema import Config
    from ingot.errors import CheckpointError, ConfigError, DataError, IngotError, RunError
    from ingot.inference.model import LoadedModel
    from ingot.runs.state import TrainingResult

# Loaded when they are first asked for: `ingot --help` must not wait for torch.
_HOMES = {
    "ingot.api": ("generate", "load", "train"),
    "ingot.config.schema": ("Config",),
    "ingot.errors": ("CheckpointError", "ConfigError", "DataError", "IngotError", "RunError"),
    "ingot.runs.state": ("TrainingResult",),
    "ingot.inference.model": ("LoadedModel",),
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


def __dir__() -> list[str]:
    """The public names; the rooms are not for tab completion."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


def _public(name: str) -> property:
    return property(lambda package: getattr(import_module(_HOME_OF[name]), name), lambda package, room: None)


class _Package(ModuleType):
    """This package, in which a public name stays what it is: importing the room `ingot.train` must not hide the function."""


for _name in _HOME_OF:
    setattr(_Package, _name, _public(_name))
sys.modules[__name__].__class__ = _Package
