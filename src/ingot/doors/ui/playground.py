"""The models that the page lets write: one at a time, the newest checkpoint of a run, by the engine that serves clients."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.doors.serve.requests import Refused
from ingot.errors import CheckpointError
from ingot.runs.run import Run

if TYPE_CHECKING:
    from ingot.trained.serving import Engine


class Playground:
    """Opens models when they are asked for."""

    def __init__(self, device: str, allow_custom_models: bool) -> None:
        self.device, self._allow_custom_models = device, allow_custom_models
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
                self._opened = (newest, await asyncio.to_thread(_open, newest, self.device, self._allow_custom_models))
            return self._opened[1], newest

    def close(self) -> None:
        """Let go of the model."""
        if self._opened is not None:
            self._opened[1].close()
            self._opened = None


def _open(path: Path, device: str, allow_custom_models: bool) -> Engine:
    from ingot.trained.model import find_tokenizer, open_model
    from ingot.trained.serving import Engine
    from ingot.trained.weights import open_weights

    weights = open_weights(path)
    if weights.config.model.family == "file" and not allow_custom_models:
        said = f"{path} has a custom model, whose Python file would run; start ingot ui with --allow-custom-models to open it"
        raise Refused(said, status=403)
    return Engine(open_model(weights, find_tokenizer(weights), device))
