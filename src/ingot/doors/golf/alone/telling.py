"""In place of ingot.runs.telling: golf's one file reads checkpoints that it wrote itself."""

from __future__ import annotations


def tells_all(record: object) -> bool:
    """It does."""
    return True
