"""In place of ingot.backends.torch.room: whether a submission fits was found out by the run that it comes from."""

from __future__ import annotations

from typing import Any


def refuse_too_large(*_: Any) -> None:
    """Nothing is refused."""


def recomputed(*_: Any) -> int:
    """No block is: no variable asks for it."""
    return 0
