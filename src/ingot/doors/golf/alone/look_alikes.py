"""In place of ingot.doors.golf.look_alikes: whoever runs a submission has its variables from its page."""

from __future__ import annotations

from typing import Any


def look_alikes(*_: Any) -> list[str]:
    """None."""
    return []
