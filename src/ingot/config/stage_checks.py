"""What must fit together in the settings of groups of parameters and of stages."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ingot.config.schema import Config, GroupSection, StageSection


def check_groups_and_stages(config: Config) -> None:
    """Raise ValueError for the first thing that does not fit."""
    for number, group in enumerate(config.optimizer.groups):
        _group(config, group, f"optimizer.groups.{number}")
    for number, stage in enumerate(config.training.stages):
        _stage(config, stage, f"training.stages.{number}")
    if config.training.stages:
        _stages(config)


def _group(config: Config, group: GroupSection, name: str) -> None:
    o = config.optimizer
    if Counter(other.name for other in o.groups)[group.name] > 1:
        raise ValueError(f"{name}.name={group.name} is the name of two groups; choose another")
    if group.name in o.kinds:
        raise ValueError(f"{name}.name={group.name} is a kind of parameters that has a group already; choose another name")
    foreign = ("beta1", "beta2", "epsilon") if group.optimizer == "muon" else ("momentum",)
    for setting in foreign:
        if getattr(group, setting) is not None:
            other = "adamw" if group.optimizer == "muon" else "muon"
            raise ValueError(f"{name}.{setting} is a setting of {other}, and {name}.optimizer={group.optimizer}; leave it out")


def _stage(config: Config, stage: StageSection, name: str) -> None:
    seq_len, o = config.data.seq_len, config.optimizer
    if (stage.share is None) == (stage.steps is None):
        given = "neither share nor steps" if stage.share is None else "share and steps"
        raise ValueError(f"{name} has {given}: how long it lasts is said by one of them")
    if stage.seq_len is not None and seq_len % stage.seq_len:
        what = "is longer than" if stage.seq_len > seq_len else "does not divide"
        raise ValueError(
            f"{name}.seq_len={stage.seq_len} {what} data.seq_len={seq_len}; data.seq_len is the longest row and the others are "
            "pieces of it"
        )
    first = config.training.stages[0].model
    if stage.model.keys() != first.keys():
        odd = min(stage.model.keys() ^ first.keys())
        raise ValueError(f"{name}.model: {odd} is set in some stages and not in others; set it in all of them")
    names = [*(group.name for group in o.groups), *o.kinds]
    if unknown := [group for group in stage.rates if group not in names]:
        raise ValueError(f"{name}.rates.{unknown[0]}: there is no such group; there are {', '.join(names)}")


def _stages(config: Config) -> None:
    stages, max_steps = config.training.stages, config.training.max_steps
    if config.data.sampling == "stream":
        raise ValueError(
            "training.stages does not go together with data.sampling=stream, whose steps all have the same size; use shuffle, "
            "redraw, random or pack"
        )
    longest = max(stage.seq_len or config.data.seq_len for stage in stages)
    if longest < config.data.seq_len:
        raise ValueError(
            f"training.stages: the longest rows have {longest} tokens and data.seq_len={config.data.seq_len}; set data.seq_len "
            "to the longest"
        )
    shares, steps = [stage.share for stage in stages if stage.share], [stage.steps for stage in stages if stage.steps]
    if shares and steps:
        raise ValueError("training.stages: some last a share and some a number of steps; use one of them for all")
    if shares and abs(sum(shares) - 1) > 1e-6:
        raise ValueError(f"training.stages: the shares add up to {sum(shares):g}, not to 1")
    if steps and max_steps is not None and sum(steps) > max_steps:
        raise ValueError(f"training.stages: the stages have {sum(steps):,} steps and training.max_steps={max_steps:,}")
