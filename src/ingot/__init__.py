"""Ingot pre-trains small GPTs to the lowest bits per byte that a limit on training time and model size allows.

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

# The public names are imported on first use, so that `ingot --help` does not wait for torch.
_MODULES = {
    "ingot.api": ("generate", "load", "train"),
    "ingot.config.schema": ("Config",),
    "ingot.errors": ("CheckpointError", "ConfigError", "DataError", "IngotError", "RunError"),
    "ingot.runs.state": ("TrainingResult",),
    "ingot.inference.model": ("LoadedModel",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
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
    """Return only the public and dunder names, so that tab completion does not list subpackages."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


def _public(name: str) -> property:
    return property(lambda package: getattr(import_module(_MODULE_OF[name]), name), lambda package, module: None)


class _Package(ModuleType):
    """Class of this module: imports public names on first use and keeps the subpackage `train` from shadowing `ingot.train()`."""


for _name in _MODULE_OF:
    setattr(_Package, _name, _public(_name))
sys.modules[__name__].__class__ = _Package
