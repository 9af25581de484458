"""gpt-simple's command, YAML keys, log lines, files and Python names, translated to our Config and loop.

`import ingot.compat.gpt_simple as gpt_simple` has the 18 names of its package; what needs torch is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingot.compat.gpt_simple.api import generate, load_for_inference, train, validate_checkpoint
    from ingot.compat.gpt_simple.config import CurriculumPhase, DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
    from ingot.compat.gpt_simple.config import GptSimpleConfig as Config
    from ingot.compat.gpt_simple.model import SimpleLLM, SimpleLLMTokenizer
    from ingot.compat.gpt_simple.training import GptSimpleResult as TrainingResult
    from ingot.errors import CheckpointError, ConfigError, DataError
    from ingot.errors import IngotError as GptSimpleError

_RENAMED = {"Config": "GptSimpleConfig", "GptSimpleError": "IngotError", "TrainingResult": "GptSimpleResult"}
_MODULES = {
    f"{__name__}.api": ("generate", "load_for_inference", "train", "validate_checkpoint"),
    f"{__name__}.config": ("Config", "CurriculumPhase", "DataConfig", "ModelConfig", "OptimizerConfig", "TrainingConfig"),
    f"{__name__}.model": ("SimpleLLM", "SimpleLLMTokenizer"),
    f"{__name__}.training": ("TrainingResult",),
    "ingot.errors": ("CheckpointError", "ConfigError", "DataError", "GptSimpleError"),
}
__all__ = [
    "CheckpointError",
    "Config",
    "ConfigError",
    "CurriculumPhase",
    "DataConfig",
    "DataError",
    "GptSimpleError",
    "ModelConfig",
    "OptimizerConfig",
    "SimpleLLM",
    "SimpleLLMTokenizer",
    "TrainingConfig",
    "TrainingResult",
    "__version__",
    "generate",
    "load_for_inference",
    "train",
    "validate_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("ingot-lm")
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), _RENAMED.get(name, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
