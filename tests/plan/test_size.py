"""The size of a model by its settings is the size of the model."""

import pytest
import torch

from ingot.config.loading import load_config
from ingot.config.size import model_size, state_bytes
from ingot.model.registry import build

SHAPES = [
    {"family": "gpt2"},
    {"family": "gpt2", "bias": False},
    {"family": "llama"},
    {"family": "llama", "kv_heads": 2, "bias": True, "tied": False},
    {"family": "llama", "mlp": "plain", "norm": "layernorm", "qkv_bias": True},
    {"family": "llama", "inner_width": 96, "mlp_bias": True, "attention_out_bias": True},
    {"family": "golf", "kv_heads": 2},
    {"family": "golf", "tied": False, "layers": 3, "kv_heads": 4},
    {"family": "frontier"},
    {"family": "frontier", "kv_heads": 4, "layers": 5, "values": "tables", "tied": False, "mlp_multiple": 2.5},
    {"family": "frontier", "values": "none", "head_gate": False, "skips": False, "layers": 3},
]


def config_of(shape):
    settings = {"width": 64, "heads": 4, "layers": 2, **shape}
    asked = {"model": settings, "data": {"seq_len": 32}, "training": {"max_steps": 1, "tokens_per_step": 32}}
    return load_config(python=asked, environment={}).config


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_count_is_that_of_the_module(shape):
    config = config_of(shape)
    given = config.model.model_dump(exclude={"vocab_size", "context"})
    with torch.device("meta"):
        model = build({**given, "vocab_size": 300, "context": 32})
    assert model_size(config, 300).total == sum(p.numel() for p in model.parameters())


def test_124m_parameters():
    config = config_of({"family": "llama", "width": 768, "heads": 12, "layers": 12})
    assert model_size(config, 50304).total == 123_587_328
    assert state_bytes(config, model_size(config, 50304)) == 16 * 123_587_328
