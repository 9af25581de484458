"""The door for people who come from gpt-simple: its command, its YAML, its 59 keys and its Python names.

It only translates: its keys become one Config of ours, the loop's reports its log lines. `import ingot.compat.gpt_simple as
gpt_simple` gives the 18 names of its package; what needs torch is loaded when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingot.compat.gpt_simple.api import TrainingResult, generate, load_for_inference, train, validate_checkpoint
    from ingot.compat.gpt_simple.config import Config, CurriculumPhase, DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
    from ingot.compat.gpt_simple.model import SimpleLLM
    from ingot.compat.gpt_simple.tokenizer import SimpleLLMTokenizer
    from ingot.errors import CheckpointError, ConfigError, DataError
    from ingot.errors import IngotError as GptSimpleError

_HERE = "ingot.compat.gpt_simple"
_HOMES = {
    f"{_HERE}.api": ("train", "generate", "load_for_inference", "validate_checkpoint", "TrainingResult"),
    f"{_HERE}.config": ("Config", "CurriculumPhase", "ModelConfig", "DataConfig", "OptimizerConfig", "TrainingConfig"),
    f"{_HERE}.model": ("SimpleLLM",),
    f"{_HERE}.tokenizer": ("SimpleLLMTokenizer",),
    "ingot.errors": ("ConfigError", "DataError", "CheckpointError"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
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
    if name == "GptSimpleError":
        from ingot.errors import IngotError

        return IngotError
    if name == "__version__":
        from importlib.metadata import version

        return version("ingot-lm")
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
