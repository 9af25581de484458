"""What a checkpoint tells of where its run stood, checked before anything goes on from there."""

from __future__ import annotations

from dataclasses import fields
from itertools import chain

from pydantic import TypeAdapter

from ingot.errors import CheckpointError
from ingot.model.settings import MOST
from ingot.runs.checkpoints import Checkpoint
from ingot.train.progress import Progress


def read_progress(checkpoint: Checkpoint) -> Progress:
    """Where a run stood; CheckpointError where what is told of it cannot be."""
    known = {one.name for one in fields(Progress)}
    try:
        found = TypeAdapter(Progress).validate_python({k: v for k, v in checkpoint.progress.items() if k in known})
        numbers = [found.step, found.sample, found.tokens, found.elapsed_seconds, found.evaluation_seconds, *found.starts]
        if not all(0 <= number < MOST for number in [*numbers, *found.places.values(), *chain(*found.phases)]):
            raise ValueError
        if any(len(phase) != 2 for phase in found.phases):
            raise ValueError
    except ValueError:  # pydantic's too
        raise CheckpointError(f"{checkpoint.path} is damaged: it does not say where its run stood") from None
    return found
