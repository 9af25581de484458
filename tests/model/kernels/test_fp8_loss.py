"""The head in 8 bits: the kernels where they can run, and the operation around them everywhere."""

import pytest
import torch

from ingot.model.cross_entropy import IGNORED, loss_and_grad
from ingot.model.kernels import fused_loss
from ingot.model.kernels.fused_loss import E4M3, E5M2, GRAD_SCALE, HIDDEN_SCALE, WEIGHT_SCALE
from ingot.model.loss import head_loss

torch.set_num_threads(1)
TOKENS, WIDTH, WORDS = 96, 32, 64


@pytest.fixture
def device(device):
    """A device that computes in 8 bits."""
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with 8-bit products")
    return device


def case(spread=0.3, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, TOKENS // 2, WIDTH, generator=generator)
    weight = spread * torch.randn(WORDS, WIDTH, generator=generator)
    targets = torch.randint(WORDS, (2, TOKENS // 2), generator=generator)
    targets[0, :5] = IGNORED
    return hidden.to(device, dtype).requires_grad_(), weight.to(device).requires_grad_(), targets.to(device)


def outcome(hidden, weight, targets, softcap=None, scale=1.0, form=head_loss, **how):
    loss = form(hidden, weight, targets, softcap, **how)
    return loss.detach(), *torch.autograd.grad(loss * scale, (hidden, weight))


def cut(x, scale, dtype):
    return ((x.float() / scale).to(dtype).float() * scale).to(x.dtype)


@pytest.mark.parametrize("softcap", [None, 15.0])
def test_loss_and_gradients_are_those_of_the_plain_head_but_for_8_bits(softcap):
    found, expected = outcome(*case(), softcap, fp8=True), outcome(*case(), softcap)
    assert found[0] == pytest.approx(float(expected[0]), abs=0.02) and found[0] != expected[0]
    for mine, plain in zip(found[1:], expected[1:], strict=True):
        assert mine.dtype == plain.dtype and 0 < (mine - plain).norm() < 0.1 * plain.norm()


@pytest.mark.parametrize("softcap", [None, 15.0])
def test_what_8_bits_hold_is_multiplied_exactly_and_only_the_gradient_of_the_logits_is_rounded(softcap):
    hidden, weight, targets = case()
    with torch.no_grad():
        hidden.copy_(cut(hidden, HIDDEN_SCALE, E4M3))
        weight.copy_(cut(weight, WEIGHT_SCALE, E4M3))
    loss, d_hidden, d_weight = outcome(hidden, weight, targets, softcap, 3.0, fp8=True)
    assert loss == pytest.approx(head_loss(hidden, weight, targets, softcap).item(), abs=1e-6)
    h, y = hidden.detach().flatten(0, 1), targets.flatten()
    grad = loss_and_grad(h, weight.detach(), y, softcap)[1].masked_fill((y == IGNORED)[:, None], 0.0)
    grad, scale = cut(grad, GRAD_SCALE, E5M2), 3.0 / int((y != IGNORED).sum())
    torch.testing.assert_close(d_hidden.flatten(0, 1), grad @ weight.detach() * scale, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(d_weight, grad.T @ h * scale, atol=1e-6, rtol=1e-5)


def test_numbers_too_large_for_8_bits_are_cut_off():
    hidden, weight, targets = case()
    with torch.no_grad():
        hidden[0, 7, 3], weight[5, 2] = 1e4, -1e4
    capped = hidden.detach().clone().clamp(-448 * HIDDEN_SCALE, 448 * HIDDEN_SCALE).requires_grad_()
    cut_off = weight.detach().clone().clamp(-448 * WEIGHT_SCALE, 448 * WEIGHT_SCALE).requires_grad_()
    both = outcome(hidden, weight, targets, 15.0, fp8=True), outcome(capped, cut_off, targets, 15.0, fp8=True)
    assert all(mine.isfinite().all() and torch.equal(mine, expected) for mine, expected in zip(*both, strict=True))


def test_a_batch_without_targets_has_no_loss_and_no_gradient():
    hidden, weight, targets = case()
    loss, *grads = outcome(hidden, weight, torch.full_like(targets, IGNORED), fp8=True)
    assert loss == 0 and not any(g.any() for g in grads)


def test_without_gradients_scores_are_those_of_the_plain_head():
    with torch.no_grad():
        assert torch.equal(head_loss(*case(), 15.0, fp8=True), head_loss(*case(), 15.0))


def test_it_is_a_part_of_a_compiled_graph():
    compiled = torch.compile(head_loss, fullgraph=True, backend="aot_eager")
    for dtype in (torch.float32, torch.bfloat16):
        found = outcome(*case(dtype=dtype), 15.0, form=compiled, fp8=True)
        assert all(map(torch.equal, found, outcome(*case(dtype=dtype), 15.0, fp8=True)))
        assert [x.dtype for x in found] == [torch.float32, dtype, torch.float32]


@pytest.mark.parametrize(("rows", "columns"), [(5, 3), (16, 130), (257, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_rounds_as_torch_does_and_writes_both_layouts(device, rows, columns, dtype):
    from ingot.model.kernels.triton_loss import rounded, transposed

    torch.manual_seed(rows)
    x = torch.randn(rows, columns).to(dtype)
    if device.type == "cpu":  # the interpreter rounds wrongly
        x = cut(x, WEIGHT_SCALE, E4M3)
    x[0, 0] = 1e5
    expected = (x.bfloat16().float() / WEIGHT_SCALE).clamp(-448, 448).to(E4M3)  # it reads bf16
    straight, turned = (y.cpu() for y in rounded(x.to(device), WEIGHT_SCALE, E4M3))
    assert straight.dtype == turned.dtype == E4M3 and torch.equal(straight.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(turned.view(torch.uint8), straight.view(torch.uint8).T)
    assert torch.equal(transposed(expected.to(device)).cpu().view(torch.uint8), expected.view(torch.uint8).T)


@pytest.mark.parametrize(("vocabulary", "shape"), [(37, None), (5000, (2048, 4))])
def test_the_kernel_of_the_loss_writes_the_gradient_in_8_bits_beside_the_logits(device, vocabulary, shape):
    from ingot.model.kernels.triton_loss import losses_of_logits_

    torch.manual_seed(0)
    logits = (4 * torch.randn(3, vocabulary)).to(device, torch.bfloat16)
    targets = torch.tensor([7, IGNORED, 30], device=device)
    kept, plain = logits.clone(), logits.clone()
    into = torch.zeros(3, vocabulary, dtype=torch.float32 if device.type == "cpu" else E5M2, device=device)
    losses = losses_of_logits_(logits, targets, 15.0, True, shape, into, 1 / GRAD_SCALE)
    assert torch.equal(logits, kept) and torch.equal(losses, losses_of_logits_(plain, targets, 15.0, True, shape))
    found = into.cpu().float() * GRAD_SCALE
    torch.testing.assert_close(found, plain.cpu().float(), atol=2.0**-16 * GRAD_SCALE, rtol=0.26)
    assert found[0, 7] < 0 and not found[1].any()


def test_products_and_layouts_on_a_gpu_are_those_of_the_form_for_cpus(device):
    hidden, weight, targets = (x.detach() for x in case(dtype=torch.bfloat16))
    hidden, weight = cut(hidden, HIDDEN_SCALE, E4M3).flatten(0, 1), cut(weight, WEIGHT_SCALE, E4M3)
    expected = fused_loss._fp8_head_loss._init_fn(hidden, weight, targets.flatten(), 15.0)
    given = (x.to(device) for x in (hidden, weight, targets.flatten()))
    found = fused_loss._fp8_head_loss_cuda(*given, 15.0)
    assert found[0].item() == pytest.approx(expected[0].item(), rel=2e-3)  # logits are bf16 there
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(found[2:], expected[2:], strict=True))
    scale = torch.tensor(0.01)
    back = fused_loss._fp8_head_grads_cuda(*(x.to(device) for x in (*expected[1:], scale)), torch.bfloat16)
    for mine, theirs in zip(back, fused_loss._fp8_head_grads._init_fn(*expected[1:], scale, torch.bfloat16), strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine.cpu(), theirs, atol=3e-5, rtol=1e-2)  # an H200 is up to 1.5e-5 off


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with 8-bit products"
)
@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_the_products_are_those_of_the_form_for_cpus(softcap, compiled):
    form = torch.compile(head_loss, dynamic=False) if compiled else head_loss
    expected = outcome(*case(dtype=torch.bfloat16), softcap, fp8=True)
    found = outcome(*case(device="cuda", dtype=torch.bfloat16), softcap, form=form, fp8=True)
    assert found[0].item() == pytest.approx(expected[0].item(), abs=2e-3)  # logits are bf16 there
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        assert mine.dtype == theirs.dtype and (mine.cpu().float() - theirs.float()).norm() < 0.03 * theirs.float().norm()
