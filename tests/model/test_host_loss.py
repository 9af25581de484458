"""The loss that a CPU computes together with its gradients is torch's."""

import pytest
import torch
import torch.nn.functional as F

from ingot.model import loss as module
from ingot.model.cross_entropy import IGNORED, head_logits
from ingot.model.loss import head_loss

torch.set_num_threads(1)


def ours(logits, targets):
    """The loss of logits: a head that is no other than one."""
    return module.host_loss(logits, torch.eye(logits.size(1)), targets, None)


def torchs(logits, targets):
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def both(loss_of, logits, targets, scale=3.0):
    loss = loss_of(logits, targets)
    return loss.detach(), torch.autograd.grad(loss * scale, logits)[0]


@pytest.mark.parametrize("ignored", [0, 3, 7])
@pytest.mark.parametrize("vocabulary", [1, 2, 50])
def test_loss_and_gradient_are_torchs(vocabulary, ignored):
    torch.manual_seed(vocabulary)
    logits, targets = (5 * torch.randn(7, vocabulary)).requires_grad_(), torch.randint(vocabulary, (7,))
    targets[:ignored] = IGNORED
    for found, expected in zip(both(ours, logits, targets), both(torchs, logits, targets), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_models_loss_and_gradients_are_those_of_all_tokens_at_once(softcap, monkeypatch):
    monkeypatch.setattr(module, "HOST_LOGITS", 100)
    monkeypatch.setattr(module, "HOST_TOKENS", 3)  # 11 tokens in parts of 4, 4 and 3
    torch.manual_seed(0)
    hidden, weight = torch.randn(1, 11, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    targets = torch.randint(30, (1, 11))
    targets[0, :2] = IGNORED
    assert module.host_loss(hidden[0], weight, targets[0], softcap) is not None
    found = head_loss(hidden, weight, targets, softcap)
    expected = torchs(head_logits(hidden[0], weight, softcap), targets[0]) / 9
    torch.testing.assert_close(found, expected)
    for grads in zip(*(torch.autograd.grad(3 * loss, (hidden, weight)) for loss in (found, expected)), strict=True):
        torch.testing.assert_close(*grads, atol=1e-6, rtol=1e-5)


def test_a_target_without_a_probability_has_a_loss_and_a_gradient():
    logits = torch.tensor([[0.0, 300.0, -300.0]], requires_grad=True)
    loss, grad = both(ours, logits, torch.tensor([2]), 1.0)
    assert loss == 600 and torch.equal(grad, torch.tensor([[0.0, 1.0, -1.0]]))


def test_a_loss_that_is_not_finite_is_told():
    logits = torch.tensor([[0.0, float("nan")], [0.0, float("inf")]], requires_grad=True)
    assert not both(ours, logits, torch.tensor([0, 0]))[0].isfinite()


def test_a_certain_prediction_keeps_its_small_gradient():
    logits = torch.tensor([[10.0, 0.0]], requires_grad=True)
    torch.testing.assert_close(
        both(ours, logits, torch.tensor([0]))[1], both(torchs, logits, torch.tensor([0]))[1], atol=1e-7, rtol=1e-3
    )


def test_gradients_can_be_asked_for_twice():
    logits, targets = torch.randn(3, 5, requires_grad=True), torch.tensor([1, 2, 3])
    loss = ours(logits, targets)
    first = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, logits)[0])
