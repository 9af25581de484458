"""Two layers with the activation in their products: the kernels where they can run, and the operation around them everywhere."""

import pytest
import torch
from torch import nn

from ingot.model.kernels import fused_mlp as mlp
from ingot.model.kernels.fused_mlp import ACTIVATIONS, fused_mlp

torch.set_num_threads(1)
ROWS, WIDTH, INNER = (3, 7), 16, 40


def layers(bias, width=WIDTH, inner=INNER):
    torch.manual_seed(0)
    return nn.Linear(width, inner, bias=bias), nn.Linear(inner, width, bias=bias)


def outcome(form, first, second, activation, dtype=torch.float32):
    torch.manual_seed(1)
    x = torch.randn(*ROWS, first.in_features, dtype=dtype, requires_grad=True)
    y = form(x, first, second, activation)
    wanted = (x, *first.parameters(), *second.parameters())
    return y.detach(), *torch.autograd.grad(y, wanted, torch.randn_like(y))


def fused(x, first, second, activation):
    y = fused_mlp(x, first.weight, first.bias, second.weight, activation)
    return y if second.bias is None else y + second.bias.to(y.dtype)


def plain(x, first, second, activation):
    return second(ACTIVATIONS[activation](first(x)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_operation_gives_what_the_plain_form_gives(activation, bias):
    for found, expected in zip(*(outcome(form, *layers(bias), activation) for form in (fused, plain)), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_it_is_a_part_of_a_compiled_graph():
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    for found, expected in zip(*(outcome(form, *layers(True), "gelu-tanh") for form in (compiled, fused)), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_under_autocast_products_are_in_its_format_and_gradients_as_near_as_the_plain_ones(activation):
    exact = outcome(plain, *layers(True), activation)
    with torch.autocast("cpu", torch.bfloat16):
        both = [outcome(form, *layers(True), activation) for form in (fused, plain)]
    assert both[0][0].dtype == torch.bfloat16
    for found, usual, truth in zip(*both, exact, strict=True):
        assert found.dtype == usual.dtype
        assert 0 < (found - truth).norm() <= 1.5 * (usual - truth).norm() + 1e-6


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_wide_inner_layer_waits_for_the_backward_pass_with_its_scores_where_these_have_no_way_back(activation):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved.shape) or saved, lambda saved: saved):
        fused(torch.randn(*ROWS, WIDTH), *layers(False), activation)
    assert kept.count((ROWS[0] * ROWS[1], INNER)) == (1 if activation == "relu2" else 2)


def sizes_and_tiles():
    from ingot.model.kernels.triton_mlp import PAIRED, WIDE, Tiles

    small = Tiles(32, 64, 16, 2, 4, 1)
    shapes = [(5, 16, 24), (70, 40, 72), (64, 32, 64), (33, 24, 200)]
    return [(shape, small) for shape in shapes] + [((130, 72, 264), tiles) for tiles in (WIDE, PAIRED)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_kernels_give_what_the_operation_gives_on_a_cpu(device, activation, bias):
    from ingot.model.kernels import triton_mlp

    keeps_scores = activation != "relu2"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter multiplies the bits of bf16
    for (rows, width, inner), tiles in sizes_and_tiles():
        first, second = layers(bias, width, inner)
        torch.manual_seed(rows)
        x, dy = torch.randn(2, rows, width).to(dtype).unbind()
        up, down, b = (None if p is None else p.detach().to(dtype) for p in (first.weight, second.weight, first.bias))
        there = [None if a is None else a.to(device) for a in (x, up, b, down, dy)]
        kept_there = triton_mlp.activated_matmul(*there[:3], activation, keeps_scores, tiles)
        scores = torch.nn.functional.linear(x.float(), up.float(), None if b is None else b.float())
        expected = [ACTIVATIONS[activation](scores), scores if keeps_scores else ACTIVATIONS[activation](scores)]
        for found, wanted in zip(kept_there, expected, strict=True):
            torch.testing.assert_close(found.float().cpu(), wanted, atol=1e-2, rtol=2e-2)
        kept = kept_there[1].cpu()
        found, wanted = (
            triton_mlp.sloped_matmul(there[4], there[3], kept_there[1], activation, bias, tiles),
            mlp._mlp_grads._init_fn(dy.float(), up.float(), down.float(), kept.float(), kept.float(), activation, bias),
        )
        for mine, theirs in zip(found, wanted[1:3], strict=True):
            torch.testing.assert_close(mine.float().cpu(), theirs, atol=1e-2, rtol=2e-2)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_and_its_slope_are_right_to_float32(device, activation):
    from activation_probe import activate

    x = torch.cat([torch.linspace(-8, 8, 4092), torch.tensor([-100.0, 100.0, -0.0, 1e-40])]).to(device)
    y, slope = torch.empty_like(x), torch.empty_like(x)
    activate[(1,)](x, y, slope, len(x), activation)
    exact = x.double().requires_grad_()
    expected = ACTIVATIONS[activation](exact)
    torch.testing.assert_close(y.double(), expected.detach(), atol=2e-6, rtol=1e-6)
    (slope_expected,) = torch.autograd.grad(expected.sum(), exact)
    torch.testing.assert_close(slope.double(), slope_expected, atol=2e-5, rtol=1e-6)


def test_rows_that_begin_anywhere_are_left_to_the_library(device):
    from ingot.model.kernels.triton_mlp import fits

    whole = torch.zeros(6, 24, dtype=torch.bfloat16, device=device)
    assert fits(whole, whole[:, :8], whole[2:])
    assert not any(fits(whole, other) for other in (whole[:, 1:], whole.T, torch.zeros(6, 20).bfloat16(), whole[:0]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])  # without: by quack-kernels, where that is installed
@pytest.mark.parametrize(("rows", "width", "inner"), [(1000, 96, 200), (4096, 512, 1024), (300, 768, 3072), (64, 40, 30)])
def test_on_a_gpu_the_operation_is_as_near_as_the_plain_form(activation, rows, width, inner, bias):
    first, second = (layer.cuda() for layer in layers(bias, width, inner))
    torch.manual_seed(1)
    x = torch.randn(rows, width, device="cuda", requires_grad=True)
    dy = torch.randn(rows, width, device="cuda")
    found = []
    for form, exactly in ((fused, False), (plain, False), (plain, True)):
        with torch.autocast("cuda", torch.bfloat16, enabled=not exactly):
            y = form(x, first, second, activation)
        found.append([y.detach(), *torch.autograd.grad(y, (x, *first.parameters(), *second.parameters()), dy.to(y.dtype))])
    for mine, usual, truth in zip(*found, strict=True):
        assert (mine - truth).norm() <= 1.5 * (usual - truth).norm() + 1e-4 * truth.norm()
