"""What must fit together in a config whose values are sound each by itself. A mistake is one line that names the setting."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ingot.config.schema import Config, GroupSection, StageSection


# What must fit together in the settings of buckets, documents and epochs.


def check_buckets(config: Config) -> None:
    """Raise ValueError for the first thing that does not fit."""
    data = config.data
    if data.overlap and data.sampling not in ("pack", "document"):
        raise ValueError(
            f"data.overlap={data.overlap} is for rows of whole documents, not for data.sampling={data.sampling}; use pack"
        )
    if data.already_read is not None and data.sampling not in ("pack", "document"):
        raise ValueError(f"data.already_read is for rows of whole documents, not for data.sampling={data.sampling}; use pack")
    if data.overlap > data.seq_len // 2:
        raise ValueError(f"data.overlap={data.overlap} is more than half of data.seq_len={data.seq_len}")
    if data.epochs is not None and data.sampling == "random":
        raise ValueError("data.epochs: data.sampling=random draws with replacement and has no epochs; use shuffle")
    mixes = {"data.mix": data.mix} if data.mix else {}
    mixes |= {f"data.phases.{number}.mix": phase.mix for number, phase in enumerate(data.phases)}
    for name, mix in mixes.items():
        if not any(mix.values()):
            raise ValueError(f"{name} gives no bucket a weight above 0")
        if data.sampling == "stream":
            raise ValueError(
                f"{name} does not go together with data.sampling=stream, which reads one stream; use shuffle, redraw or pack"
            )
    if data.mix and data.phases:
        raise ValueError("data.mix and data.phases are both set, and every phase has a mix of its own; leave data.mix out")
    if data.phases and any(stage.seq_len not in (None, data.seq_len) for stage in config.training.stages):
        raise ValueError("data.phases does not go together with training.stages that have row lengths of their own")


# What must fit together in the settings of groups of parameters and of stages.


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


def check(config: Config) -> None:
    """Raise ValueError for the first thing that does not fit."""
    _rows(config)
    data = config.data
    if data.mix or data.phases or data.overlap or data.epochs or data.already_read:
        check_buckets(config)
    _end(config)
    _schedule(config)
    if config.optimizer.groups or config.training.stages:
        check_groups_and_stages(config)


def _rows(config: Config) -> None:
    data, seq_len = config.data, config.data.seq_len
    _fills_rows(config, "training.tokens_per_step", config.training.tokens_per_step)
    for number, stage in enumerate(config.training.stages):
        if stage.tokens_per_step is not None:
            _fills_rows(config, f"training.stages.{number}.tokens_per_step", stage.tokens_per_step)
    if config.model.context is not None and config.model.context < seq_len:
        raise ValueError(
            f"model.context={config.model.context} is shorter than data.seq_len={seq_len}; raise it or set it to null"
        )
    if config.stride > seq_len:
        raise ValueError(f"evaluation.stride={config.stride} is longer than data.seq_len={seq_len} and would leave out text")
    spans = data.spans if isinstance(data.spans, int) else sum(data.spans)
    if data.sampling == "stream" and config.rows_per_step % spans:
        what = data.spans if isinstance(data.spans, int) else f"{data.spans}, together {spans} rows,"
        raise ValueError(
            f"data.spans={what} does not divide the {config.rows_per_step} rows of a step "
            f"(training.tokens_per_step={config.training.tokens_per_step:,} / data.seq_len={seq_len:,})"
        )


def _fills_rows(config: Config, name: str, tokens: int) -> None:
    seq_len = config.data.seq_len
    if tokens % seq_len:
        below = tokens // seq_len * seq_len
        nearest = f"{below:,} and {below + seq_len:,}" if below else f"{seq_len:,}"
        raise ValueError(f"{name}={tokens:,} is not a multiple of data.seq_len={seq_len:,}; the nearest that is: {nearest}")


def _end(config: Config) -> None:
    t = config.training
    if t.max_steps is None and config.budget.seconds is None:
        raise ValueError("nothing ends this run: set training.max_steps or budget.seconds, or start from one of `ingot recipes`")
    if not t.save_every and not t.save_seconds:
        raise ValueError(
            "training.save_every and training.save_seconds are both 0: nothing would be saved before the end; set one"
        )


def _schedule(config: Config) -> None:
    o, max_steps = config.optimizer, config.training.max_steps
    if o.schedule == "warmdown" and o.decay_steps is None:
        raise ValueError("optimizer.schedule=warmdown needs optimizer.decay_steps, the length of the decay in steps")
    if o.schedule not in ("cosine", "wsd"):
        return
    if max_steps is None and o.decay_steps is None:
        raise ValueError(
            f"optimizer.schedule={o.schedule} counts steps and training.max_steps is null; set it or optimizer.decay_steps, "
            "or use optimizer.schedule=budget, which follows the clock"
        )
    if o.schedule == "wsd" and max_steps is None:
        raise ValueError(
            "optimizer.schedule=wsd decays towards training.max_steps, which is null; set it or use optimizer.schedule=budget"
        )
    if o.warmup_steps >= (o.decay_steps if o.schedule == "cosine" and o.decay_steps else max_steps or 1):
        raise ValueError(
            f"optimizer.warmup_steps={o.warmup_steps} leaves no step to decay in; lower it or raise training.max_steps"
        )
