import pytest
import torch
from torch import nn

from ingot.config.schema import OptimizerSection
from ingot.model.gpt2 import GPT2
from ingot.optim.groups import make_optimizers
from ingot.optim.muon import Muon

CPU = torch.device("cpu")


class Plain(nn.Module):
    """A model of one's own without `blocks` and with a head of its own."""

    def __init__(self, tokens=65, positions=256, width=32):
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.positions = nn.Embedding(positions, width)
        self.up = nn.Linear(width, 4 * width)
        self.norm = nn.LayerNorm(4 * width)
        self.down = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, tokens)


def gpt2(**settings):
    return GPT2(**{"vocab_size": 80, "context": 32, "layers": 6, "heads": 4, "width": 32, **settings})


def optimizers_of(model, **settings):
    return make_optimizers(model, OptimizerSection(**settings), CPU)


def parameters_of(optimizers):
    return [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def names_in(model, optimizer):
    held = set(parameters_of([optimizer]))
    return {name for name, p in model.named_parameters() if id(p) in held}


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("make", [gpt2, lambda: gpt2(bias=False), Plain])
def test_every_parameter_is_in_exactly_one_group(name, make):
    model = make()
    held = parameters_of(optimizers_of(model, name=name))
    assert sorted(held) == sorted(id(p) for p in model.parameters())


def test_frozen_parameters_are_in_none():
    model = gpt2()
    model.transformer.wte.weight.requires_grad_(False)
    model.blocks[0].mlp.c_fc.weight.requires_grad_(False)
    held = parameters_of(optimizers_of(model, name="muon"))
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_adamw_decays_matrices_and_embeddings_and_nothing_else(name):
    for group in optimizers_of(gpt2(), name=name, weight_decay=0.3)[-1].param_groups:
        assert {p.dim() >= 2 for p in group["params"]} == {group["weight_decay"] == 0.3}
        assert group["weight_decay"] in (0.3, 0.0)


def test_six_layers_without_bias_have_26_decayed_tensors():
    (adamw,) = optimizers_of(gpt2(bias=False), name="adamw", weight_decay=0.1)
    assert {group["weight_decay"]: len(group["params"]) for group in adamw.param_groups} == {0.1: 26, 0.0: 13}


def test_muon_takes_the_matrices_of_the_blocks():
    model = gpt2()
    muon, adamw = optimizers_of(model, name="muon")
    matrices = {name for name, p in model.named_parameters() if ".h." in name and p.dim() == 2}
    assert isinstance(muon, Muon)
    assert len(matrices) == 24
    assert names_in(model, muon) == matrices
    assert {"transformer.wte.weight", "transformer.wpe.weight"} < names_in(model, adamw)


@pytest.mark.parametrize(("tokens", "positions"), [(300, 32), (65, 256)])
def test_without_blocks_muon_takes_linear_layers_that_do_not_face_the_vocabulary(tokens, positions):
    model = Plain(tokens, positions)
    muon, _ = optimizers_of(model, name="muon")
    assert names_in(model, muon) == {"up.weight", "down.weight"}


def test_without_blocks_a_table_that_no_layer_multiplies_by_belongs_to_adamw():
    model = Plain(300, 32)
    model.table = nn.Parameter(torch.zeros(32, 32))
    muon, adamw = optimizers_of(model, name="muon")
    assert "table" not in names_in(model, muon)
    assert "table" in names_in(model, adamw)


def test_without_blocks_a_head_tied_to_the_embedding_belongs_to_adamw():
    model = Plain(300, 32)
    model.head.weight = model.tokens.weight
    muon, adamw = optimizers_of(model, name="muon")
    assert "tokens.weight" in names_in(model, adamw)
    assert "tokens.weight" not in names_in(model, muon)


def test_a_model_without_matrices_for_muon_trains_with_adamw_alone():
    (only,) = optimizers_of(nn.Embedding(10, 4), name="muon")
    assert isinstance(only, torch.optim.AdamW)


def test_settings_reach_the_optimizers():
    muon, adamw = optimizers_of(
        gpt2(),
        name="muon",
        learning_rate=3e-3,
        beta1=0.8,
        beta2=0.97,
        epsilon=1e-9,
        muon_learning_rate=0.05,
        muon_weight_decay=0.2,
        muon_momentum=0.9,
        muon_nesterov=False,
        muon_iterations=6,
    )
    wanted = {"lr": 0.05, "peak_lr": 0.05, "weight_decay": 0.2, "momentum": 0.9, "nesterov": False, "iterations": 6}
    assert {key: muon.param_groups[0][key] for key in wanted} == wanted
    wanted = {"lr": 3e-3, "peak_lr": 3e-3, "betas": (0.8, 0.97), "eps": 1e-9}
    assert all({key: group[key] for key in wanted} == wanted for group in adamw.param_groups)
