"""A gated MLP with its gate in the products: the kernels where they can run, and the operation around them everywhere."""

import sys

import pytest
import torch
import torch.nn.functional as F

from ingot.model.kernels import fused_mlp as module
from ingot.model.kernels import matmul
from ingot.model.kernels.fused_mlp import fused_gated_mlp
from ingot.model.kernels.matmul import quack_takes

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


def test_rows_that_the_package_does_not_take_are_left_to_the_library():
    whole = torch.zeros(16, 24, dtype=torch.bfloat16)
    assert quack_takes(whole, whole.T, whole[:, 8:], whole[:, :16])
    assert not any(quack_takes(whole, other) for other in (whole[:, 1:], whole.float(), torch.zeros(6, 20).bfloat16(), whole[:0]))


def test_without_the_package_products_are_the_librarys_and_a_gate_is_none(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert matmul.quack_kernels.__wrapped__(device) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "quack", None)
    assert matmul.quack_kernels.__wrapped__(device) is None
    a, b = torch.randn(4, 8), torch.randn(8, 3)
    assert torch.equal(matmul.matmul(a, b), a @ b)
    monkeypatch.setattr(module, "quack_kernels", lambda device: None)
    with pytest.raises(RuntimeError, match="quack-kernels"):
        module._required_quack(device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("rows", "width", "inner"), [(1000, 96, 256), (4096, 768, 2048), (64, 40, 30)])
def test_on_a_gpu_the_operation_is_as_near_as_the_plain_form(rows, width, inner):
    if matmul.quack_kernels(torch.device("cuda", 0)) is None:
        pytest.skip("needs quack-kernels and a Hopper GPU")
    exact = outcome(plain, (rows,), width, inner, "cuda")
    with torch.autocast("cuda", torch.bfloat16):
        mine, usual = (outcome(form, (rows,), width, inner, "cuda") for form in (fused_gated_mlp, plain))
    for found, other, truth in zip(mine, usual, exact, strict=True):
        assert (found - truth).norm() <= 1.5 * (other - truth).norm() + 1e-4 * truth.norm()
