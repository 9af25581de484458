"""nanoGPT's `train.py`, `sample.py` and `bench.py`, with their presets, data folders, log lines and checkpoints.

This package only translates: nanoGPT's keys to a Config, training events to its log lines, and checkpoints to ckpt.pt files.
"""

from __future__ import annotations

from pathlib import Path

CKPT = "ckpt.pt"


def is_ckpt(path: Path) -> bool:
    """Return True if a file should be read as a ckpt.pt: it ends in .pt or .pth, or is a zip archive, as torch.save writes."""
    import zipfile

    return path.is_file() and (path.suffix in (".pt", ".pth") or zipfile.is_zipfile(path))
