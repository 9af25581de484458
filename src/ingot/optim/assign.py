"""Which group a parameter belongs to, and what each group's optimizer and peak rates are. No framework is needed to say so.

The groups of `optimizer.groups` come first, by the names of parameters; what they leave is grouped by kind, which the framework
finds out (see groups.py). `rest` exists beside Muon alone: what has two or more dimensions and is not a matrix of a block.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from ingot.config.schema import GroupSection, OptimizerSection
from ingot.errors import ConfigError

Kind = Literal["embedding", "head", "matrix", "scalar"]


@dataclass(frozen=True)
class Group:
    """How some parameters are updated when no schedule holds them back."""

    name: str
    optimizer: Literal["adamw", "muon"]
    learning_rate: float
    weight_decay: float
    momentum: float | None = None  # of Muon, after its warm-up
    betas: tuple[float, float] = (0.0, 0.0)  # of AdamW, as is epsilon
    epsilon: float = 0.0


def groups_of(o: OptimizerSection) -> list[Group]:
    """Every group of a run: its own, then one for each kind, whether or not the model has such parameters."""
    rates = {"embedding": o.embedding_learning_rate, "head": o.head_learning_rate, "scalar": o.scalar_learning_rate}
    by_kind = [
        GroupSection(
            name=kind,
            match="*",
            optimizer="muon" if kind == "matrix" and o.name == "muon" else "adamw",
            learning_rate=rates.get(kind),
            weight_decay=0.0 if kind == "scalar" else None,
        )
        for kind in o.kinds
    ]
    return [_resolved(o, group) for group in (*o.groups, *by_kind)]


def _resolved(o: OptimizerSection, group: GroupSection) -> Group:
    """A group with the settings of all where it has none of its own."""
    muon = group.optimizer == "muon"
    rate, decay = group.learning_rate, group.weight_decay
    if rate is None:
        rate = o.muon_learning_rate if muon else o.learning_rate
    if decay is None:
        decay = o.muon_weight_decay if muon else o.weight_decay
    if muon:
        return Group(group.name, "muon", rate, decay, o.muon_momentum if group.momentum is None else group.momentum)
    betas = (o.beta1 if group.beta1 is None else group.beta1, o.beta2 if group.beta2 is None else group.beta2)
    return Group(group.name, "adamw", rate, decay, betas=betas, epsilon=o.epsilon if group.epsilon is None else group.epsilon)


def assign(o: OptimizerSection, kinds: Mapping[str, Kind], block_matrices: Collection[str]) -> dict[str, str]:
    """The group of every parameter, by name; `block_matrices` are those that Muon takes where it is the optimizer of a run."""

    def group(name: str, kind: Kind) -> str:
        for own in o.groups:
            if fnmatchcase(name, own.match):
                return own.name
        return "rest" if kind == "matrix" and o.name == "muon" and name not in block_matrices else kind

    found = {name: group(name, kind) for name, kind in kinds.items()}
    for number, own in enumerate(o.groups):
        if own.name in found.values():
            continue
        taken = next((other for name, other in found.items() if fnmatchcase(name, own.match)), None)
        where = f"optimizer.groups.{number}.match={own.match}"
        if taken is not None:
            raise ConfigError(f"{where} matches only parameters that belong to {taken}, which stands before it; change the order")
        some = [*list(kinds)[:4], *(["..."] if len(kinds) > 4 else [])]
        raise ConfigError(f"{where} matches no parameter of the model; it has {', '.join(some)}")
    return found
