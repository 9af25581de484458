"""In place of ingot.runtime.version: what the file that runs says of itself."""

from __future__ import annotations


def made_by() -> str:
    """What a log says of its maker."""
    return f"ingot {__loader__.version}, one file"  # type: ignore[name-defined]
