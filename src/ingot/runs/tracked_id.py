"""Which run of a dashboard a run folder is: a small file of the folder's own.

It is chosen here and not by the dashboard: one that is known before the first value is sent survives a kill.
"""

from __future__ import annotations

import json
from pathlib import Path

from ingot.runtime.files import read_dict, write_atomically, writing


def read_id(path: Path) -> str | None:
    """What a file of a run folder says; None where it says nothing."""
    known = (read_dict(path) or {}).get("id")
    return known if isinstance(known, str) else None


def keep_id(path: Path, run: str) -> None:
    """Let a run folder say which run it is."""
    with writing(path):
        write_atomically(path, json.dumps({"id": run}))
