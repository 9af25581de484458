"""Build the optimizers of a torch model and determine the kind of each parameter.

Parameters that match no entry of `optimizer.groups` are grouped by kind (assign.py). The kind depends on the module that owns the
parameter, so a custom model does not have to declare the kinds:

- embedding: the weight of an nn.Embedding (tokens or positions), including a head tied to it;
- head: the weight of an nn.Linear outside `blocks` whose out_features equals the vocabulary size (rows of the first embedding);
- scalar: a parameter with fewer than two dimensions, or whose name contains an entry of the model's attribute `control` (mixes
  and gains, which are not treated as matrices even if they have two dimensions);
- matrix: any other parameter. Muon, if used, updates the two-dimensional ones inside the blocks (`block_matrices`).

By default, weight decay applies to all kinds except `scalar`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ingot.config.schema import OptimizerSection
from ingot.errors import ConfigError
from ingot.optim.assign import Kind, ParameterGroup, assign, groups_of
from ingot.optim.muon import Exchange, Muon


def make_optimizers(
    model: nn.Module,
    settings: OptimizerSection,
    device: torch.device,
    compiled: bool = False,
    local: Callable[[Tensor], Tensor] = lambda p: p,
    exchange: Exchange | None = None,
) -> list[torch.optim.Optimizer]:
    """Build the optimizers of a model; every trainable parameter is in exactly one of the groups that assign.py defines.

    A custom model may build its own optimizers with a method `make_optimizers(groups)`; the groups include peak learning rates.
    `local` returns the tensor to update for a parameter: this rank's part of it, if the model is sharded.
    """
    groups: list[dict[str, Any]] = []
    for group, parameters in members(model, settings):
        own = {"momentum": group.momentum} if group.optimizer == "muon" else {"betas": group.betas, "eps": group.epsilon}
        rates = {"lr": group.learning_rate, "weight_decay": group.weight_decay}
        groups.append(
            {"params": [local(p) for p in parameters.values()], "name": group.name, "optimizer": group.optimizer, **rates, **own}
        )
    if has_custom_optimizers(model):
        made = model.make_optimizers(groups)  # type: ignore[operator]
        optimizers: list[torch.optim.Optimizer] = list(made) if isinstance(made, list | tuple) else [made]
        if not optimizers or not all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizers):
            raise ConfigError("make_optimizers(groups) must return a torch.optim.Optimizer or a list of optimizers")
        given = sorted((group["name"], id(p)) for group in groups for p in group["params"])
        param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        if given != sorted((str(group.get("name")), id(p)) for group in param_groups for p in group["params"]):
            raise ConfigError(
                "the optimizers of make_optimizers(groups) must contain each parameter exactly once and keep the group names"
            )
        return optimizers
    muon, adamw = ([group for group in groups if group["optimizer"] == name] for name in ("muon", "adamw"))
    optimizers = []
    if muon:
        optimizers.append(Muon(muon, settings, compiled, exchange))
    if adamw:
        optimizers.append(torch.optim.AdamW(adamw, fused=device.type in ("cpu", "cuda")))
    return optimizers


def members(model: nn.Module, settings: OptimizerSection) -> list[tuple[ParameterGroup, dict[str, nn.Parameter]]]:
    """Return each non-empty group and a dict of its parameters, keyed by name."""
    parameters = dict(trainable(model))
    group_of = assign(settings, kinds(model), {name for name, _ in block_matrices(model)})
    groups = []
    for group in groups_of(settings):
        inside = {name: parameters[name] for name, its_group in group_of.items() if its_group == group.name}
        if group.optimizer == "muon" and not has_custom_optimizers(model):
            for name, p in inside.items():
                if p.dim() != 2:
                    shape = list(p.shape)
                    raise ConfigError(f"the group {group.name} gives {name} of shape {shape} to Muon, which takes matrices only")
        if inside:
            groups.append((group, inside))
    return groups


def has_custom_optimizers(model: nn.Module) -> bool:
    """Return True if the model has a method that builds its optimizers."""
    return callable(getattr(model, "make_optimizers", None))


def kinds(model: nn.Module) -> dict[str, Kind]:
    """Return the kind of every trainable parameter."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    heads = {id(m.weight) for m in untied_heads(model)}
    control = getattr(model, "control", ())
    patterns = (control,) if isinstance(control, str) else control if isinstance(control, tuple | list) else ()

    def kind(name: str, p: nn.Parameter) -> Kind:
        if id(p) in embeddings:
            return "embedding"
        if p.dim() < 2 or any(pattern in name for pattern in patterns):
            return "scalar"
        return "head" if id(p) in heads else "matrix"

    return {name: kind(name, p) for name, p in trainable(model)}


def block_matrices(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the matrices inside the blocks; in a model without `blocks`, the weights of all linear layers except the head."""
    blocks = getattr(model, "blocks", None)
    if isinstance(blocks, nn.Module):
        inside = {id(p) for p in blocks.parameters()}
    else:
        inside = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    kind_of = kinds(model)
    return [(name, p) for name, p in trainable(model) if id(p) in inside and kind_of[name] == "matrix" and p.dim() == 2]


def untied_heads(model: nn.Module) -> list[nn.Linear]:
    """Return the linear layers outside the blocks that have one output per vocabulary entry."""
    # The first embedding is the token embedding; a position embedding may have more rows.
    vocabulary = next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), None)
    blocks = getattr(model, "blocks", None)
    inside = set(blocks.modules()) if isinstance(blocks, nn.Module) else set()
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m not in inside]
    return [m for m in linear if m.out_features == vocabulary]


def trainable(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Yield each trainable parameter with its name; a tied parameter appears only once."""
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)
