"""Choose and import the framework for a device, and reject settings that the framework does not support.

Only this module refers to frameworks by name. It imports them inside functions, so that preflight checks load no framework.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any

from ingot.backends.base import Backend, Group, Inference, StepMemory
from ingot.config.schema import Config
from ingot.errors import ConfigError, IngotError, PeerLost, Setting
from ingot.runtime.devices import Device
from ingot.runtime.machine import OF_KERNELS
from ingot.runtime.ranks import Ranks
from ingot.runtime.tensors import TensorRecord

MLX = "mlx"  # the only value of training.device that does not use torch
ON_MLX = Setting("training.device", MLX)
MLX_FAMILIES = ("frontier", "golf", "gpt2", "llama")
TORCH_ONLY: dict[str, tuple[Any, ...]] = {  # settings that only torch supports, each with the values that MLX accepts
    "optimizer.muon_precision": ("auto", "fp32"),
    "training.parallel": ("auto", "ddp"),
    "training.cpu_offload": (False,),
    "training.fp8_head": (False,),
    "training.later_targets": ([],),
    "training.deterministic": (False,),
    "training.kernels": ("auto", "off", []),
    "training.cuda_graphs": ("auto", False),
    "training.threads": ("auto",),
}


def open_backend(config: Config, vocab_size: int, ranks: Ranks) -> Backend:
    """Build a config's model and optimizer on its device, for one rank of the run."""
    if config.training.device == MLX:
        with _mlx_installed():
            from ingot.backends.mlx.backend import MLXBackend
        refuse_ranks_on_mlx(ranks.world_size)
        refuse_torch_only(config)
        refuse_precision(config)
        return MLXBackend(config, vocab_size, ranks)
    from ingot.backends.torch.startup import Builders

    builders = Builders(config, vocab_size, ranks)  # started first, so that kernels compile while torch is being imported
    try:
        from ingot.backends.torch.backend import TorchBackend

        return TorchBackend(config, vocab_size, ranks, builders)
    except BaseException:
        builders.stop()
        raise


def simulate_step(*arguments: Any) -> StepMemory:
    """Simulate a training step on fake tensors; see backends/torch/simulate.py for the arguments."""
    from ingot.backends.torch.simulate import simulate_step as simulate

    return simulate(*arguments)


def open_inference(config: Config, vocab_size: int) -> Inference:
    """Build a config's model on its device for generation and scoring; call `load_weights` before using the model."""
    if config.training.device == MLX:
        with _mlx_installed():
            from ingot.backends.mlx.inference import MLXInference
        refuse_torch_families(config)  # but not the other settings: they affect only training
        return MLXInference.of(config, vocab_size)
    from ingot.backends.torch.inference import TorchInference

    return TorchInference.of(config, vocab_size)


def open_group(device: Device, ranks: Ranks) -> Group:
    """Open the process group of the ranks, so that they can communicate before the config is read."""
    if device.kind == MLX:
        refuse_ranks_on_mlx(ranks.world_size)
    from ingot.backends.torch.collectives import Collectives

    return Collectives(ranks, device)


def run_elastic(*args: Any) -> int:
    """Start and restart the ranks of this machine as described in backends/torch/elastic.py."""
    from ingot.backends.torch import elastic

    return elastic.run_elastic(*args)


