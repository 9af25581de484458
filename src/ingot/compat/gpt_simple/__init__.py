"""gpt-simple's command, YAML keys, log lines, files and Python API, translated to Ingot's Config and training loop.

`import ingot.compat.gpt_simple as gpt_simple` provides the original's 18 public names; those that need torch are imported lazily.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ingot.compat.gpt_simple.config import CurriculumPhase, DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from ingot.compat.gpt_simple.config import GptSimpleConfig as Config
from ingot.errors import CheckpointError, ConfigError, DataError
from ingot.errors import IngotError as GptSimpleError
from ingot.runtime.machine import made_by

if TYPE_CHECKING:
    from ingot.compat.gpt_simple.simple_llm import (
        SimpleLLM,
        SimpleLLMTokenizer,
        generate,
        load_for_inference,
        train,
        validate_checkpoint,
    )
    from ingot.compat.gpt_simple.training import GptSimpleResult as TrainingResult

__version__ = made_by().removeprefix("ingot ")
__all__ = [
    "CheckpointError", "Config", "ConfigError", "CurriculumPhase", "DataConfig", "DataError", "GptSimpleError", "ModelConfig",
    "OptimizerConfig", "SimpleLLM", "SimpleLLMTokenizer", "TrainingConfig", "TrainingResult", "__version__", "generate",
    "load_for_inference", "train", "validate_checkpoint",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"{__name__}.simple_llm"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
