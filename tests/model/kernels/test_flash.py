"""FlashAttention 4 as an operation: what it is given and gives back, on CPUs in its plain form, on GPUs where it is installed."""

from functools import partial
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

from ingot.model.kernels.flash import flash_attention, packed_flash_attention
from ingot.model.layers import repeat_kv

ON_GPUS = [(2, 256, 4, 2, 64, None), (1, 333, 4, 2, 128, 100), (2, 130, 4, 4, 64, 2), (1, 64, 2, 1, 128, 99)]
BY_CUDNN = [(2, 256, 4, 4, 64, None), (3, 333, 2, 2, 128, None), (2, 130, 4, 2, 64, None), (1, 96, 4, 4, 64, 7)]
SHAPES = [(2, 16, 4, 2, 8, None), (1, 37, 3, 3, 16, 5), (2, 9, 4, 1, 8, 1), (1, 12, 2, 2, 8, 99), (1, 1, 2, 1, 8, None)]


def operands(rows, length, heads, kv_heads, size, device="cpu", dtype=torch.float32):
    torch.manual_seed(length)
    sizes = [(rows, length, count, size) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(one).to(device, dtype).transpose(1, 2).requires_grad_() for one in sizes]  # as a model lays them


def plain(q, k, v, window=None, starts=None):
    """By torch, all pairs held, in float32."""
    (B, T), place = (q.size(0), q.size(2)), torch.arange(q.size(2), device=q.device)
    q, k, v = q.float(), repeat_kv(k, q.size(1)).float(), repeat_kv(v, q.size(1)).float()
    before = place[:, None] - place
    seen = (before >= 0) & (before < (window or T))
    if starts is not None:
        begins = torch.zeros(B * T + 1, dtype=torch.long, device=q.device)
        begins[starts.long()] = 1
        document = begins[:-1].cumsum(0).view(B, T)
        seen = seen & (document[:, None, :, None] == document[:, None, None, :])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def outcome(form, leaves, window, starts=None):
    y = form(*leaves, window, starts)
    torch.manual_seed(7)
    return [y, *torch.autograd.grad(y, leaves, torch.randn(y.shape).to(y))]


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_causal_attention_in_windows(shape):
    *sizes, window = shape
    leaves = operands(*sizes)
    found = outcome(flash_attention, leaves, window)
    torch.testing.assert_close(found, outcome(plain, leaves, window), atol=1e-5, rtol=1e-4)
    assert found[0].transpose(1, 2).is_contiguous()  # as the next product wants it


