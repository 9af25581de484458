"""Which parameter gets which optimizer, and with how much weight decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ingot.config.schema import OptimizerSection
from ingot.optim.muon import Muon

Parameters = list[tuple[str, nn.Parameter]]


def make_optimizers(model: nn.Module, settings: OptimizerSection, device: torch.device) -> list[torch.optim.Optimizer]:
    """The optimizers of a model; every trainable parameter is in exactly one of their groups."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = block_matrices(model) if settings.name == "muon" else []
    taken = {name for name, _ in matrices}
    rest = [(name, p) for name, p in named if name not in taken]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        group = {"params": [p for _, p in matrices], "weight_decay": settings.muon_weight_decay}
        optimizers.append(
            Muon(
                [group],
                lr=settings.muon_learning_rate,
                momentum=settings.muon_momentum,
                nesterov=settings.muon_nesterov,
                iterations=settings.muon_iterations,
            )
        )
    if rest:
        optimizers.append(
            torch.optim.AdamW(
                decay_groups(rest, settings.weight_decay),
                lr=settings.learning_rate,
                betas=(settings.beta1, settings.beta2),
                eps=settings.epsilon,
                fused=device.type in ("cpu", "cuda"),
            )
        )
    for optimizer in optimizers:
        for parameters in optimizer.param_groups:
            parameters["peak_lr"] = parameters["lr"]
    return optimizers


def decay_groups(parameters: Parameters, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups by dimension: matrices and embeddings decay, gains and biases do not."""
    groups = [
        {"params": [p for _, p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for _, p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def block_matrices(model: nn.Module) -> Parameters:
    """The matrices inside the blocks; in a model without `blocks`, those of linear layers that do not face the vocabulary."""
    blocks = getattr(model, "blocks", None)
    if isinstance(blocks, nn.Module):
        inside = {id(p) for p in blocks.parameters()}
        return [(name, p) for name, p in model.named_parameters() if id(p) in inside and p.dim() == 2 and p.requires_grad]
    # The first embedding is that of the tokens; a table of positions may have more rows.
    vocabulary = next((module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)), 0)
    linear = [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features != vocabulary]
    inside = {id(module.weight) for module in linear}
    return [(name, p) for name, p in model.named_parameters() if id(p) in inside and p.requires_grad]
