"""How old a process is: counts a program's time with its imports, and tells a process from one that got its number later."""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_age(pid: int | str = "self") -> float | None:
    """Seconds since a process of this machine began; None where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # the 22nd field; these begin with the third
        return time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot
    except (OSError, AttributeError, IndexError):
        return None
