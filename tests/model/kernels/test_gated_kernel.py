"""A gated MLP with its gate in the products: the kernels where they can run, and the operation around them everywhere."""

import pytest
import torch
import torch.nn.functional as F

from ingot.model.kernels import gated
from ingot.model.kernels.gated import fused_gated_mlp

torch.set_num_threads(1)


def weights(width=16, inner=40, device="cpu"):
    torch.manual_seed(0)
    shapes = [(inner, width), (inner, width), (width, inner)]
    return [(torch.randn(shape) / shape[1] ** 0.5).to(device).requires_grad_() for shape in shapes]


def plain(x, up, gate, down):
    return F.linear(F.linear(x, up) * F.silu(F.linear(x, gate)), down)


def outcome(form, rows=(3, 7), width=16, inner=40, device="cpu"):
    leaves = weights(width, inner, device)
    torch.manual_seed(1)
    x = torch.randn(*rows, width).to(device).requires_grad_()
    y = form(x, *leaves)
    return y.detach(), *torch.autograd.grad(y, (x, *leaves), torch.randn(y.shape).to(y))


def test_the_operation_gives_what_the_plain_form_gives():
    for found, expected in zip(outcome(fused_gated_mlp), outcome(plain), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_it_is_a_part_of_a_compiled_graph():
    compiled = torch.compile(fused_gated_mlp, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, outcome(compiled), outcome(fused_gated_mlp)))


def test_under_autocast_products_are_in_its_format_and_gradients_as_near_as_the_plain_ones():
    exact = outcome(plain)
    with torch.autocast("cpu", torch.bfloat16):
        both = [outcome(form) for form in (fused_gated_mlp, plain)]
    assert both[0][0].dtype == torch.bfloat16
    for found, usual, truth in zip(*both, exact, strict=True):
        assert found.dtype == usual.dtype
        assert 0 < (found - truth).norm() <= 1.5 * (usual - truth).norm() + 1e-6


def test_the_kernels_give_what_the_operation_gives_on_a_cpu(device):
    from ingot.model.kernels import triton_gated
    from ingot.model.kernels.triton_mlp import Tiles

    small = Tiles(32, 64, 16, 2, 4, 1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter multiplies the bits of bf16
    for rows, width, inner, forward, back in [
        (5, 16, 64, small, small), (70, 40, 128, small, small), (130, 72, 256, triton_gated.FORWARD, triton_gated.BACKWARD),
    ]:  # fmt: skip
        up, gate, down = (w.detach().to(dtype) for w in weights(width, inner))
        x, dy = torch.randn(2, rows, width).to(dtype).unbind()
        both = torch.cat([up, gate])
        y, inside = triton_gated.gated_product(x.to(device), both.to(device), forward)
        _, expected, expected_inside = gated._gated._init_fn(x.float(), both.float(), down.float())
        torch.testing.assert_close(y.cpu().float(), expected, atol=1e-2, rtol=2e-2)
        torch.testing.assert_close(inside.cpu().float(), expected_inside, atol=1e-2, rtol=2e-2)
        found = triton_gated.gated_slope(dy.to(device), down.to(device), inside, back).cpu().float()
        wanted, _ = gated._gated_backward._init_fn(dy.float(), down.float(), y.cpu().float(), inside.cpu().float())
        torch.testing.assert_close(found, wanted, atol=1e-2, rtol=2e-2)


def test_inner_layers_that_share_a_tile_are_left_to_the_library(device):
    from ingot.model.kernels.triton_gated import fits_gated

    x, down = torch.zeros(8, 16, device=device).bfloat16(), torch.zeros(16, 256, device=device).bfloat16()
    assert fits_gated(x, torch.zeros(512, 16, device=device).bfloat16(), down)
    assert not fits_gated(x, torch.zeros(320, 16, device=device).bfloat16(), down[:, :160])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("rows", "width", "inner"), [(1000, 96, 256), (4096, 768, 2048), (64, 40, 30)])
def test_on_a_gpu_the_operation_is_as_near_as_the_plain_form(rows, width, inner):
    exact = outcome(plain, (rows,), width, inner, "cuda")
    with torch.autocast("cuda", torch.bfloat16):
        mine, usual = (outcome(form, (rows,), width, inner, "cuda") for form in (fused_gated_mlp, plain))
    for found, other, truth in zip(mine, usual, exact, strict=True):
        assert (found - truth).norm() <= 1.5 * (other - truth).norm() + 1e-4 * truth.norm()
