"""Which run of a dashboard a run folder is: a small file of the folder's own.

It is chosen here and not by the dashboard: one that is known before the first value is sent survives a kill.
"""

from __future__ import annotations

import json
from pathlib import Path

from ingot.runtime.files import read_json, write_atomically, writing


def read_id(path: Path) -> str | None:
    """What a file of a run folder says; None where it says nothing."""
    try:
        known = read_json(path)["id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return known if isinstance(known, str) else None


def keep_id(path: Path, run: str) -> None:
    """Let a run folder say which run it is."""
    with writing(path):
        write_atomically(path, json.dumps({"id": run}))
