"""Learning-rate multipliers: pure functions of where a run stands, so that a resume computes what the unbroken run would have.

`Position` is all a schedule may look at. One that looks at `elapsed` follows the clock; the others are reproducible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ingot.config.schema import Config


@dataclass(frozen=True)
class Position:
    """Where a run stands before a step: steps done and seconds trained, and how many of each there are."""

    step: int
    elapsed: float
    max_steps: int | None
    seconds: float | None

    @property
    def spent(self) -> float:
        """The part of the budget that is used up: of the steps or of the seconds, whichever is further along."""
        by_steps = self.step / self.max_steps if self.max_steps else 0.0
        by_seconds = self.elapsed / self.seconds if self.seconds else 0.0
        return min(1.0, max(by_steps, by_seconds))


def learning_rate_scale(config: Config, position: Position) -> float:
    """The factor on every peak learning rate for the step that begins at `position`."""
    o = config.optimizer
    warmup = min(1.0, (position.step + 1) / (o.warmup_steps + 1))
    match o.schedule:
        case "constant":
            return warmup
        case "cosine":
            end = o.decay_steps or config.training.max_steps or 1
            decay = cosine(position.step - o.warmup_steps, end - o.warmup_steps)
        case "wsd":
            length = o.decay_steps or max(1, (config.training.max_steps or 1) // 5)
            decay = linear(position.step - ((config.training.max_steps or 1) - length), length)
        case "budget":
            decay = linear(position.spent - (1 - o.decay_fraction), o.decay_fraction)
    return warmup * (o.floor + (1 - o.floor) * decay)


def cosine(done: float, length: float) -> float:
    """From one to zero along half a cosine; one before, zero after."""
    return 0.5 * (1 + math.cos(math.pi * _clamp(done / length)))


def linear(done: float, length: float) -> float:
    """From one to zero along a line; one before, zero after."""
    return 1.0 - _clamp(done / length) if length > 0 else 1.0


def _clamp(x: float) -> float:
    return min(1.0, max(0.0, x))
