import pytest
import torch
from torch import nn

from ingot.config.schema import OptimizerSection
from ingot.errors import ConfigError
from ingot.model.frontier import Frontier
from ingot.model.golf import Golf
from ingot.model.gpt2 import GPT2
from ingot.model.llama import Llama
from ingot.optim import assign
from ingot.optim.groups import kinds, make_optimizers
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


def golf(**settings):
    return Golf(**{"vocab_size": 64, "context": 16, "layers": 5, "heads": 4, "kv_heads": 2, "width": 32, **settings})


def llama(**settings):
    return Llama(**{"vocab_size": 80, "context": 16, "layers": 2, "heads": 4, "width": 32, **settings})


def frontier(**settings):
    return Frontier(**{"vocab_size": 80, "context": 16, "layers": 3, "heads": 4, "kv_heads": 2, "width": 32, **settings})


FAMILIES = [
    frontier,
    lambda: frontier(tied=False, values="tables"),
    gpt2,
    lambda: gpt2(bias=False),
    golf,
    lambda: golf(tied=False),
    lambda: golf(layers=1),
    llama,
    lambda: llama(tied=False, bias=True),
]


def optimizers_of(model, **settings):
    return make_optimizers(model, OptimizerSection(**settings), CPU)


def parameters_of(optimizers):
    return [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def names_in(model, optimizer):
    held = set(parameters_of([optimizer]))
    return {name for name, p in model.named_parameters() if id(p) in held}


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("make", [*FAMILIES, Plain])
def test_every_parameter_is_in_exactly_one_group(name, make):
    model = make()
    held = parameters_of(optimizers_of(model, name=name))
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)


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
    decayed = [group["weight_decay"] for group in adamw.param_groups for _ in group["params"]]
    assert (decayed.count(0.1), decayed.count(0.0)) == (26, 13)


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
        muon_coefficients="polar-express",
        muon_normalise_rows=True,
        muon_precision="bf16",
    )
    wanted = {"lr": 0.05, "weight_decay": 0.2, "momentum": 0.9, "nesterov": False, "iterations": 6}
    wanted |= {"coefficients": "polar-express", "normalise_rows": True, "precision": "bf16"}
    assert {key: muon.param_groups[0][key] for key in wanted} == wanted
    wanted = {"lr": 3e-3, "betas": (0.8, 0.97), "eps": 1e-9}
    assert all({key: group[key] for key in wanted} == wanted for group in adamw.param_groups)


RATES = {"learning_rate": 1e-3, "embedding_learning_rate": 0.6, "head_learning_rate": 0.008, "scalar_learning_rate": 0.02}


def rates_of(model, **settings):
    """The learning rate and weight decay of every parameter, by name."""
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [group for optimizer in optimizers_of(model, **settings) for group in optimizer.param_groups]
    return {names[id(p)]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}


def test_golfs_groups_are_54_matrices_37_scalars_and_the_embedding():
    with torch.device("meta"):
        model = Golf(vocab_size=1024, context=1024)  # its MLP is as wide as its vocabulary
    optimizers = optimizers_of(model, name="muon", **RATES)
    groups = [(type(o).__name__, group["name"], len(group["params"])) for o in optimizers for group in o.param_groups]
    assert groups == [("Muon", "matrix", 54), ("AdamW", "embedding", 1), ("AdamW", "scalar", 37)]


def test_golf_has_a_rate_for_each_kind():
    found = rates_of(golf(tied=False), name="muon", muon_learning_rate=0.04, muon_weight_decay=0.0, weight_decay=0.1, **RATES)
    assert found["tok_emb.weight"] == (0.6, 0.1)
    assert found["lm_head.weight"] == (0.008, 0.1)
    assert found["blocks.0.mlp.fc.weight"] == (0.04, 0.0)
    for control in ("skip_weights", "blocks.1.resid_mix", "blocks.1.attn.q_gain", "blocks.4.mlp_scale"):
        assert found[control] == (0.02, 0.0)


def test_the_rates_hold_for_plain_adamw_too():
    found = rates_of(llama(tied=False, bias=True, norm="layernorm"), name="adamw", weight_decay=0.1, **RATES)
    assert found["wte.weight"] == (0.6, 0.1)
    assert found["lm_head.weight"] == (0.008, 0.1)
    assert {rate for name, rate in found.items() if name.startswith("h.") and name.endswith("proj.weight")} == {(1e-3, 0.1)}
    assert {rate for name, rate in found.items() if name.endswith("bias")} == {(0.02, 0.0)}


