"""Schedules of learning rates, Muon's momentum and weight decay, and the weight average: pure functions of a run's progress.

A schedule depends only on the number of completed steps and the training time in seconds, so a resumed run continues it. If a
schedule uses `seconds`, its values differ from run to run.
"""

from __future__ import annotations

import math

from ingot.config.schema import Config


def fraction_spent(config: Config, step: int, seconds: float) -> float:
    """Return the fraction of max_steps that is done or of budget.seconds that has passed, whichever is larger."""
    max_steps, budget = config.training.max_steps, config.budget.seconds
    return min(1.0, max(step / max_steps if max_steps else 0.0, seconds / budget if budget else 0.0))


def learning_rate_scale(config: Config, step: int, seconds: float) -> float:
    """Return the factor that scales all peak learning rates in the next step, after `step` steps and `seconds` of training."""
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
            # The factor is one until the last decay_steps steps, in which it falls linearly to zero. With a budget in seconds,
            # decay_steps become seconds at the average speed so far; if these exceed the budget, the factor starts below one.
            steps = o.decay_steps or 1
            left, needed = float((config.training.max_steps or 0) - step), float(steps)
            if config.budget.seconds is not None:
                left, needed = config.budget.seconds - seconds, steps * seconds / max(step, 1)
            decay = _clamp(left / needed) if left <= needed else 1.0
    return warmup * (o.floor + (1 - o.floor) * decay)


def linear(done: float, length: float) -> float:
    """Return a factor that falls linearly from one at `done` = 0 to zero at `done` = `length`, constant before and after."""
    return 1.0 - _clamp(done / length) if length > 0 else 1.0


def muon_momentum(config: Config, step: int, final: float | None = None) -> float:
    """Return Muon's momentum, which moves linearly from muon_momentum_start to `final` (None: muon_momentum) and stays there."""
    o = config.optimizer
    end = o.muon_momentum if final is None else final
    if o.muon_momentum_start is None or step >= o.muon_momentum_warmup_steps:
        return end
    return o.muon_momentum_start + (end - o.muon_momentum_start) * step / o.muon_momentum_warmup_steps


def muon_decay_scale(config: Config, step: int, seconds: float) -> float:
    """Return the scale of Muon's weight decay: 1, or falling from 1 to 0, or falling to 0.25 and then rising to 1.25."""
    match config.optimizer.muon_weight_decay_schedule:
        case "falling":
            return 1.0 - fraction_spent(config, step, seconds)
        case "rising":
            done = fraction_spent(config, step, seconds)
            return 1 - 1.5 * done if done < 0.5 else 2 * done - 0.75
    return 1.0


def average_decay(config: Config, step: int) -> float | None:
    """Return the decay of the moving average of the weights for a step; None if no average is kept.

    The decay is smaller in the first steps; otherwise the initial weights would dominate the average for a long time.
    """
    decay = config.optimizer.ema_decay
    return None if decay is None else min(decay, (1 + step) / (10 + step))


def _clamp(x: float) -> float:
    return min(1.0, max(0.0, x))
