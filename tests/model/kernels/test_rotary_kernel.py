"""Norm, rotation and gain in one: the kernels where they can run, and the operation around them everywhere."""

import pytest
import torch
import torch.nn.functional as F

from ingot.model.kernels import rotary
from ingot.model.kernels.rotary import EPSILON, fused_rotation
from ingot.model.layers import Rotation, rotate

torch.set_num_threads(1)
B, T = 2, 5


def case(heads, size, rotated, gained, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = (3 * torch.randn(B, T, heads, size, generator=generator)).requires_grad_()
    gain = torch.rand(heads, generator=generator).requires_grad_() if gained else None
    dy = torch.randn(B, heads, T, size, generator=generator)
    return x, Rotation(T, rotated, 100.0)(torch.arange(T)), gain, dy


def plain(x, tables, gain, epsilon):
    y = x.transpose(1, 2)  # (B, H, T, D)
    if epsilon is not None:
        y = F.rms_norm(y, (y.size(-1),), eps=None if epsilon == EPSILON else epsilon)
    rotated = 2 * tables[0].size(-1)
    y = torch.cat([rotate(y[..., :rotated], tables), y[..., rotated:]], dim=-1)
    return y if gain is None else y * gain[:, None, None]


def outcome(y, x, gain, dy):
    wanted = (x,) if gain is None else (x, gain)
    return y.detach(), *torch.autograd.grad(y, wanted, dy)


@pytest.mark.parametrize("epsilon", [EPSILON, 1e-2, None])
@pytest.mark.parametrize("gained", [True, False])
@pytest.mark.parametrize(("heads", "size", "rotated"), [(4, 8, 8), (3, 12, 6), (1, 64, 64), (2, 6, 2)])
def test_the_operation_gives_what_the_plain_form_gives(heads, size, rotated, gained, epsilon):
    x, tables, gain, dy = case(heads, size, rotated, gained)
    expected = outcome(plain(x, tables, gain, epsilon), x, gain, dy)
    found = outcome(fused_rotation(x, tables, gain, epsilon), x, gain, dy)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_it_is_a_part_of_a_compiled_graph():
    x, tables, gain, dy = case(3, 12, 6, True)
    expected = outcome(fused_rotation(x, tables, gain), x, gain, dy)
    found = outcome(torch.compile(fused_rotation, fullgraph=True, backend="aot_eager")(x, tables, gain), x, gain, dy)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("epsilon", [EPSILON, 1e-2, None])
@pytest.mark.parametrize("gained", [True, False])
@pytest.mark.parametrize(("heads", "size", "rotated"), [(4, 64, 64), (3, 12, 6), (2, 96, 96), (1, 128, 64), (2, 6, 2)])
def test_the_kernels_give_what_the_operation_gives_on_a_cpu(device, heads, size, rotated, gained, epsilon):
    from ingot.model.kernels import triton_rotary

    x, (cos, sin), gain, dy = case(heads, size, rotated, gained)
    both = torch.cat([x.detach(), torch.zeros_like(x)], dim=2)[:, :, :heads]  # heads of q among those of q, k and v
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        on_cpu = [both.to(dtype), cos, sin, None if gain is None else gain.detach(), epsilon]
        there = [value.to(device) if isinstance(value, torch.Tensor) else value for value in on_cpu]
        expected = rotary._rotation._init_fn(*on_cpu)
        torch.testing.assert_close(triton_rotary.rotation(*there).cpu(), expected, atol=tolerance, rtol=tolerance)
        d = dy.to(dtype).transpose(1, 2)
        dx, along = triton_rotary.rotation_backward(d.to(device), *there)
        d_expected, along_expected = rotary._rotation_backward._init_fn(d, *on_cpu)
        torch.testing.assert_close(dx.cpu(), d_expected, atol=tolerance, rtol=tolerance)
        if gained:
            torch.testing.assert_close(along.cpu(), along_expected, atol=10 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("epsilon", [EPSILON, None])
@pytest.mark.parametrize("gained", [True, False])
def test_the_gradient_is_written_among_those_of_other_heads(device, gained, epsilon):
    from ingot.model.kernels.triton_rotary import rotation_backward

    x, tables, gain, dy = case(3, 12, 6, gained)
    given = [None if a is None else a.detach().to(device) for a in (dy.transpose(1, 2), x, *tables, gain)]
    room = torch.full((B, T, 8, 12), 7.0, device=device)
    rotation_backward(*given, epsilon, out=room[:, :, 2:5])
    assert torch.equal(room[:, :, 2:5], rotation_backward(*given, epsilon)[0])
    assert (room[:, :, :2] == 7).all() and (room[:, :, 5:] == 7).all()