@pytest.mark.parametrize("make", [*FAMILIES, Plain])
def test_rates_that_are_not_given_are_the_learning_rate(make):
    assert {rate for rate, _ in rates_of(make(), name="adamw", learning_rate=0.07).values()} == {0.07}


def test_a_rate_of_zero_is_a_rate():
    assert rates_of(gpt2(), embedding_learning_rate=0.0)["transformer.wte.weight"][0] == 0.0


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_tied_head_is_an_embedding(name):
    found = rates_of(llama(), name=name, **RATES)
    assert found["wte.weight"][0] == 0.6
    assert 0.008 not in {rate for rate, _ in found.values()}


def test_positions_are_embeddings():
    found = rates_of(gpt2(), **RATES)
    assert found["transformer.wte.weight"] == found["transformer.wpe.weight"] == (0.6, 0.1)


def test_a_layer_inside_the_blocks_is_no_head_even_if_it_is_as_wide_as_the_vocabulary():
    model = gpt2(vocab_size=128)
    assert kinds(model)["transformer.h.0.mlp.c_fc.weight"] == "matrix"
    muon, _ = optimizers_of(model, name="muon")
    assert "transformer.h.0.mlp.c_fc.weight" in names_in(model, muon)


def test_a_model_of_ones_own_is_sorted_by_what_holds_its_parameters():
    model = Plain(300, 32)
    model.mixes = nn.Parameter(torch.ones(2, 32))
    assert kinds(model)["mixes"] == "matrix"
    model.control = ("mixes",)
    assert kinds(model) == {
        "mixes": "scalar",
        "tokens.weight": "embedding",
        "positions.weight": "embedding",
        "up.weight": "matrix",
        "up.bias": "scalar",
        "norm.weight": "scalar",
        "norm.bias": "scalar",
        "down.weight": "matrix",
        "down.bias": "scalar",
        "head.weight": "head",
        "head.bias": "scalar",
    }


def test_control_may_be_one_name_and_a_part_of_the_model_may_be_called_so():
    model = Plain(300, 32)
    model.control = "up"
    assert kinds(model)["up.weight"] == "scalar"
    model.control = ["down"]
    assert kinds(model)["down.weight"] == "scalar"
    model = Plain(300, 32)
    model.control = nn.Linear(32, 32)
    assert kinds(model)["control.weight"] == "matrix"


def test_stacked_matrices_belong_to_adamw_and_decay():
    model = gpt2()
    model.blocks[0].experts = nn.Parameter(torch.zeros(4, 32, 32))
    muon, adamw = optimizers_of(model, name="muon")
    assert "transformer.h.0.experts" in names_in(model, adamw)
    assert "transformer.h.0.experts" not in names_in(model, muon)
    assert rates_of(model, name="muon", weight_decay=0.3)["transformer.h.0.experts"][1] == 0.3


def test_an_embedding_in_bf16_keeps_its_moments_in_bf16():
    model = golf(embedding_dtype="bf16")
    optimizers = optimizers_of(model, name="muon")
    tokens = torch.arange(32).view(2, 16)
    model(tokens, tokens).backward()
    for optimizer in optimizers:
        optimizer.step()
    state = optimizers[-1].state
    assert {t.dtype for key, t in state[model.tok_emb.weight].items() if key.startswith("exp")} == {torch.bfloat16}
    assert {t.dtype for key, t in state[model.skip_weights].items() if key.startswith("exp")} == {torch.float32}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_order_of_the_groups_is_always_the_same(name):
    def orders():
        model = golf(tied=False)
        names = {id(p): n for n, p in model.named_parameters()}
        return [[names[id(p)] for p in group["params"]] for o in optimizers_of(model, name=name) for group in o.param_groups]

    assert orders() == orders()


# -- groups by name --------------------------------------------------------------------------------------------------------------


