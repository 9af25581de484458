"""Assignment of parameters to groups, each with an optimizer and peak learning rate; used by both torch and MLX.

A parameter belongs to the first entry of `optimizer.groups` that matches its name or else to the group of its kind (groups.py).
With Muon, parameters of kind `matrix` outside the blocks or with more than two dimensions are in the group `rest`.
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
class ParameterGroup:
    """A parameter group: its optimizer, peak learning rate and other hyperparameters."""

    name: str
    optimizer: Literal["adamw", "muon"]
    learning_rate: float
    weight_decay: float
    momentum: float | None = None  # only for Muon: momentum after the momentum warm-up
    betas: tuple[float, float] = (0.0, 0.0)  # only for AdamW, like epsilon
    epsilon: float = 0.0


def groups_of(o: OptimizerSection) -> list[ParameterGroup]:
    """Return the groups of `optimizer.groups`, then the built-in ones, with defaults filled in; some may have no parameters."""
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
    resolved = []
    for group in (*o.groups, *by_kind):  # where a group has null, the value in `optimizer` applies
        muon = group.optimizer == "muon"
        rate, decay = group.learning_rate, group.weight_decay
        if rate is None:
            rate = o.muon_learning_rate if muon else o.learning_rate
        if decay is None:
            decay = o.muon_weight_decay if muon else o.weight_decay
        if muon:
            momentum = o.muon_momentum if group.momentum is None else group.momentum
            resolved.append(ParameterGroup(group.name, "muon", rate, decay, momentum))
        else:
            betas = (o.beta1 if group.beta1 is None else group.beta1, o.beta2 if group.beta2 is None else group.beta2)
            epsilon = o.epsilon if group.epsilon is None else group.epsilon
            resolved.append(ParameterGroup(group.name, "adamw", rate, decay, betas=betas, epsilon=epsilon))
    return resolved


def assign(o: OptimizerSection, kinds: Mapping[str, Kind], block_matrices: Collection[str]) -> dict[str, str]:
    """Return the group name of each parameter; raise ConfigError if an entry of `optimizer.groups` gets no parameters."""

    def group(name: str, kind: Kind) -> str:
        for own in o.groups:
            if fnmatchcase(name, own.match):
                return own.name
        return "rest" if kind == "matrix" and o.name == "muon" and name not in block_matrices else kind

    assigned = {name: group(name, kind) for name, kind in kinds.items()}
    for number, own in enumerate(o.groups):
        if own.name in assigned.values():
            continue
        taken = next((other for name, other in assigned.items() if fnmatchcase(name, own.match)), None)
        where = f"optimizer.groups.{number}.match={own.match}"
        if taken is not None:
            raise ConfigError(f"{where} matches only parameters that belong to the earlier group {taken}; change the order")
        some = [*list(kinds)[:4], *(["..."] if len(kinds) > 4 else [])]
        raise ConfigError(f"{where} matches no parameter of the model; its parameters are {', '.join(some)}")
    return assigned
