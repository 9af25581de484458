"""The plan of a step (its rows and learning rates): a pure function of the config and the run's position.

A run without `training.stages` has one stage. All stages count data in rows of data.seq_len tokens, the longest row length; a
stage with shorter rows splits these, so that a single cursor tracks the data read across all stages. Phases, each with its own
mix of buckets, begin after the run has trained on a given number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from ingot.backends.base import GroupRates, StepPlan
from ingot.config.schema import Config, StageSection
from ingot.errors import ConfigError, Setting
from ingot.optim.assign import ParameterGroup, groups_of
from ingot.optim.schedules import average_decay, fraction_spent, learning_rate_scale, muon_decay_scale, muon_momentum
from ingot.train.reader import RankBatch

ONE_STAGE = (StageSection(share=1.0),)
ROUNDING = 1e-9  # tolerance for floating-point error, such as 3 * 0.1 > 0.3


@dataclass(frozen=True)
class Position:
    """The progress of a run before a step, in steps, rows, tokens, seconds, stages and phases; identical on all ranks."""

    step: int = 0
    sample: int = 0
    tokens: int = 0
    seconds: float = 0.0
    starts: tuple[int, ...] = ()  # the first step of each stage that has begun
    phases: int = 0  # number of phases that have begun
    places: Mapping[str, int] = field(default_factory=dict)  # number of rows read from each bucket


def plan_step(config: Config, at: Position) -> StepPlan:
    """Return the plan of the step that begins at a position."""
    stages = _stages(config)
    if stages[0].steps is not None:
        ends: list[float] = list(accumulate(stage.steps or 0 for stage in stages))
        done: float = at.step
    else:
        ends = list(accumulate(stage.share or 0.0 for stage in stages))
        done = fraction_spent(config, at.step, at.seconds) + ROUNDING
    over = sum(done >= end for end in ends[:-1])  # the last stage lasts until the end of the run
    stage = max(over, len(at.starts) - 1)  # a run whose budget is raised does not return to an earlier stage
    scale = learning_rate_scale(config, at.step, at.seconds)
    later = max(0.0, 1 - done / ends[-2]) if stage < len(stages) - 1 else 0.0
    return _plan(config, at, stage, scale, muon_decay_scale(config, at.step, at.seconds), later)


def shapes(config: Config) -> list[StepPlan]:
    """Return one plan per stage, at its peak learning rates, for tuning and compiling before the clock starts."""
    last = len(_stages(config)) - 1
    return [_plan(config, Position(), stage, 1.0, 1.0, float(stage < last)) for stage in range(last + 1)]


def refuse_idle_ranks(config: Config, world_size: int) -> None:
    """Raise an error if there are more ranks than rows in the smallest step."""
    least = min(shapes(config), key=lambda plan: plan.samples)
    if world_size > least.samples:
        of_stage = config.training.stages and config.training.stages[least.stage].tokens_per_step is not None
        setting = Setting(f"training.stages.{least.stage}.tokens_per_step" if of_stage else "training.tokens_per_step")
        what = f"{world_size} ranks cannot share the {least.samples} rows of a step"
        raise ConfigError(what, setting, advice="use fewer ranks or raise {0}")


def following(config: Config, plan: StepPlan, read: RankBatch) -> StepPlan:
    """Predict the next plan from `plan` and the batch read for it. The prediction ignores the clock, so it can be wrong."""
    tokens, starts = plan.tokens + read.targets, (0,) * (plan.stage + 1)
    at = Position(plan.step + 1, read.next_sample, tokens, starts=starts, phases=plan.phase + 1, places=read.places)
    return plan_step(config, at)


def starts_with(at: Position, plan: StepPlan) -> tuple[int, ...]:
    """Return the first step of each stage up to `plan.stage`, including skipped stages (those shorter than a step)."""
    return at.starts + (at.step,) * (plan.stage + 1 - len(at.starts))


def _stages(config: Config) -> tuple[StageSection, ...]:
    return tuple(config.training.stages) or ONE_STAGE


def _plan(config: Config, at: Position, number: int, scale: float, muon_decay: float, later: float) -> StepPlan:
    stage, longest = _stages(config)[number], config.data.seq_len
    samples = (stage.tokens_per_step or config.training.tokens_per_step) // longest
    seq_len = stage.seq_len or longest
    phases = config.data.phases
    over = sum(at.tokens >= end for end in accumulate(phase.tokens for phase in phases[:-1]))  # the last phase is open-ended
    begun = min(at.phases, len(phases)) - 1  # a run whose phases are lengthened does not return to an earlier phase

    def rates(group: ParameterGroup) -> GroupRates:
        lr = group.learning_rate * (scale * stage.rate * stage.rates.get(group.name, 1.0))
        if group.optimizer == "muon":
            return GroupRates(lr, muon_momentum(config, at.step, group.momentum), group.weight_decay * muon_decay)
        return GroupRates(lr, None, group.weight_decay)

    return StepPlan(
        step=at.step,
        stage=number,
        sample=at.sample,
        samples=samples,
        rows=samples * (longest // seq_len),
        seq_len=seq_len,
        groups={group.name: rates(group) for group in groups_of(config.optimizer)},
        model=stage.model,
        later=later if config.training.later_targets else 0.0,
        ema_decay=average_decay(config, at.step),
        tokens=at.tokens,
        phase=max(0, over, begun),
        places=at.places,
    )
