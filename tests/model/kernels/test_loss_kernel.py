"""The fused loss: the kernel where it can run, and the operation around it everywhere."""

import pytest
import torch
import torch.nn.functional as F

from ingot.model.cross_entropy import IGNORED
from ingot.model.loss import head_loss

torch.set_num_threads(1)


def plain(logits, targets, softcap):
    exact = logits.float().requires_grad_()
    bent = exact if softcap is None else softcap * torch.tanh(exact / softcap)
    losses = F.cross_entropy(bent, targets, ignore_index=IGNORED, reduction="none")
    return losses.detach(), torch.autograd.grad(losses.sum(), exact)[0]


@pytest.mark.parametrize("softcap", [None, 15.0])
@pytest.mark.parametrize(
    ("rows", "vocabulary", "shape"),
    [(5, 1024, None), (3, 37, None), (2, 1, None), (3, 5000, None), (2, 5000, (2048, 4)), (3, 4096, (1024, 4)), (2, 50304, None)],
)
def test_the_kernel_gives_the_loss_and_the_gradient_in_place(device, rows, vocabulary, shape, softcap):
    from ingot.model.kernels.triton_loss import losses_of_logits_

    torch.manual_seed(vocabulary)
    logits = (8 * torch.randn(rows, vocabulary)).to(device, torch.bfloat16)
    targets = torch.randint(vocabulary, (rows,), device=device)
    targets[1] = IGNORED
    losses, grad = plain(logits, targets, softcap)
    kept = logits.clone()
    torch.testing.assert_close(losses_of_logits_(kept, targets, softcap, False, shape), losses, atol=1e-5, rtol=1e-5)
    assert torch.equal(kept, logits)
    torch.testing.assert_close(losses_of_logits_(logits, targets, softcap, True, shape), losses, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits.float(), grad, atol=1e-6, rtol=8e-3)  # bf16, which the interpreter cuts off


def test_a_score_far_above_the_first_ones_does_not_overflow(device):
    from ingot.model.kernels.triton_loss import losses_of_logits_

    logits = torch.zeros(2, 300, device=device, dtype=torch.bfloat16)
    logits[0, 200], logits[1, 290] = 500.0, 200.0
    targets = torch.tensor([3, 290], device=device)
    losses, grad = plain(logits, targets, None)
    torch.testing.assert_close(losses_of_logits_(logits, targets, None, True, (128, 4)), losses)
    torch.testing.assert_close(logits.float(), grad, atol=1e-6, rtol=8e-3)


def case(dtype=torch.float32, ignored=True):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(11, 8, generator=generator).requires_grad_()
    targets = torch.randint(11, (2, 5), generator=generator)
    if ignored:
        targets[0, :3] = IGNORED
    return hidden, weight, targets


def loss_and_gradients(loss_of, hidden, weight, targets, softcap, scale=1.0, **how):
    loss = loss_of(hidden, weight, targets, softcap, **how)
    return loss.detach(), *torch.autograd.grad(loss * scale, (hidden, weight))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_operation_gives_the_loss_and_the_gradients_of_the_plain_form(compiled, softcap):
    loss_of = torch.compile(head_loss, fullgraph=True, backend="aot_eager") if compiled else head_loss
    expected = loss_and_gradients(head_loss, *case(), softcap, 3.0)
    found = loss_and_gradients(loss_of, *case(), softcap, 3.0, fused=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(loss_of(*case(), softcap, fused=True), expected[0])


def test_under_autocast_the_product_is_in_its_format_and_gradients_in_those_of_their_tensors():
    with torch.autocast("cpu", torch.bfloat16):
        found = loss_and_gradients(head_loss, *case(), 3.0, fused=True)
        expected = loss_and_gradients(head_loss, *case(), 3.0)
    exact = loss_and_gradients(head_loss, *case(), 3.0)
    assert [x.dtype for x in found] == [torch.float32] * 3
    for mine, plain_one, truth in zip(found, expected, exact, strict=True):
        assert 0 < (mine - truth).norm() <= 1.5 * (plain_one - truth).norm() + 1e-6


def test_a_batch_without_targets_has_no_loss_and_no_gradient():
    hidden, weight, targets = case()
    loss, *grads = loss_and_gradients(head_loss, hidden, weight, torch.full_like(targets, IGNORED), None, fused=True)
    assert loss == 0 and not any(g.any() for g in grads)
