"""A framework-independent description of a device, with its peak FLOP/s."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ingot.errors import ConfigError, Setting

# Dense bf16 matmul rates from the vendors' data sheets, in FLOP/s, keyed by a substring of the device name. The first match wins.
PEAK_FLOPS = {
    "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "GH200": 989e12, "H20": 148e12,
    "B200": 2250e12, "B300": 2250e12, "A100": 312e12, "A800": 312e12, "A40": 150e12, "A10G": 70e12, "A10": 125e12, "L40S": 362e12,
    "L40": 181e12, "L4": 121e12, "V100": 125e12, "T4": 65e12, "RTX 5090": 209e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip

DEVICES = re.compile(r"auto|(cpu|cuda|mps)(:(0|[1-9]\d*))?|mlx")  # values of training.device


@dataclass(frozen=True)
class Device:
    """A CPU or GPU of this machine."""

    kind: str  # cpu, cuda, mps or mlx
    index: int  # index among the devices of its kind
    name: str  # shown in logs and files
    peak_flops: float | None  # dense bf16 matmul rate in FLOP/s; None if unknown
    precisions: tuple[str, ...]  # supported precisions, the preferred one first

    def __str__(self) -> str:
        """Return the device in the notation of `training.device`."""
        return f"{self.kind}:{self.index}" if self.kind == "cuda" else self.kind

    def precision(self, requested: str) -> str:
        """Return the requested precision or, for `auto`, the preferred one; raise ConfigError if it is not supported."""
        if requested == "auto":
            return self.precisions[0]
        if requested not in self.precisions:
            advice = "on a CPU use fp32, or bf16 if the CPU supports it"
            raise ConfigError("{0} needs a GPU", Setting("training.precision", requested), advice=advice)
        return requested


def data_sheet_flops(name: str) -> float | None:
    """Return the dense bf16 matmul rate, in FLOP/s, of the GPU with this name; None if unknown."""
    return next((rate for part, rate in PEAK_FLOPS.items() if re.search(rf"\b{part}\b", name)), None)
