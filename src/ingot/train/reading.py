"""What a checkpoint tells of where its run stood, checked before anything goes on from there."""

from __future__ import annotations

from dataclasses import fields

from pydantic import TypeAdapter

from ingot.errors import CheckpointError
from ingot.model.settings import MOST
from ingot.runs.checkpoints import Checkpoint
from ingot.train.progress import Progress


def read_progress(checkpoint: Checkpoint) -> Progress:
    """Where a run stood; CheckpointError where what is told of it cannot be."""
    known, told = {one.name for one in fields(Progress)}, dict(checkpoint.progress)
    try:
        if "phases" in told:  # of versions that kept where each of them began
            told["phases_begun"] = len(told["phases"])
        found = TypeAdapter(Progress).validate_python({k: v for k, v in told.items() if k in known})
        numbers = [found.step, found.sample, found.tokens, found.elapsed_seconds, found.evaluation_seconds, found.phases_begun]
        if not all(0 <= number < MOST for number in [*numbers, *found.starts, *found.places.values()]):
            raise ValueError
    except (TypeError, ValueError):  # pydantic's too
        raise CheckpointError(f"{checkpoint.path} is damaged: it does not say where its run stood") from None
    return found
