"""In place of ingot.runtime.memory: the one file leaves the allocator of a CPU as it is."""

from __future__ import annotations


def keep_freed_memory() -> None:
    """It is not kept."""