def document_starts(rows, length, device="cpu"):
    """Documents of 1, 2, 4 ... tokens in every second row, and the end three times."""
    inside = [row * length + 2**n - 1 for row in range(0, rows, 2) for n in range(length.bit_length()) if 2**n - 1 < length]
    found = sorted({row * length for row in range(rows)} | set(inside))
    return torch.tensor([*found, *[rows * length] * 3], dtype=torch.int32, device=device)


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_of_a_document_see_no_other(shape):
    *sizes, window = shape
    leaves, starts = operands(*sizes), document_starts(*sizes[:2])
    found = outcome(flash_attention, leaves, window, starts)
    torch.testing.assert_close(found, outcome(plain, leaves, window, starts), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("starts", [None, document_starts(2, 16)])
def test_it_is_a_part_of_a_compiled_graph(starts):
    leaves = operands(2, 16, 4, 2, 8)
    compiled = torch.compile(flash_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(outcome(compiled, leaves, 5, starts), outcome(flash_attention, leaves, 5, starts))


def test_it_has_the_number_format_of_the_products_around_it():
    leaves = operands(1, 8, 2, 2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y, *grads = outcome(flash_attention, leaves, None)
    assert y.dtype == torch.bfloat16 and {grad.dtype for grad in grads} == {torch.float32}


def test_torch_finds_nothing_wrong_with_the_operations():
    q, k, v = (x.transpose(1, 2) for x in operands(2, 6, 2, 1, 8))
    for starts in (None, document_starts(2, 6)):
        torch.library.opcheck(torch.ops.ingot.flash_attention.default, (q, k, v, 3, starts, True))


def packed_outcome(form, qkv, window, starts):
    y = form(qkv, window, starts)
    torch.manual_seed(7)
    return [y, *torch.autograd.grad(y, qkv, torch.randn(y.shape).to(y))]


def apart(qkv, window, starts):
    """By three tensors."""
    return plain(*(x.transpose(1, 2) for x in qkv.unbind(2)), window, starts).transpose(1, 2)


@pytest.mark.parametrize("starts", [None, document_starts(2, 9)])
@pytest.mark.parametrize("window", [None, 4])
def test_what_one_product_gave_has_one_gradient(window, starts):
    qkv = torch.randn(2, 9, 3, 4, 8, requires_grad=True)
    expected = packed_outcome(apart, qkv, window, starts)
    torch.testing.assert_close(packed_outcome(packed_flash_attention, qkv, window, starts), expected, atol=1e-5, rtol=1e-4)
    compiled = torch.compile(packed_flash_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(packed_outcome(compiled, qkv, window, starts), expected, atol=1e-5, rtol=1e-4)
    torch.library.opcheck(torch.ops.ingot.packed_flash_attention.default, (qkv, window, starts, False))


@pytest.fixture
def package():
    if not torch.cuda.is_available() or find_spec("flash_attn") is None:
        pytest.skip("needs a GPU and flash-attn-4")


def assert_near(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine.float() - theirs.float()).norm() < 0.01 * theirs.float().norm()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("shape", ON_GPUS)
def test_on_a_gpu_it_is_that_of_the_package(shape, documents, compiled, package):
    *sizes, window = shape
    leaves = operands(*sizes, device="cuda", dtype=torch.bfloat16)
    starts = document_starts(*sizes[:2], device="cuda") if documents else None
    found = outcome(torch.compile(flash_attention, fullgraph=True) if compiled else flash_attention, leaves, window, starts)
    assert_near(found, outcome(plain, leaves, window, starts))


def test_on_a_gpu_there_is_room_for_more_documents_than_there_are(package):
    leaves, starts = operands(4, 256, 2, 2, 64, device="cuda", dtype=torch.bfloat16), document_starts(4, 256, device="cuda")
    roomy = torch.cat([starts, starts.new_full((600,), 4 * 256)])  # from 257 on the package finds documents in another way
    assert_near(outcome(flash_attention, leaves, 100, roomy), outcome(plain, leaves, 100, starts))


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("sizes", [(2, 256, 12, 64), (1, 333, 4, 128), (3, 100, 2, 64)])
def test_on_a_gpu_the_package_writes_one_gradient(sizes, documents, package):
    rows, length, heads, size = sizes
    torch.manual_seed(length)
    qkv = torch.randn(rows, length, 3, heads, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    starts = document_starts(rows, length, device="cuda") if documents else None
    for form in (packed_flash_attention, torch.compile(packed_flash_attention, fullgraph=True)):
        found, expected = (packed_outcome(how, qkv, None, starts) for how in (form, apart))
        assert_near([found[0], *found[1].unbind(2)], [expected[0], *expected[1].unbind(2)])


@pytest.mark.parametrize(
    "shape", [(2, 256, 4, 4, 64, None), (3, 333, 2, 2, 128, None), (2, 130, 4, 2, 64, None), (1, 96, 4, 4, 64, 7)]
)
def test_on_a_gpu_gradients_by_the_package_follow_from_what_cudnn_found(shape, package):
    *sizes, window = shape
    leaves, by_cudnn = operands(*sizes, device="cuda", dtype=torch.bfloat16), partial(flash_attention, cudnn=True)
    for form in (by_cudnn, torch.compile(by_cudnn, fullgraph=True)):
        found = outcome(form, leaves, window)
        assert_near(found, outcome(plain, leaves, window))
        assert found[0].transpose(1, 2).is_contiguous()
    rows, length, heads, _, size, _ = shape
    qkv = torch.randn(rows, length, 3, heads, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    found, expected = (packed_outcome(form, qkv, window, None) for form in (partial(packed_flash_attention, cudnn=True), apart))
    assert_near([found[0], *found[1].unbind(2)], [expected[0], *expected[1].unbind(2)])


def test_on_a_gpu_sums_of_cudnn_are_those_of_the_package(package):
    q, k, v = (x.detach().transpose(1, 2) for x in operands(2, 200, 4, 4, 64, device="cuda", dtype=torch.bfloat16))
    mine, theirs = (torch.ops.ingot.flash_attention(q, k, v, None, None, cudnn)[1] for cudnn in (True, False))
    torch.testing.assert_close(mine, theirs, atol=1e-2, rtol=1e-3)
