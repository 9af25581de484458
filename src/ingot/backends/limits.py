"""Settings that a device does not support on any machine: for backends, and for preflight checks, which load no framework."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from ingot.config.schema import Config
from ingot.errors import ConfigError, Setting
from ingot.runtime.devices import Device

MLX = Setting("training.device", "mlx")
MLX_FAMILIES = ("golf", "gpt2", "llama")
TORCH_ONLY: dict[str, tuple[Any, ...]] = {  # settings that mlx lacks, and the values it still accepts
    "optimizer.muon_cautious": (False,),
    "optimizer.muon_beta2": (None,),
    "optimizer.muon_precision": ("auto", "fp32"),
    "training.fp8_head": (False,),
    "training.deterministic": (False,),
    "training.kernels": ("auto", "off", []),
    "training.cuda_graphs": ("auto", False),
    "training.threads": ("auto",),
}


def refuse_precision(config: Config) -> None:
    """Refuse a training precision that the device does not support."""
    device, precision = config.training.device.partition(":")[0], config.training.precision
    if device == "mlx" and precision == "fp16":
        raise ConfigError("{0} is not supported by {1}; use fp32 or bf16", Setting("training.precision", precision), MLX)
    if device == "cpu":
        Device("cpu", 0, "cpu", None, ("fp32", "bf16")).precision(precision)


def refuse_ranks_on_mlx(world_size: int) -> None:
    """Refuse several ranks: MLX trains in one process."""
    if world_size > 1:
        raise ConfigError(f"{{0}} runs in one process and this run has {world_size} ranks; start it without torchrun", MLX)


def refuse_torch_only(config: Config) -> None:
    """Refuse settings that only torch supports."""
    if config.model.family not in MLX_FAMILIES:
        raise ConfigError("{0} needs torch; leave {1} out", Setting("model.family", config.model.family), MLX)
    for path, accepted in TORCH_ONLY.items():
        if (value := attrgetter(path)(config)) not in accepted:
            shown = str(value).lower() if isinstance(value, bool) else value
            raise ConfigError("{0} needs torch; leave it out with {1}", Setting(path, shown), MLX)
