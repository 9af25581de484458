"""Preparation in small steps, stopped after a chosen one. As a program it prepares FOLDER/corpus and is killed there."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ingot.data.prepare import blocks, pipeline
from ingot.data.store.staging import StagedFolder
from ingot.data.store.writer import Encoded, SplitWriter

Patch = Callable[[Any, str, Any], None]


def take_small_steps(patch: Patch = setattr) -> None:
    """Blocks of a few hundred bytes, and a point to go on from every few hundred tokens."""
    patch(blocks, "BLOCK_BYTES", 300)
    patch(pipeline, "BLOCK_BYTES", 300)
    patch(pipeline, "SAVE_TOKENS", 400)


def stop_behind(points: int, act: Callable[[], None], patch: Patch = setattr) -> None:
    """Act when this many points have been saved and more has been written."""
    saved = 0
    save, add = StagedFolder.save, SplitWriter.add

    def counted_save(self: StagedFolder, point: Any) -> None:
        nonlocal saved
        save(self, point)
        saved += 1

    def watched_add(self: SplitWriter, documents: Encoded) -> None:
        add(self, documents)
        if saved >= points:
            self._index.flush()
            act()

    patch(StagedFolder, "save", counted_save)
    patch(SplitWriter, "add", watched_add)


if __name__ == "__main__":
    folder, at, workers = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    take_small_steps()
    stop_behind(at, lambda: os.kill(os.getpid(), signal.SIGKILL))
    pipeline.prepare([folder / "corpus"], folder / "out", "byte", shard_tokens=1000, workers=workers)
