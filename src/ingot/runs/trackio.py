"""trackio: a run in its store on this machine, which `trackio show` draws; it goes on when ours is resumed.

trackio finds a run again by its name alone, the newest that has it. So a run is given a name that no other has: that of its
folder and a few letters, which the folder keeps.

Nothing is imported before a run asks for it, and nothing leaves the machine unless trackio's own variables say where to. What it
prints is kept from standard output, which belongs to results.
"""

from __future__ import annotations

import importlib
import io
import secrets
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from ingot.errors import ConfigError, RunError
from ingot.runs.folder import TRACKIO_ID
from ingot.runs.tracked_id import keep_id, read_id


class TrackioRun:
    """A run of trackio, begun, or continued where the session goes on."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any], goes_on: bool) -> None:
        try:
            self._package = importlib.import_module("trackio")
        except ImportError:
            advice = "install it with: pip install 'ingot-lm[trackio]'"
            raise ConfigError(f"tracking.trackio_project={project} needs trackio", advice=advice) from None
        known = read_id(folder / TRACKIO_ID) if goes_on else None
        name = known or f"{folder.resolve().name}-{secrets.token_hex(4)}"
        keep_id(folder / TRACKIO_ID, name)
        try:
            with redirect_stdout(io.StringIO()):
                self._run = self._package.init(
                    project=project,
                    name=name,
                    config=dict(config),
                    resume="never" if known is None else "allow",
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
        except Exception as error:  # whatever it raises
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise RunError(f"trackio does not start: {reason}") from None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Give it the values of a step; a thread of its own writes them."""
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        """End the run at trackio."""
        with redirect_stdout(io.StringIO()):
            self._package.finish()
