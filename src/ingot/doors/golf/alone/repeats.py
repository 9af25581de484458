"""Golf's one file gives handlers back as they were."""

from __future__ import annotations

from typing import Any


def handler_after_stop(number: int, before: Any) -> Any:
    """What handles a signal after a run was stopped."""
    return before
