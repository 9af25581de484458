"""How much memory a run takes: no framework is loaded and nothing is built.

An estimate: the state is exact, what a forward pass keeps is about right for the kernels that are used (attention never holds all
pairs).
"""

from __future__ import annotations

import shutil
import subprocess
from contextlib import suppress

from ingot.config.schema import Config
from ingot.config.size import Size, row_bytes, state_bytes, step_bytes


def least_bytes(config: Config, size: Size, world_size: int) -> int:
    """What a rank takes whatever is computed at once: its state and the rows of its steps."""
    return state_bytes(config, size) + step_bytes(config, world_size)


def needed_bytes(config: Config, size: Size, vocab_size: int, world_size: int) -> int:
    """About the least memory that a rank needs: its state, and the rows that it computes at once."""
    asked = config.training.micro_batch
    rows = min(1 if asked == "auto" else asked, max(1, config.rows_per_step // world_size))
    return least_bytes(config, size, world_size) + rows * row_bytes(
        config, vocab_size, bool(config.training.gradient_checkpointing)
    )


def has_gpu() -> bool:
    """Whether the tool of the GPU's vendor is here."""
    return shutil.which("nvidia-smi") is not None


def gpu_bytes() -> int | None:
    """The memory of the smallest GPU here by the vendor's own tool; None where there is none."""
    if not has_gpu():
        return None
    words = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        out = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout
        return min(int(line) for line in out.split()) << 20
    return None
