"""Which device a run uses, in which precision, and how fast that device could be."""

from __future__ import annotations

import re

import torch

from ingot.errors import ConfigError, Setting

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Dense bf16 matrix rates from the vendors' data sheets, in FLOP/s, by a part of the device's name. The first match counts.
PEAK_FLOPS = {
    "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "GH200": 989e12, "H20": 148e12,
    "B200": 2250e12, "B300": 2250e12, "A100": 312e12, "A800": 312e12, "A40": 150e12, "A10G": 70e12, "A10": 125e12, "L40S": 362e12,
    "L40": 181e12, "L4": 121e12, "V100": 125e12, "T4": 65e12, "RTX 5090": 209e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """The device `training.device` asks for; each local rank has a GPU of its own."""
    setting = Setting("training.device", name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError("{0} is no device; use auto, cpu, cuda, cuda:N or mps", setting) from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = local_rank if device.index is None else device.index
        if index >= count:
            raise ConfigError(f"{{0}} asks for GPU {index} and this machine has {count}; use cpu or fewer ranks", setting)
        return torch.device("cuda", index)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("{0} needs an Apple GPU, and there is none here; use auto or cpu", Setting("training.device", "mps"))
    if device.type not in ("cpu", "mps"):
        raise ConfigError("{0} is not supported; use auto, cpu, cuda, cuda:N or mps", setting)
    return device


def pick_precision(name: str, device: torch.device) -> str:
    """bf16, fp16 or fp32: what `training.precision` says, or the best the device computes quickly."""
    if name != "auto":
        if name == "fp16" and device.type == "cpu":
            raise ConfigError(
                "{0} needs a GPU; on a CPU use fp32, or bf16 where the CPU has it", Setting("training.precision", name)
            )
        return name
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def peak_flops(device: torch.device) -> float | None:
    """The device's bf16 matrix rate; None where no data sheet says."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for part, rate in PEAK_FLOPS.items() if re.search(rf"\b{part}\b", name)), None)


def describe(device: torch.device) -> str:
    """The device in words, for logs and records."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads" if device.type == "cpu" else device.type
