"""In place of ingot.doors.not_ours: Python tells its errors itself."""

from __future__ import annotations


def told(error: object) -> None:
    """Nothing of ours is said."""


def show_warnings() -> None:
    """They are as they are."""
