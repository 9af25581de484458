"""Queries, keys and values as one product: the operation everywhere, and its kernels where they can run."""

import pytest
import torch
from torch import nn

from ingot.model.kernels.flash import flash_attention
from ingot.model.kernels.qkv import projected_attention
from ingot.model.kernels.rotary import EPSILON, fused_rotation
from ingot.model.layers import Rotation

torch.set_num_threads(1)
BOTH = pytest.mark.parametrize(
    ("keys", "biased", "gained", "epsilon", "documents"),
    [
        (3, True, False, None, False),
        (1, False, True, EPSILON, False),
        (1, False, True, EPSILON, True),
        (3, False, False, 1e-2, True),
    ],
)


def case(keys, biased, gained, documents, device="cpu", heads=3, size=16, length=24):
    torch.manual_seed(1)
    layers = [nn.Linear(20, count * size, bias=biased, device=device) for count in (heads, keys, keys)]
    x = torch.randn(2, length, 20, device=device, requires_grad=True)
    gain = torch.rand(heads, device=device).requires_grad_() if gained else None
    tables = Rotation(length, size, 100.0).to(device)(torch.arange(length, device=device))
    starts = torch.tensor([0, 5, length, length + 9, 2 * length, 2 * length], dtype=torch.int32, device=device)
    return x, layers, size, tables, starts if documents else None, gain


def apart(x, layers, size, tables, starts, gain, epsilon):
    q, k, v = (layer(x).view(*x.shape[:2], -1, size) for layer in layers)
    q, k = fused_rotation(q, tables, gain, epsilon), fused_rotation(k, tables, None, epsilon)
    return flash_attention(q, k, v.transpose(1, 2), None, starts).transpose(1, 2)


def outcome(form, given, epsilon):
    x, layers, *_, gain = given
    y = form(*given, epsilon)
    wanted = [x, *(p for layer in layers for p in layer.parameters()), *([] if gain is None else [gain])]
    torch.manual_seed(2)
    return [y.detach(), *torch.autograd.grad(y, wanted, torch.randn(y.shape).to(y))]


@BOTH
@pytest.mark.parametrize("compiled", [False, True])
def test_it_is_three_products_and_their_attention(keys, biased, gained, epsilon, documents, compiled):
    given = case(keys, biased, gained, documents)
    form = torch.compile(projected_attention, fullgraph=True, backend="aot_eager") if compiled else projected_attention
    torch.testing.assert_close(outcome(form, given, epsilon), outcome(apart, given, epsilon), atol=1e-5, rtol=1e-4)


def test_the_compiler_knows_its_shapes():
    *_, tables, starts, gain = case(1, False, True, True)
    heads = torch.randn(2, 24, 5, 16, requires_grad=True)
    torch.library.opcheck(torch.ops.ingot.qkv_attention.default, (heads, *tables, gain, EPSILON, 3, starts))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@BOTH
def test_on_a_gpu_gradients_are_written_into_one(keys, biased, gained, epsilon, documents):
    pytest.importorskip("flash_attn.cute.interface", reason="needs flash-attn-4")
    given = case(keys, biased, gained, documents, "cuda", size=64, length=200)
    with torch.autocast("cuda", torch.bfloat16):
        found, expected = (outcome(form, given, epsilon) for form in (projected_attention, apart))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-2 * float(theirs.abs().max()), rtol=2e-2)