def on_first_rank(device: Device, ranks: Ranks, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Call `decide` on the first rank and return its result (JSON values) on every rank; if `decide` fails, all ranks fail."""
    group = open_group(device, ranks)
    if ranks.first:
        try:
            decided = decide()
        except IngotError as error:
            group.broadcast(json.dumps({"exit_code": error.exit_code}))
            raise
        group.broadcast(json.dumps({"decided": decided}))
        return decided
    message = json.loads(group.broadcast(""))
    if "exit_code" in message:
        raise PeerLost(message["exit_code"])
    return dict(message["decided"])


def find_device(name: str, local_rank: int = 0) -> Device:
    """Return the device that `training.device` names; with `cuda` or `auto`, each local rank gets its own GPU."""
    if name == MLX:
        with _mlx_installed():
            from ingot.backends.mlx.inference import find_mlx_device
        return find_mlx_device()
    from ingot.backends.torch.device import find_torch_device

    return find_torch_device(name, local_rank)


def measure_flops(device: Device) -> float:
    """Return the floating-point operations per second of a large matmul, for devices whose peak is not published."""
    if device.kind == MLX:
        from ingot.backends.mlx.inference import make_matmul as make_mlx_matmul

        size, multiply = make_mlx_matmul()
    else:
        from ingot.backends.torch.device import make_matmul

        size, multiply = make_matmul(device)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        multiply()
        seconds.append(time.perf_counter() - began)
    return 2 * size**3 / min(seconds)


def preloadable(device: str) -> tuple[str, ...]:
    """Return the modules that a forkserver may import once for many runs, because they do not initialise the device."""
    return () if device == MLX else ("ingot.backends.torch.backend",)  # a forked process cannot use Metal


def packages(device: str) -> tuple[str, ...]:
    """Return the packages whose versions affect a run's results on a device; some may not be installed."""
    return ("torch", "numpy", "pydantic", *([MLX] if device == MLX else OF_KERNELS))


@contextmanager
def _mlx_installed() -> Iterator[None]:
    """Turn a failed import of mlx in the block into a ConfigError that gives the install command."""
    try:
        yield
    except ImportError as error:
        if "mlx" not in str(error) or "ingot" in (error.name or ""):
            raise
        advice = "pip install 'ingot-lm[mlx]' (Linux: pip install 'mlx[cpu]')"
        raise ConfigError("{0} needs mlx, which is not installed", ON_MLX, advice=advice) from None


def read_torch_weights(path: Path) -> dict[str, TensorRecord]:
    """Return the tensors of a state dict written by torch.save, without running any code from the file."""
    from ingot.backends.torch.state import load_saved, state_records

    return state_records(load_saved(path), path)


def export_onnx(config: Config, vocab_size: int, weights: Mapping[str, TensorRecord], path: Path, dtype: str) -> dict[str, Any]:
    """Build a config's model with torch, write it as an ONNX file, and return the sizes of the file's inputs."""
    from ingot.backends.torch.inference import TorchInference
    from ingot.backends.torch.onnx import write_onnx

    backend = TorchInference.of(config, vocab_size)
    backend.load_weights(weights, str(path))
    return write_onnx(backend.model, vocab_size, path, dtype)


def framework_version(device: str = "auto") -> str:
    """Return the version of the framework (torch or mlx) that is used for a device."""
    return metadata.version("mlx" if device == MLX else "torch")


def refuse_precision(config: Config) -> None:
    """Raise ConfigError if training.device is `mlx` or `cpu` and does not support the training precision."""
    device, precision = config.training.device.partition(":")[0], config.training.precision
    if device == "mlx" and precision == "fp16":
        raise ConfigError("{0} is not supported by {1}; use fp32 or bf16", Setting("training.precision", precision), ON_MLX)
    if device == "cpu":
        Device("cpu", 0, "cpu", None, ("fp32", "bf16")).precision(precision)


def refuse_ranks_on_mlx(world_size: int) -> None:
    """Raise ConfigError for more than one rank: MLX trains in a single process."""
    if world_size > 1:
        raise ConfigError(f"{{0}} trains in one process, but this run has {world_size} ranks; start it without torchrun", ON_MLX)


def refuse_torch_families(config: Config) -> None:
    """Raise ConfigError for a model family that only torch supports."""
    if config.model.family not in MLX_FAMILIES:
        raise ConfigError("{0} needs torch; leave {1} out", Setting("model.family", config.model.family), ON_MLX)


def refuse_torch_only(config: Config) -> None:
    """Raise ConfigError for a model family or settings of training that only torch supports."""
    refuse_torch_families(config)
    for path, accepted in TORCH_ONLY.items():
        if (value := attrgetter(path)(config)) not in accepted:
            shown = str(value).lower() if isinstance(value, bool) else value
            raise ConfigError("{0} needs torch; remove it or {1}", Setting(path, shown), ON_MLX)
