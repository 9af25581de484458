"""In place of ingot.train.reading: golf's one file reads checkpoints that it wrote itself."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ingot.train.progress import Progress


def read_progress(checkpoint: Any) -> Progress:
    """Where a run stood."""
    known = {one.name for one in fields(Progress)}
    return Progress(**{key: value for key, value in checkpoint.progress.items() if key in known})
