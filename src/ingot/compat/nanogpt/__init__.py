"""nanoGPT's `train.py`, `sample.py` and `bench.py`, with their presets, data folders, log lines and checkpoints.

This package only translates: keys become one Config, training prints nanoGPT's log lines, checkpoints become ckpt.pt.
"""

from __future__ import annotations

from pathlib import Path

CKPT = "ckpt.pt"


def is_ckpt(path: Path) -> bool:
    """Return True if a file should be read as a ckpt.pt: it has that suffix, or is a zip archive, which torch.save writes."""
    import zipfile

    return path.is_file() and (path.suffix in (".pt", ".pth") or zipfile.is_zipfile(path))
