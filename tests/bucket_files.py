"""Small folders of gpt-simple's kind: train/BUCKET and val/BUCKET with .bin and .idx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ingot.data.formats.gpt_simple_folder import DTYPES, index_bytes

EOS = 2  # of the byte tokenizer
Windows = Sequence[Sequence[int]]


def write_pair(path: Path, windows: Windows, repeats: Sequence[int] | None = None, width: int = 2) -> Path:
    """A .bin of some windows and its .idx; returns the .bin."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.array([token for window in windows for token in window], DTYPES[width]).tofile(path)
    offsets = np.cumsum([0, *map(len, windows)]).tolist()
    path.with_suffix(".idx").write_bytes(index_bytes(offsets, list(repeats or [0] * len(windows)), width))
    return path


def documents_of(name: str, count: int, least: int = 3, most: int = 9) -> list[list[int]]:
    """Documents of bytes, each different, that end with a mark; their lengths vary."""
    found = []
    for number in range(count):
        text = f"{name}{number:04d}" + "x" * (number * 7 % (most - least + 1))
        found.append([4 + byte for byte in text.encode()] + [EOS])
    return found


def write_buckets(folder: Path, buckets: Mapping[str, Windows], val: Mapping[str, Windows] | None = None) -> Path:
    """A folder of buckets, each in two files; what is validated on is the first documents unless it is given."""
    for name, windows in buckets.items():
        half = (len(windows) + 1) // 2
        write_pair(folder / "train" / name / "00000.bin", windows[:half])
        write_pair(folder / "train" / name / "00001.bin", windows[half:])
        write_pair(folder / "val" / name / "00000.bin", (val or buckets)[name][:4])
    return folder
