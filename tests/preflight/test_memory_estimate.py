"""The size of a model by its settings is the size of the model."""

import pytest
import torch

from ingot.config.loading import load_config
from ingot.config.memory import model_size, recomputed_every, state_bytes
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
    {"family": "frontier", "kv_heads": 4, "layers": 4, "values": "tables", "value_layers": [0]},
    {"family": "frontier", "values": "none", "head_gate": False, "layers": 3},
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


@pytest.mark.parametrize(
    ("micro_batch", "gigabytes", "expected"),
    [(64, 140, 0), (64, 80, 1), (16, 80, 0), (16, 24, 1), ("auto", 24, 0), ("auto", 2, 1), (64, None, 0)],
)
def test_blocks_are_recomputed_by_themselves_where_a_micro_batch_would_not_fit(micro_batch, gigabytes, expected):
    settings = {"model": {"family": "llama", "width": 768, "heads": 12, "layers": 12}, "data": {"seq_len": 1024}}
    training = {"max_steps": 1, "tokens_per_step": 65536, "micro_batch": micro_batch, "gradient_checkpointing": "auto"}
    config = load_config(python={**settings, "training": training}, environment={}).config
    assert recomputed_every(config, 50304, gigabytes and gigabytes * 10**9) == expected


@pytest.mark.parametrize(("asked", "expected"), [(False, 0), (True, 1), (3, 3)])
def test_blocks_are_recomputed_as_asked_whatever_the_memory(asked, expected):
    config = config_of({"family": "llama"})
    config = config.model_copy(update={"training": config.training.model_copy(update={"gradient_checkpointing": asked})})
    assert recomputed_every(config, 300, 1) == recomputed_every(config, 300, 10**15) == expected
