"""The models that the page lets write: one at a time, the newest checkpoint of a run, by the engine that serves clients."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.errors import CheckpointError
from ingot.runs.run import Run

if TYPE_CHECKING:
    from ingot.trained.serving import Engine


class Playground:
    """Opens models when they are asked for."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._lock = asyncio.Lock()
        self._opened: tuple[Path, Engine] | None = None

    async def engine(self, run: Run) -> tuple[Engine, Path]:
        """The engine of a run's newest checkpoint, and which that is."""
        saved = run.checkpoints()
        if not saved:
            raise CheckpointError(f"{run.path} has no checkpoint yet; wait for its first")
        newest = saved[max(saved)]
        async with self._lock:
            if self._opened is None or self._opened[0] != newest:
                await asyncio.to_thread(self.close)
                self._opened = (newest, await asyncio.to_thread(_open, newest, self.device))
            return self._opened[1], newest

    def close(self) -> None:
        """Let go of the model."""
        if self._opened is not None:
            self._opened[1].close()
            self._opened = None


def _open(path: Path, device: str) -> Engine:
    from ingot.api import load
    from ingot.trained.serving import Engine

    return Engine(load(path, device=device))
