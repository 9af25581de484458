"""Learning rates and Muon's momentum: pure functions of a run's progress, so that a resumed run computes the same.

A schedule depends only on the number of completed steps and the training time in seconds. Schedules that use `seconds` follow the
clock; the others are reproducible.
"""

from __future__ import annotations

import math

from ingot.config.schema import Config


def fraction_spent(config: Config, step: int, seconds: float) -> float:
    """Return the fraction of the budget that is spent, in steps or seconds, whichever is larger."""
    max_steps, budget = config.training.max_steps, config.budget.seconds
    return min(1.0, max(step / max_steps if max_steps else 0.0, seconds / budget if budget else 0.0))


def learning_rate_scale(config: Config, step: int, seconds: float) -> float:
    """Return the factor on all peak learning rates for the next step, after `step` steps and `seconds` of training."""
    o = config.optimizer
    warmup = min(1.0, (step + 1) / (o.warmup_steps + 1))
    match o.schedule:
        case "constant":
            return warmup
        case "cosine":
            end = o.decay_steps or config.training.max_steps or 1
            decay = 0.5 * (1 + math.cos(math.pi * _clamp((step - o.warmup_steps) / (end - o.warmup_steps))))
        case "wsd":
            length = o.decay_steps or max(1, (config.training.max_steps or 1) // 5)
            decay = linear(step - ((config.training.max_steps or 1) - length), length)
        case "budget":
            decay = linear(fraction_spent(config, step, seconds) - (1 - o.decay_fraction), o.decay_fraction)
        case "warmdown":
            # One, then linear to zero over the last decay_steps steps. With a budget in seconds, over the time these steps take,
            # estimated from the average step so far. If that exceeds the whole budget, the decay starts at once, from below one.
            steps = o.decay_steps or 1
            left, needed = float((config.training.max_steps or 0) - step), float(steps)
            if config.budget.seconds is not None:
                left, needed = config.budget.seconds - seconds, steps * seconds / max(step, 1)
            decay = _clamp(left / needed) if left <= needed else 1.0
    return warmup * (o.floor + (1 - o.floor) * decay)


def linear(done: float, length: float) -> float:
    """Return a factor that decays linearly from one to zero over `length`; it is one before and zero after that."""
    return 1.0 - _clamp(done / length) if length > 0 else 1.0


def muon_momentum(config: Config, step: int, final: float | None = None) -> float:
    """Return Muon's momentum, which changes linearly from muon_momentum_start to `final` (default: muon_momentum), then stays."""
    o = config.optimizer
    end = o.muon_momentum if final is None else final
    if o.muon_momentum_start is None or step >= o.muon_momentum_warmup_steps:
        return end
    return o.muon_momentum_start + (end - o.muon_momentum_start) * step / o.muon_momentum_warmup_steps


def muon_decay_scale(config: Config, step: int, seconds: float) -> float:
    """Return the factor on Muon's weight decay: 1, falling linearly to 0, or falling to 0.25 and then rising to 1.25."""
    match config.optimizer.muon_weight_decay_schedule:
        case "falling":
            return 1.0 - fraction_spent(config, step, seconds)
        case "rising":
            done = fraction_spent(config, step, seconds)
            return 1 - 1.5 * done if done < 0.5 else 2 * done - 0.75
    return 1.0


def average_decay(config: Config, step: int) -> float | None:
    """Return the decay of the weight average (EMA) for a step; None without an average.

    The decay is smaller at first; with a constant decay the average would retain the useless initial weights for long.
    """
    decay = config.optimizer.ema_decay
    return None if decay is None else min(decay, (1 + step) / (10 + step))


def _clamp(x: float) -> float:
    return min(1.0, max(0.0, x))
