"""The door for people who come from nanoGPT: `train.py`, `sample.py`, `bench.py`, their presets, data folders and checkpoints.

It only translates: its users' keys become one Config of ours, the loop's reports their log lines, our checkpoints their ckpt.pt.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.runtime.files import open_to_read

if TYPE_CHECKING:
    from ingot.compat.nanogpt.session import Session

__all__ = ["Session"]


def is_ckpt(path: Path) -> bool:
    """Whether a file is to be read as a ckpt.pt: by its name, or as a zip, which torch writes, whatever its name."""
    if not path.is_file():
        return False
    try:
        with open_to_read(path) as file:
            return path.suffix in (".pt", ".pth") or file.read(2) == b"PK"
    except OSError:  # told by whoever reads it
        return path.suffix in (".pt", ".pth")


def __getattr__(name: str) -> Any:
    if name == "Session":  # on demand: torch takes seconds to load
        from ingot.compat.nanogpt.session import Session

        return Session
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
