"""The door for people who come from nanoGPT: `train.py`, `sample.py`, `bench.py`, their presets, data folders and checkpoints.

It only translates: its users' keys become one Config of ours, the loop's reports their log lines, our checkpoints their ckpt.pt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingot.doors.nanogpt.session import Session

__all__ = ["Session"]


def __getattr__(name: str) -> Any:
    if name == "Session":  # on demand: torch takes seconds to load
        from ingot.doors.nanogpt.session import Session

        return Session
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
