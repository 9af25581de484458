"""Small models of every family, with weights that make every part of them count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ingot.model.registry import FAMILIES

GOLDEN = Path(__file__).parents[1] / "golden"
NUMBERS = json.loads((GOLDEN / "golden.json").read_text())
VOCABULARY, CONTEXT = 80, 32
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 2, "heads": 4, "width": 48},
    "llama": {"layers": 2, "heads": 4, "width": 48, "kv_heads": 2},
    "golf": {"layers": 5, "heads": 4, "width": 48, "kv_heads": 2, "embedding_std": 0.2},
    "frontier": {"layers": 5, "heads": 4, "width": 48, "kv_heads": 2, "window": 6},
}


def make(family: str, **settings: Any) -> nn.Module:
    """A model whose weights are larger than new ones, and whose zeros and ones (branches, biases, gains) are drawn too."""
    torch.manual_seed(0)
    model = new(family, **settings)
    with torch.no_grad():
        for parameter in model.parameters():
            if len(parameter.unique()) <= 2:
                parameter += 0.2 * torch.randn(parameter.shape)
            elif family != "golf":
                parameter *= 5
    return model


def new(family: str, **settings: Any) -> nn.Module:
    return FAMILIES[family](**{"vocab_size": VOCABULARY, "context": CONTEXT, **SHAPES[family], **settings})


def tokens_of(rows: int = 2, length: int = CONTEXT) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length))


def gradients(model: nn.Module, *inputs: Tensor | None) -> dict[str, Tensor]:
    """Of the loss of these inputs."""
    model.zero_grad()
    model(*inputs).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float, rtol: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=atol, rtol=rtol, msg=lambda m, name=name: f"{name}: {m}")


def golden(file: str, *prefixes: str) -> tuple[dict[str, Tensor], ...]:
    """The tensors of a golden file, and those after each prefix, without it."""
    tensors = load_file(GOLDEN / file)
    return tensors, *({k[len(p) :]: v for k, v in tensors.items() if k.startswith(p)} for p in prefixes)


def count_parameters(family: str, **settings: Any) -> int:
    with torch.device("meta"):
        model = FAMILIES[family](**settings)
    return sum(p.numel() for p in model.parameters())
