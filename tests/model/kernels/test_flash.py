"""FlashAttention 4 as an operation: what it is given and gives back, on CPUs in its plain form, on GPUs where it is installed."""

from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

from ingot.model.kernels.flash import flash_attention
from ingot.model.layers import repeat_kv

ON_GPUS = [(2, 256, 4, 2, 64, None), (1, 333, 4, 2, 128, 100), (2, 130, 4, 4, 64, 2), (1, 64, 2, 1, 128, 99)]
SHAPES = [(2, 16, 4, 2, 8, None), (1, 37, 3, 3, 16, 5), (2, 9, 4, 1, 8, 1), (1, 12, 2, 2, 8, 99), (1, 1, 2, 1, 8, None)]


def operands(rows, length, heads, kv_heads, size, device="cpu", dtype=torch.float32):
    torch.manual_seed(length)
    sizes = [(rows, length, count, size) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(one).to(device, dtype).transpose(1, 2).requires_grad_() for one in sizes]  # as a model lays them


def plain(q, k, v, window=None):
    """By torch, all pairs held, in float32."""
    q, k, v = q.float(), repeat_kv(k, q.size(1)).float(), repeat_kv(v, q.size(1)).float()
    place = torch.arange(q.size(2), device=q.device)
    before = place[:, None] - place
    seen = (before >= 0) & (before < (window or q.size(2)))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def outcome(form, leaves, window):
    y = form(*leaves, window)
    torch.manual_seed(7)
    return [y, *torch.autograd.grad(y, leaves, torch.randn(y.shape).to(y))]


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_causal_attention_in_windows(shape):
    *sizes, window = shape
    leaves = operands(*sizes)
    found = outcome(flash_attention, leaves, window)
    torch.testing.assert_close(found, outcome(plain, leaves, window), atol=1e-5, rtol=1e-4)
    assert found[0].transpose(1, 2).is_contiguous()  # as the next product wants it


def test_it_is_a_part_of_a_compiled_graph():
    leaves = operands(2, 16, 4, 2, 8)
    compiled = torch.compile(flash_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outcome(compiled, leaves, 5), outcome(flash_attention, leaves, 5))


def test_it_has_the_number_format_of_the_products_around_it():
    leaves = operands(1, 8, 2, 2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y, *grads = outcome(flash_attention, leaves, None)
    assert y.dtype == torch.bfloat16 and {grad.dtype for grad in grads} == {torch.float32}


def test_torch_finds_nothing_wrong_with_the_operations():
    q, k, v = (x.transpose(1, 2) for x in operands(1, 6, 2, 1, 8))
    torch.library.opcheck(torch.ops.ingot.flash_attention.default, (q, k, v, 3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "shape", [(2, 256, 4, 2, 64, None), (1, 333, 4, 2, 128, 100), (2, 130, 4, 4, 64, 2), (1, 64, 2, 1, 128, 99)]
)
def test_on_a_gpu_it_is_that_of_the_package(shape, compiled):
    if find_spec("flash_attn") is None:
        pytest.skip("flash-attn-4 is not installed")
    *sizes, window = shape
    leaves = operands(*sizes, device="cuda", dtype=torch.bfloat16)
    found = outcome(torch.compile(flash_attention, fullgraph=True) if compiled else flash_attention, leaves, window)
    for mine, expected in zip(found, outcome(plain, leaves, window), strict=True):
        assert (mine.float() - expected.float()).norm() < 0.01 * expected.float().norm()
