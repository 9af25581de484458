"""How old a process is: counts a program's time with its imports, and tells a process from one that got its number later."""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_age(pid: int | str = "self") -> float | None:
    """Seconds since a process of this machine began; None where the system does not say."""
    try:
        since_boot = int(_fields(pid)[19]) / os.sysconf("SC_CLK_TCK")  # the 22nd field
        return time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot
    except (OSError, AttributeError, IndexError):
        return None


def is_zombie(pid: int) -> bool:
    """Whether a process of this machine is over and only waits for its parent to ask how it ended."""
    try:
        return _fields(pid)[0] in ("Z", "X")
    except (OSError, IndexError):
        return False


def _fields(pid: int | str) -> list[str]:
    """What the system says of a process, from the third field on: the second, its name, may have spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
