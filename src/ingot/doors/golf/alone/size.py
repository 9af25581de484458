"""In place of ingot.config.size: a model of 16 MB fits into any GPU, so nothing is recomputed that was not asked for."""

from __future__ import annotations

from ingot.config.schema import Config


def recomputed_every(config: Config, vocab_size: int, memory: int | None) -> int:
    """Every how many-th block is recomputed in the backward pass; 0: none."""
    asked = config.training.gradient_checkpointing
    return 0 if asked == "auto" else int(asked)
