"""Models whose kernels are switched on: on a CPU the operations have plain forms, so that everything around them is tested."""

import copy

import pytest
import torch
from model_kit import assert_same, gradients, make, tokens_of

from ingot.backends.torch.tune import KERNELS, use_form, use_kernels
from ingot.model.cross_entropy import IGNORED

torch.set_num_threads(1)
FAMILIES = [
    ("gpt2", {}),
    ("llama", {}),
    ("llama", {"tied": False, "kv_heads": 1}),
    ("golf", {}),
    ("golf", {"kv_heads": 1}),
    ("frontier", {}),
]


def targets_of():
    targets = tokens_of()
    targets[0, :20] = IGNORED
    return targets


@pytest.mark.parametrize("form", ["repeated", "flash4"])
@pytest.mark.parametrize(("family", "settings"), FAMILIES)
def test_a_model_learns_the_same_with_its_kernels(family, settings, form):
    plain = make(family, **settings)
    fused = copy.deepcopy(plain)
    use_kernels(fused, KERNELS)
    use_form(fused, form)
    tokens, targets = tokens_of(), targets_of()
    assert_same(gradients(fused, tokens, targets), gradients(plain, tokens, targets), atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(fused(tokens, targets), plain(tokens, targets))


@pytest.mark.parametrize(("family", "settings"), [FAMILIES[0], FAMILIES[2], FAMILIES[3], FAMILIES[5]])
def test_a_model_with_a_head_of_8_bits_learns_nearly_the_same(family, settings):
    plain = make(family, **settings)
    coarse = copy.deepcopy(plain)
    coarse.fp8_head = True
    tokens, targets = tokens_of(), targets_of()
    found, expected = gradients(coarse, tokens, targets), gradients(plain, tokens, targets)
    # A number without a dimension is left out: its gradient may happen to be next to nothing.
    far = [(found[name] - grad).norm() / grad.norm() for name, grad in expected.items() if grad.dim()]
    assert min(far) > 0 and max(far) < 0.15
    with torch.no_grad():
        assert torch.equal(coarse(tokens, targets), plain(tokens, targets))


@pytest.mark.filterwarnings("error:Mismatch dtype")
@pytest.mark.parametrize(("family", "settings"), [("gpt2", {}), ("llama", {}), ("llama", {"norm": "layernorm"})])
def test_a_stream_in_the_format_of_products_is_for_training(family, settings):
    plain = make(family, **settings)
    narrow = copy.deepcopy(plain)
    use_kernels(narrow, ["stream"])
    tokens, targets = tokens_of(), targets_of()
    seen = []
    for model in (plain, narrow):
        model.blocks[-1].register_forward_pre_hook(lambda block, given: seen.append(given[0].dtype))
    exact = gradients(plain, tokens, targets)
    assert_same(gradients(narrow, tokens, targets), exact, atol=0)  # without another format there is nothing to change
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        usual, found = gradients(plain, tokens, targets), gradients(narrow, tokens, targets)
        with torch.no_grad():
            assert torch.equal(narrow(tokens, targets), plain(tokens, targets))
    assert seen == [torch.float32, torch.bfloat16, torch.float32, torch.float32]
    far = [[(got[name] - grad).norm() / grad.norm() for name, grad in exact.items()] for got in (usual, found)]
    assert max(far[1]) < 2.5 * max(far[0])


@pytest.mark.parametrize("form", ["grouped", "flash4"])
def test_a_compiled_model_with_kernels_is_one_graph(form):
    model = make("golf", kv_heads=1)
    use_kernels(model, KERNELS)
    use_form(model, form)
    tokens, targets = tokens_of(), targets_of()
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(model, tokens, targets)
        found = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), tokens, targets)
    assert_same({name.removeprefix("_orig_mod."): grad for name, grad in found.items()}, expected, atol=1e-6)


def test_queries_keys_and_values_are_one_product_where_gradients_are_wanted_alone(monkeypatch):
    model = make("llama", kv_heads=1, qkv_bias=True)
    use_kernels(model, ["qkv"])
    use_form(model, "flash4")
    attention, made = model.blocks[0].attn, []
    for layer in (attention.q_proj, attention.k_proj, attention.v_proj):
        layer.register_forward_hook(lambda *_: made.append(1))
    model(tokens_of(), targets_of())
    assert not made
    with torch.no_grad():  # those who watch what a layer is given see it
        model(tokens_of(), targets_of())
    assert len(made) == 3


def test_scales_in_weights_leave_no_output_of_a_branch_for_the_backward_pass():
    def kept(names):
        model, saved = make("golf"), {}
        use_kernels(model, names)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.update({x.data_ptr(): x}) or x, lambda x: x):
            model(tokens_of(), targets_of())
        return sum(x.shape == (2, 32, 48) for x in saved.values())

    layers = 5
    assert kept(["scales"]) == kept([]) - 2 * layers


def test_a_product_of_several_layers_follows_autocast():
    model = make("golf", kv_heads=1)
    plain, fused = copy.deepcopy(model), model
    use_kernels(fused, ["qkv"])
    use_form(fused, "flash4")
    tokens, targets = tokens_of(), targets_of()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (gradients(one, tokens, targets) for one in (fused, plain))
    assert_same(found, expected, atol=5e-3)
    assert all(grad.dtype == torch.float32 for grad in found.values())
