import math

import pytest
import torch
from model_kit import CONTEXT, NUMBERS, assert_same, count_parameters, golden, gradients, make, tokens_of

from ingot.model.llama import Llama

torch.set_num_threads(1)

CASES = {case["file"].removesuffix(".safetensors"): case for case in NUMBERS["gpt_simple"]}
OURS = {
    "n_embd": "width",
    "n_layer": "layers",
    "n_head": "heads",
    "n_kv_head": "kv_heads",
    "n_positions": "context",
    "use_bias": "bias",
    "mlp_type": "mlp",
    "intermediate_size": "inner_width",
    "tie_word_embeddings": "tied",
    "rope_scaling_type": "rope_scaling",
    "rope_scaling_factor": "rope_factor",
}


@pytest.fixture(params=sorted(CASES))
def original(request):
    """A model with gpt-simple's weights, and what gpt-simple computed with them."""
    case = CASES[request.param]
    settings = {OURS.get(name, name): "plain" if value == "mlp" else value for name, value in case["config"].items()}
    tensors, weights, grads = golden(case["file"], "weight.", "grad.")
    model = Llama(**settings)
    model.load_state_dict(weights)
    labels = tensors["labels"][:, 1:]
    return model, tensors["x"], labels.where(labels != -100, -1), tensors["logits"], case["loss"], grads


@torch.no_grad()
def test_logits_are_those_of_gpt_simple(original):
    model, tokens, _, logits, _, _ = original
    torch.testing.assert_close(model(tokens), logits, atol=1e-5, rtol=0)


@torch.no_grad()
def test_the_loss_is_that_of_gpt_simple(original):
    model, tokens, targets, _, loss, _ = original
    assert (targets == -1).any()
    assert model(tokens[:, :-1], targets).item() == pytest.approx(loss, abs=1e-5)


def test_gradients_are_those_of_gpt_simple(original):
    model, tokens, targets, _, _, expected = original
    assert_same(gradients(model, tokens[:, :-1], targets), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("width", "layers", "heads", "millions", "digits"),
    [(768, 12, 12, 123.587328, 6), (1024, 24, 16, 359.84, 2), (2048, 24, 32, 1336.25, 2), (2560, 34, 20, 2825.1, 1)],
)
def test_gpt_simples_shapes_have_the_parameters_they_are_known_for(width, layers, heads, millions, digits):
    count = count_parameters("llama", vocab_size=50304, context=2048, width=width, layers=layers, heads=heads)
    assert round(count / 1e6, digits) == millions


def test_fewer_key_and_value_heads_save_their_projections_and_nothing_else():
    shape = {"vocab_size": 128, "context": 64, "width": 64, "layers": 3, "heads": 4}
    saved = count_parameters("llama", **shape) - count_parameters("llama", **shape, kv_heads=1)
    assert saved == 3 * 2 * 64 * (64 - 16)


@pytest.mark.parametrize(
    ("settings", "inner"),
    [
        ({"width": 768, "heads": 12}, 2048),
        ({"width": 768, "heads": 12, "mlp": "plain"}, 3072),
        ({"width": 1024, "heads": 16}, 2816),
        ({"width": 96, "heads": 12}, 256),
        ({"width": 768, "heads": 12, "inner_width": 100}, 100),
    ],
)
def test_the_inner_width_follows_the_rule_unless_it_is_given(settings, inner):
    with torch.device("meta"):
        mlp = Llama(10, 8, layers=1, **settings).blocks[0].mlp
    assert next(mlp.parameters()).shape == (inner, settings["width"])


def test_initial_weights_keep_the_residual_stream_as_wide_at_any_depth():
    torch.manual_seed(0)
    model = Llama(512, 16, layers=8, heads=4, width=128, bias=True)
    for name, p in model.named_parameters():
        if p.dim() == 2:
            ends_a_branch = "c_proj" in name or "c_down" in name
            assert p.std().item() == pytest.approx(0.02 / math.sqrt(16) if ends_a_branch else 0.02, rel=0.05), name
        else:
            assert (p == ("bias" not in name)).all(), name


@pytest.mark.parametrize(
    ("settings", "with_bias"),
    [
        ({"bias": True}, {"q_proj", "k_proj", "v_proj", "c_proj", "c_up", "c_gate", "c_down"}),
        ({"qkv_bias": True}, {"q_proj", "k_proj", "v_proj"}),
        ({"bias": True, "qkv_bias": False, "mlp_bias": False}, {"c_proj"}),
        ({"attention_out_bias": True}, {"c_proj"}),
        ({"mlp_bias": True}, {"c_up", "c_gate", "c_down"}),
        ({}, set()),
    ],
)
def test_biases_are_where_they_are_asked_for(settings, with_bias):
    names = [name.split(".") for name, _ in make("llama", layers=1, **settings).named_parameters() if name.endswith("bias")]
    assert {parts[-2] for parts in names} == with_bias


@torch.no_grad()
def test_a_key_head_serves_neighbouring_query_heads():
    few, many = make("llama", kv_heads=2), make("llama", kv_heads=4)
    weights = few.state_dict()
    for name in weights:
        if "k_proj" in name or "v_proj" in name:
            weights[name] = weights[name].view(2, 12, 48).repeat_interleave(2, dim=0).flatten(0, 1)
    many.load_state_dict(weights)
    tokens = tokens_of()
    torch.testing.assert_close(few(tokens), many(tokens), atol=1e-5, rtol=0)


@torch.no_grad()
def test_linear_scaling_puts_two_places_where_one_was():
    usual, stretched = make("llama"), make("llama", rope_scaling="linear", rope_factor=2.0)
    tokens = tokens_of(length=CONTEXT // 2)
    spread = tokens.repeat_interleave(2, dim=1)
    apart = torch.arange(CONTEXT).expand(2, -1) % 2  # every other token is a document of its own
    torch.testing.assert_close(stretched(spread, None, apart)[:, ::2], usual(tokens), atol=1e-5, rtol=0)


@torch.no_grad()
def test_ntk_scaling_is_a_larger_base():
    tokens = tokens_of()
    assert torch.equal(make("llama", rope_scaling="ntk", rope_factor=4.0)(tokens), make("llama", rope_base=40000.0)(tokens))


@torch.no_grad()
def test_the_factor_counts_only_with_a_scaling():
    tokens = tokens_of()
    assert torch.equal(make("llama", rope_factor=4.0)(tokens), make("llama")(tokens))


@torch.no_grad()
@pytest.mark.parametrize("mlp", ["gated", "plain"])
def test_dropout_happens_in_training_alone(mlp):
    dropping, sure = make("llama", mlp=mlp, dropout=0.2), make("llama", mlp=mlp)
    tokens = tokens_of()
    assert not torch.equal(dropping(tokens), dropping(tokens))
    dropping.eval()
    assert torch.equal(dropping(tokens), sure(tokens))


def test_an_untied_head_is_a_matrix_of_its_own():
    tied, untied = make("llama"), make("llama", tied=False)
    assert "lm_head.weight" not in tied.state_dict()
    assert untied.head is untied.lm_head.weight
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == 80 * 48
