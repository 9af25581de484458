"""What must fit together in the settings of buckets, documents and epochs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ingot.config.schema import Config


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
