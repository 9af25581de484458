import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_kit import assert_same, gradients, make, tokens_of
from torch.utils._python_dispatch import TorchDispatchMode

from ingot.model.cross_entropy import IGNORED, head_logits
from ingot.model.loss import head_loss
from ingot.runtime import tensors as batch

torch.set_num_threads(1)


def test_models_ignore_the_targets_that_batches_mark():
    assert IGNORED == batch.IGNORED


def case(rows=3, length=7, width=8, vocabulary=11, ignored=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, length, width, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, width, generator=generator, requires_grad=True)
    targets = torch.randint(vocabulary, (rows, length), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < ignored] = IGNORED
    return hidden, weight, targets


def loss_and_gradients(hidden, weight, targets, softcap, chunk, scale=1.0):
    loss = head_loss(hidden, weight, targets, softcap, chunk)
    return loss.detach(), *torch.autograd.grad(loss * scale, (hidden, weight))


@settings(max_examples=60)
@given(
    rows=st.integers(1, 4),
    length=st.integers(1, 9),
    width=st.integers(1, 12),
    vocabulary=st.integers(1, 40),
    chunk=st.integers(1, 50),
    softcap=st.sampled_from([None, 0.5, 30.0]),
    ignored=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_chunks_give_the_loss_and_the_gradients_of_the_whole(rows, length, width, vocabulary, chunk, softcap, ignored, seed):
    inputs = case(rows, length, width, vocabulary, ignored, seed)
    plain = loss_and_gradients(*inputs, softcap, None)
    chunked = loss_and_gradients(*inputs, softcap, chunk)
    for found, expected in zip(chunked, plain, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_the_plain_loss_is_the_mean_over_the_targets_that_count():
    hidden, weight, targets = case()
    nll = -head_logits(hidden, weight).log_softmax(-1).gather(2, targets.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(head_loss(hidden, weight, targets), nll[targets != IGNORED].mean())


@pytest.mark.parametrize("chunk", [None, 4])
def test_a_batch_without_targets_has_no_loss_and_no_gradient(chunk):
    loss, *grads = loss_and_gradients(*case(ignored=1.0), None, chunk)
    assert loss == 0
    assert not any(g.any() for g in grads)


def test_a_chunk_without_targets_adds_nothing():
    hidden, weight, targets = case(rows=1, length=12, ignored=0.0)
    targets[:, 4:8] = IGNORED
    for found, expected in zip(
        loss_and_gradients(hidden, weight, targets, None, 4), loss_and_gradients(hidden, weight, targets, None, None), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_chunks_give_the_same_loss_without_gradients(softcap):
    hidden, weight, targets = case()
    whole, chunked = head_loss(hidden, weight, targets, softcap), head_loss(hidden, weight, targets, softcap, 4)
    assert not chunked.requires_grad
    torch.testing.assert_close(chunked, whole, atol=1e-5, rtol=0)


def test_gradients_follow_the_scale_of_the_loss():
    inputs = case()
    one, many = (loss_and_gradients(*inputs, None, 5, scale)[1:] for scale in (1.0, 65536.0))
    for a, b in zip(one, many, strict=True):
        torch.testing.assert_close(65536 * a, b)


def test_gradients_can_be_asked_for_twice():
    hidden, weight, targets = case()
    loss = head_loss(hidden, weight, targets, None, 5)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [True, False])
def test_low_precision_is_as_near_to_the_truth_as_the_plain_form(hidden_dtype, weight_dtype, autocast, softcap):
    hidden, weight, targets = case(4, 16, 32, 50)
    low = hidden.detach().to(hidden_dtype).requires_grad_(), weight.detach().to(weight_dtype).requires_grad_(), targets
    exact = low[0].detach().float().requires_grad_(), low[1].detach().float().requires_grad_(), targets
    truth = loss_and_gradients(*exact, softcap, None)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain, chunked = (loss_and_gradients(*low, softcap, chunk) for chunk in (None, 10))
    assert [x.dtype for x in chunked] == [torch.float32, hidden_dtype, weight_dtype]
    for near, found, expected in zip(plain, chunked, truth, strict=True):
        assert (found - expected).norm() <= 1.2 * (near - expected).norm() + 1e-6 * expected.norm()


def test_certain_predictions_keep_their_small_gradients_in_bf16():
    hidden, weight = 7 * torch.eye(4)[None], torch.eye(4)  # p of the target is 0.997, which bf16 rounds to 1
    low = [x.bfloat16().requires_grad_() for x in (hidden, weight)]
    exact = [x.requires_grad_() for x in (hidden, weight)]
    targets = torch.arange(4)[None]
    _, found, _ = loss_and_gradients(*low, targets, None, 2)
    _, expected, _ = loss_and_gradients(*exact, targets, None, 2)
    torch.testing.assert_close(found.float(), expected, atol=0, rtol=0.02)


class LargestTensor(TorchDispatchMode):
    """Remembers the size of the largest tensor that is made while it is on."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else [out]:
            if isinstance(made, torch.Tensor):
                self.elements = max(self.elements, made.numel())
        return out


@pytest.mark.parametrize("family", ["gpt2", "llama", "golf", "frontier"])
def test_logits_of_the_whole_batch_never_exist(family):
    model, tokens = make(family, vocab_size=5000, layers=1), tokens_of(8)
    sizes = []
    for chunk in (None, 16):
        model.loss_chunk = chunk
        with LargestTensor() as largest:
            model(tokens, tokens).backward()
        sizes.append(largest.elements)
    assert sizes == [8 * 32 * 5000, 5000 * 48]  # all logits; the head, three times what 16 tokens' logits are


@pytest.mark.parametrize(
    ("family", "head"),
    [("gpt2", {}), *((family, {"tied": tied}) for family in ("llama", "golf", "frontier") for tied in (True, False))],
)
def test_a_model_learns_the_same_from_chunks(family, head):
    plain = make(family, **head)
    chunked = copy.deepcopy(plain)
    chunked.loss_chunk = 10
    tokens, targets = tokens_of(), tokens_of()
    targets[0, :20] = IGNORED
    assert_same(gradients(chunked, tokens, targets), gradients(plain, tokens, targets), atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(chunked(tokens, targets), plain(tokens, targets), atol=1e-6, rtol=0)
        assert torch.equal(chunked(tokens), plain(tokens))
