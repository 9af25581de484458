"""Shards for tests, written whole."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ingot.data.store.shards import TokenWriter
from ingot.runtime.files import file_sha256


def write_shard(path: Path, tokens: NDArray[Any], wide: bool = False) -> str:
    """Write a shard with these tokens; returns its sha256."""
    with ExitStack() as files:
        writer = TokenWriter(path, files, "<u4" if wide else "<u2", header=True)
        writer.append(tokens.astype(np.uint32 if wide else np.uint16, copy=False))
        writer.close()
    return file_sha256(path)
