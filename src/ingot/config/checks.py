"""What must fit together in a config whose values are sound each by itself. A mistake is one line that names the setting."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ingot.config.bucket_checks import check_buckets
from ingot.config.stage_checks import check_groups_and_stages

if TYPE_CHECKING:
    from ingot.config.schema import Config


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
