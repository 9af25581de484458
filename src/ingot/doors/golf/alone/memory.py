"""In place of ingot.runtime.memory: the one file leaves the allocator and the collector of garbage as they are."""

from __future__ import annotations

from contextlib import ExitStack as collected_later

__all__ = ["collected_later", "keep_freed_memory"]


def keep_freed_memory() -> None:
    """It is not kept."""