def groups_of(model, *groups, **settings):
    """The optimizer, the name and the parameters of every group that has some."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        group["name"]: (type(optimizer).__name__, {names[id(p)] for p in group["params"]})
        for optimizer in optimizers_of(model, groups=list(groups), **settings)
        for group in optimizer.param_groups
    }


def test_the_first_pattern_that_fits_takes_a_parameter_and_the_rest_go_by_kind():
    found = groups_of(
        Plain(),
        {"name": "norms", "match": "norm.*"},
        {"name": "biases", "match": "*.bias"},
        {"name": "up", "match": "up.*", "optimizer": "muon"},
        name="adamw",
    )
    assert found["norms"] == ("AdamW", {"norm.weight", "norm.bias"})
    assert found["biases"] == ("AdamW", {"up.bias", "down.bias", "head.bias"})
    assert found["up"] == ("Muon", {"up.weight"})
    assert found["matrix"] == ("AdamW", {"down.weight"})
    assert "scalar" not in found and set(found) == {"norms", "biases", "up", "matrix", "embedding", "head"}


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("make", [*FAMILIES, Plain])
def test_groups_by_name_leave_every_parameter_in_exactly_one(name, make):
    model = make()
    held = parameters_of(optimizers_of(model, name=name, groups=[{"name": "weights", "match": "*.weight"}]))
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)


def test_a_group_has_its_own_settings_and_those_of_the_section_where_it_has_none():
    (muon, adamw) = optimizers_of(
        Plain(),
        name="muon",
        learning_rate=0.1,
        weight_decay=0.2,
        beta1=0.3,
        muon_momentum=0.7,
        muon_weight_decay=0.05,
        groups=[
            {"name": "a", "match": "up.*", "learning_rate": 0.5, "weight_decay": 0.0, "beta2": 0.6, "epsilon": 1e-3},
            {"name": "b", "match": "head.weight", "optimizer": "muon", "momentum": 0.4},
            {"name": "c", "match": "tokens.*"},
        ],
    )
    found = {group["name"]: group for group in [*muon.param_groups, *adamw.param_groups]}
    assert [found["a"][key] for key in ("lr", "weight_decay", "betas", "eps")] == [0.5, 0.0, (0.3, 0.6), 1e-3]
    assert [found["b"][key] for key in ("lr", "weight_decay", "momentum")] == [0.02, 0.05, 0.4]
    assert [found["c"][key] for key in ("lr", "weight_decay", "betas")] == [0.1, 0.2, (0.3, 0.95)]
    assert found["matrix"]["momentum"] == 0.7


def test_beside_muon_stacked_matrices_are_the_rest():
    model = gpt2()
    model.blocks[0].experts = nn.Parameter(torch.zeros(4, 32, 32))
    assert groups_of(model, name="muon")["rest"] == ("AdamW", {"transformer.h.0.experts"})
    assert "transformer.h.0.experts" in groups_of(model, name="adamw")["matrix"][1]


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([{"name": "a", "match": "gates.*"}], r"optimizer\.groups\.0\.match=gates\.\* matches no parameter .*tokens\.weight, "),
        ([{"name": "a", "match": "up*"}, {"name": "b", "match": "up.w*"}], r"groups\.1\.match=up\.w\* .* earlier group a;"),
        ([{"name": "a", "match": "up*", "optimizer": "muon"}], r"group a gives up\.bias of shape \[128\] to Muon"),
    ],
)
def test_a_group_that_fits_nothing_or_not_its_optimizer_is_one_line(groups, said):
    with pytest.raises(ConfigError, match=said):
        optimizers_of(Plain(), groups=groups)


def test_the_groups_of_a_model_are_groups_of_its_plan():
    settings = OptimizerSection(name="muon", groups=[{"name": "a", "match": "up.*"}])
    held = {group["name"] for optimizer in make_optimizers(Plain(), settings, CPU) for group in optimizer.param_groups}
    assert held <= {group.name for group in assign.groups_of(settings)} == {"a", *settings.kinds}


def test_gates_and_numbers_of_the_frontier_family_are_no_matrices_to_muon():
    model = frontier(values="tables")
    muon, adamw = optimizers_of(model, name="muon")
    assert {name.rpartition("blocks.0.")[2] for name in names_in(model, muon) if ".0." in name} == {
        "attn.q.weight", "attn.k.weight", "attn.v.weight", "attn.o.weight", "mlp.fc.weight", "mlp.down.weight",
    }  # fmt: skip
    groups = {group["name"]: len(group["params"]) for group in adamw.param_groups}
    assert groups == {"embedding": 3, "scalar": 3 * 3 + 2}  # mixes and head gates, two gates of values
