"""The run folder: everything a run leaves behind, readable without us, and owned by one process at a time."""

from ingot.runs.files import fsync_dir, write_atomically
from ingot.runs.folder import RunFolder, new_run_dir
from ingot.runs.lock import RunLock, liveness
from ingot.runs.metrics import Metrics
from ingot.runs.state import Heartbeat, State, read_state

__all__ = [
    "Heartbeat",
    "Metrics",
    "RunFolder",
    "RunLock",
    "State",
    "fsync_dir",
    "liveness",
    "new_run_dir",
    "read_state",
    "write_atomically",
]
