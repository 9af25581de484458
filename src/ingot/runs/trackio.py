"""trackio: a run in its store on this machine, which `trackio show` draws; it goes on when ours is resumed, by its name.

Nothing is imported before a run asks for it, and nothing leaves the machine unless trackio's own variables say where to. What it
prints is kept from standard output, which belongs to results.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

from ingot.errors import ConfigError, RunError


class TrackioRun:
    """A run of trackio, begun, or continued where the session goes on."""

    def __init__(self, project: str, name: str, config: Mapping[str, Any], goes_on: bool) -> None:
        try:
            self._package = importlib.import_module("trackio")
        except ImportError:
            advice = "install it with: pip install 'ingot[trackio]'"
            raise ConfigError(f"tracking.trackio_project={project} needs trackio", advice=advice) from None
        try:
            with redirect_stdout(io.StringIO()):
                self._run = self._package.init(
                    project=project,
                    name=name,
                    config=dict(config),
                    resume="allow" if goes_on else "never",
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
        """End it there."""
        with redirect_stdout(io.StringIO()):
            self._package.finish()
