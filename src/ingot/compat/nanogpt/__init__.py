"""nanoGPT's `train.py`, `sample.py` and `bench.py`, with their presets, data folders, log lines and checkpoints.

This package only translates: keys become one Config, training reports nanoGPT's log lines, checkpoints become ckpt.pt.
"""

from __future__ import annotations

from pathlib import Path

from ingot.runtime.files import open_to_read


def is_ckpt(path: Path) -> bool:
    """Return True if a file should be read as a ckpt.pt: it has that suffix, or is a zip archive, which torch.save writes."""
    if not path.is_file():
        return False
    try:
        with open_to_read(path) as file:
            return path.suffix in (".pt", ".pth") or file.read(2) == b"PK"
    except OSError:  # reading it later reports the error
        return path.suffix in (".pt", ".pth")
