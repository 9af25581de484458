"""Where a machine keeps what any run can make anew: prepared samples, what was found out about kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """INGOT_CACHE, or a folder of the user's."""
    if cache := os.environ.get("INGOT_CACHE"):
        return Path(cache)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 (no home: stays as it is, relative)
    return Path(base) / "ingot"
