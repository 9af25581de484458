"""The optimizers of a torch model, and the kind of each of its parameters.

A parameter that no entry of `optimizer.groups` names is grouped by its kind (see assign.py). The kind is found by what holds it,
so that a model of one's own needs no registration:

- embedding: the weight of an nn.Embedding, be it of tokens or positions, and with it a head that is tied to it;
- head: the weight of an nn.Linear outside `blocks` with as many outputs as the first embedding has rows, the vocabulary;
- scalar: what has fewer than two dimensions, and what `model.control` names by a part of its name: mixes and gains that are no
  matrices even where they have two dimensions;
- matrix: the rest. Muon, where it is asked for, takes those of two dimensions inside the blocks; see `block_matrices`.

Scalars never decay; all else does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ingot.config.schema import OptimizerSection
from ingot.errors import ConfigError
from ingot.optim.assign import Kind, assign, groups_of
from ingot.optim.muon import Muon

Parameters = list[tuple[str, nn.Parameter]]


def make_optimizers(
    model: nn.Module, settings: OptimizerSection, device: torch.device, compiled: bool = False
) -> list[torch.optim.Optimizer]:
    """The optimizers of a model; every trainable parameter is in exactly one of their groups, which carry the plan's names.

    A model of one's own may make them: its `make_optimizers(groups)` is given the groups, with their peak rates.
    """
    groups = parameter_groups(model, settings)
    if has_custom_optimizers(model):
        return check_optimizers(model.make_optimizers(groups), groups)  # type: ignore[operator]
    muon, adamw = ([group for group in groups if group["optimizer"] == name] for name in ("muon", "adamw"))
    names = {p: name for name, p in trainable(model)}
    for group in muon:
        for p in group["params"]:
            if p.dim() != 2:
                told = f"{names[p]} of shape {list(p.shape)}"
                raise ConfigError(f"the group {group['name']} gives {told} to Muon, which takes matrices only")
    optimizers: list[torch.optim.Optimizer] = []
    if muon:
        optimizers.append(Muon(muon, settings, compiled))
    if adamw:
        optimizers.append(torch.optim.AdamW(adamw, fused=device.type in ("cpu", "cuda")))
    return optimizers


def parameter_groups(model: nn.Module, settings: OptimizerSection) -> list[dict[str, Any]]:
    """The groups that have parameters, as torch's optimizers take them: with the plan's name and the peak rates of each."""
    parameters = dict(trainable(model))
    group_of = assign(settings, kinds(model), {name for name, _ in block_matrices(model)})
    found = []
    for group in groups_of(settings):
        members = [parameters[name] for name, its_group in group_of.items() if its_group == group.name]
        own = {"momentum": group.momentum} if group.optimizer == "muon" else {"betas": group.betas, "eps": group.epsilon}
        rates = {"lr": group.learning_rate, "weight_decay": group.weight_decay}
        if members:
            found.append({"params": members, "name": group.name, "optimizer": group.optimizer, **rates, **own})
    return found


def has_custom_optimizers(model: nn.Module) -> bool:
    """Whether a model makes its optimizers itself."""
    return callable(getattr(model, "make_optimizers", None))


def check_optimizers(made: Any, groups: list[dict[str, Any]]) -> list[torch.optim.Optimizer]:
    """The optimizers that a model of one's own made; ConfigError unless they have all of its parameters in the given groups."""
    optimizers = list(made) if isinstance(made, list | tuple) else [made]
    if not optimizers or not all(isinstance(one, torch.optim.Optimizer) for one in optimizers):
        raise ConfigError("make_optimizers(groups) must return torch.optim.Optimizers, one or a list of them")
    given = sorted((group["name"], id(p)) for group in groups for p in group["params"])
    held = sorted((str(group.get("name")), id(p)) for one in optimizers for group in one.param_groups for p in group["params"])
    if given != held:
        raise ConfigError(
            "the optimizers of make_optimizers(groups) must have every parameter of the groups once, in groups of the same name"
        )
    return optimizers


def kinds(model: nn.Module) -> dict[str, Kind]:
    """The kind of every trainable parameter."""
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


def block_matrices(model: nn.Module) -> Parameters:
    """The matrices inside the blocks; in a model without `blocks`, those of all linear layers. Neither embedding nor head."""
    blocks = getattr(model, "blocks", None)
    if isinstance(blocks, nn.Module):
        inside = {id(p) for p in blocks.parameters()}
    else:
        inside = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    held = kinds(model)
    return [(name, p) for name, p in trainable(model) if id(p) in inside and held[name] == "matrix" and p.dim() == 2]


def untied_heads(model: nn.Module) -> list[nn.Linear]:
    """Linear layers outside the blocks that have an output for every token; inside, a layer may be as wide by chance."""
    # The first embedding is that of the tokens; a table of positions may have more rows.
    vocabulary = next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), None)
    blocks = getattr(model, "blocks", None)
    inside = set(blocks.modules()) if isinstance(blocks, nn.Module) else set()
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m not in inside]
    return [m for m in linear if m.out_features == vocabulary]


def trainable(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """The parameters that are trained, by name; a tied one once."""
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)
