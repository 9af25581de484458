"""To import this is to import what a run on an NVIDIA GPU needs besides torch: for a process of which runs are forks.

None of it touches the driver, which a fork could then not use; so whether there is a GPU is asked of the files alone.
"""

from __future__ import annotations

from pathlib import Path

from ingot.backends.torch.ahead import hash_triton, import_compiler
from ingot.backends.torch.attention import load_flash4

DRIVER = Path("/dev/nvidiactl")


def preload() -> None:
    if DRIVER.exists():
        hash_triton()
        import_compiler()
        load_flash4()


preload()
