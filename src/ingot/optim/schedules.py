"""Learning rates and Muon's momentum: pure functions of where a run stands, so that a resume computes what the unbroken run did.

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


@dataclass(frozen=True)
class Rates:
    """What a schedule asks of the optimizers for one step: the factor on every peak learning rate, and Muon's momentum."""

    scale: float
    momentum: float


def rates_at(config: Config, position: Position) -> Rates:
    """The rates of the step that begins at `position`."""
    return Rates(learning_rate_scale(config, position), muon_momentum(config, position.step))


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
        case "warmdown":
            decay = warmdown(position, o.decay_steps or 1)
    return warmup * (o.floor + (1 - o.floor) * decay)


def cosine(done: float, length: float) -> float:
    """From one to zero along half a cosine; one before, zero after."""
    return 0.5 * (1 + math.cos(math.pi * _clamp(done / length)))


def linear(done: float, length: float) -> float:
    """From one to zero along a line; one before, zero after."""
    return 1.0 - _clamp(done / length) if length > 0 else 1.0


def warmdown(position: Position, steps: int) -> float:
    """One, then to zero along a line over the last `steps`; under a budget of seconds, over the time so many steps take.

    That time is measured by the average step so far. Where it is longer than the whole budget the line is met at once, below one.
    """
    if position.seconds is None:
        left: float = (position.max_steps or 0) - position.step
        length: float = steps
    else:
        left = position.seconds - position.elapsed
        length = steps * position.elapsed / max(position.step, 1)
    return _clamp(left / length) if left <= length else 1.0


def muon_momentum(config: Config, step: int) -> float:
    """Muon's momentum in a step: from muon_momentum_start to muon_momentum along a line, and there it stays."""
    o = config.optimizer
    if o.muon_momentum_start is None or step >= o.muon_momentum_warmup_steps:
        return o.muon_momentum
    return o.muon_momentum_start + (o.muon_momentum - o.muon_momentum_start) * step / o.muon_momentum_warmup_steps


def _clamp(x: float) -> float:
    return min(1.0, max(0.0, x))
