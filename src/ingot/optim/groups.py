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


def make_optimizers(model: nn.Module, settings: OptimizerSection, device: torch.device) -> list[torch.optim.Optimizer]:
    """The optimizers of a model; every trainable parameter is in exactly one of their groups, which carry the plan's names."""
    parameters = dict(trainable(model))
    group_of = assign(settings, kinds(model), {name for name, _ in block_matrices(model)})
    filled: dict[str, list[dict[str, Any]]] = {"muon": [], "adamw": []}
    for group in groups_of(settings):
        members = [name for name, found in group_of.items() if found == group.name]
        if not members:
            continue
        entry = {
            "params": [parameters[name] for name in members],
            "name": group.name,
            "lr": group.learning_rate,
            "weight_decay": group.weight_decay,
        }
        if group.optimizer == "muon":
            for name in members:
                if parameters[name].dim() != 2:
                    shape = list(parameters[name].shape)
                    raise ConfigError(f"the group {group.name} gives {name} of shape {shape} to Muon, which takes matrices only")
            filled["muon"].append({**entry, "momentum": group.momentum})
        else:
            filled["adamw"].append({**entry, "betas": group.betas, "eps": group.epsilon})
    optimizers: list[torch.optim.Optimizer] = []
    if filled["muon"]:
        optimizers.append(Muon(filled["muon"], settings))
    if filled["adamw"]:
        optimizers.append(torch.optim.AdamW(filled["adamw"], fused=device.type in ("cpu", "cuda")))
    return optimizers


def kinds(model: nn.Module) -> dict[str, Kind]:
    """The kind of every trainable parameter."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    heads = {id(m.weight) for m in facing_vocabulary(model)}
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


def facing_vocabulary(model: nn.Module) -> list[nn.Linear]:
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
