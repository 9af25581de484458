"""RUN_ID: what it may be, and the folder of the run that it names."""

from __future__ import annotations

import os
from pathlib import Path

from ingot.errors import ConfigError
from ingot.runs.state import read_state

LONGEST = 200  # bytes of a RUN_ID; a file name has at most 255, and those of a run have more than its RUN_ID


def run_folder(logs: Path, run_id: str, first: bool) -> Path:
    """logs/RUN_ID; for the first rank, after a run that is complete there, the next free or unfinished one: logs/RUN_ID-2, ..."""
    if Path(run_id).name != run_id or run_id == ".." or not run_id.isprintable() or len(os.fsencode(run_id)) > LONGEST:
        raise ConfigError(
            f"RUN_ID={run_id} names a file in {logs}/; it may not be a path, have line breaks or be longer than {LONGEST} bytes"
        )
    folder, number = logs / run_id, 1
    while first and (state := read_state(folder)) is not None and state.status == "completed":
        number += 1
        folder = logs / f"{run_id}-{number}"
    return folder
