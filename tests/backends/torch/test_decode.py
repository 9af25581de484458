import math
from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch import nn

from ingot.backends.sampling import Sampling
from ingot.backends.torch.generate import choose, generate
from ingot.model.gpt2 import GPT2

torch.set_num_threads(1)

GREEDY = Sampling(temperature=0.0)
VOCABULARY = 50


@pytest.fixture(scope="module")
def model():
    """Weights ten times the usual, so that the likeliest token leads clearly."""
    torch.manual_seed(0)
    model = GPT2(vocab_size=VOCABULARY, context=16, layers=2, heads=2, width=32)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(std=0.2)
    return model


class Uncached(nn.Module):
    """A model of one's own that has a forward pass and nothing else."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, tokens, targets=None):
        return self.inner(tokens, targets)


def prompts_of(length, rows=2, seed=1):
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def continuation(model, prompts, sampling=GREEDY, tokens=20, **options):
    return torch.stack(list(islice(generate(model, prompts, sampling, **options), tokens)), dim=1)  # (B, tokens)


@torch.no_grad()
def by_hand(model, prompts, tokens=20):
    """Greedy decoding without any of the code under test."""
    seen = prompts
    for _ in range(tokens):
        seen = torch.cat([seen, model(seen[:, -16:])[:, -1].argmax(-1, keepdim=True)], dim=1)
    return seen[:, prompts.size(1) :]


@pytest.mark.parametrize("length", [1, 5, 16, 17, 40])
@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_decoding_is_the_likeliest_token_again_and_again(model, length, use_cache):
    prompts = prompts_of(length)
    expected = by_hand(model, prompts)
    assert len(expected.unique()) > 3
    assert torch.equal(continuation(model, prompts, replace(GREEDY, use_cache=use_cache)), expected)


@pytest.mark.parametrize("length", [1, 12, 20])
def test_a_cache_changes_no_draw(model, length):
    prompts, sampling = prompts_of(length), Sampling(temperature=1.0, top_k=20, top_p=0.9, seed=3)
    cached, uncached = (continuation(model, prompts, replace(sampling, use_cache=use)) for use in (True, False))
    assert torch.equal(cached, uncached)


def test_a_cached_step_computes_one_token(model):
    lengths = []
    hook = model.transformer.wte.register_forward_pre_hook(lambda module, given: lengths.append(given[0].size(1)))
    continuation(model, prompts_of(5), tokens=14)
    hook.remove()
    assert lengths == [5, *[1] * 11, 16, 16]  # after the context every step computes the last 16 tokens


def test_a_model_without_a_cache_writes_the_same(model):
    assert torch.equal(continuation(Uncached(model), prompts_of(2), tokens=14), continuation(model, prompts_of(2), tokens=14))


def test_a_row_does_not_depend_on_the_others(model):
    together = continuation(model, prompts_of(5, rows=3))
    alone = torch.cat([continuation(model, row[None]) for row in prompts_of(5, rows=3)])
    assert torch.equal(together, alone)


def test_a_row_is_drawn_for_itself(model):
    same = prompts_of(5, rows=1).expand(2, -1)
    one, other = continuation(model, same, Sampling(temperature=1.0))
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-12), Sampling(1.0, top_p=0.0), *map(Sampling, (1e-6, 1e-29, 1e-50, 1e-320))],
    ids=str,
)
def test_sampling_narrowed_to_one_token_is_greedy(model, sampling):
    assert torch.equal(continuation(model, prompts_of(5), sampling), continuation(model, prompts_of(5)))


def test_the_same_seed_writes_the_same_text(model):
    one, again, other = (continuation(model, prompts_of(5), Sampling(1.0, seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_the_text_does_not_depend_on_other_random_numbers(model):
    torch.manual_seed(1)
    one = continuation(model, prompts_of(5), Sampling(1.0))
    torch.manual_seed(2)
    assert torch.equal(continuation(model, prompts_of(5), Sampling(1.0)), one)


def test_generating_draws_nothing_from_the_global_generator(model):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    continuation(model, prompts_of(5), Sampling(1.0))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(5.0), Sampling(5.0, top_k=30), Sampling(5.0, top_p=0.99), Sampling(100.0, 45, 0.999)], ids=str
)
def test_ids_outside_the_vocabulary_are_never_drawn(model, sampling, use_cache):
    prompts = prompts_of(5, rows=8) % 10
    assert continuation(model, prompts, replace(sampling, use_cache=use_cache), vocab_size=10).max() < 10
    assert continuation(model, prompts, sampling, tokens=3).max() >= 10


@pytest.mark.parametrize("training", [True, False])
def test_a_model_is_left_in_its_mode(model, training):
    model.train(training)
    continuation(model, prompts_of(5))
    assert model.training is training
    assert all(module.training is training for module in model.modules())
    model.eval()


def test_a_model_is_left_in_its_mode_when_nobody_asks_for_more(model):
    model.train()
    writer = generate(model, prompts_of(5), GREEDY)
    next(writer)
    writer.close()
    assert model.training
    model.eval()


def test_dropout_does_not_touch_what_is_written(model):
    dropping = GPT2(vocab_size=VOCABULARY, context=16, layers=2, heads=2, width=32, dropout=0.5)
    dropping.load_state_dict(model.state_dict())
    assert torch.equal(continuation(dropping.train(), prompts_of(5)), continuation(model, prompts_of(5)))


def test_gradients_stay_on_for_the_caller(model):
    writer = generate(model, prompts_of(5), GREEDY)
    next(writer)
    assert torch.is_grad_enabled()
    writer.close()


def counts(sampling, probabilities, draws=4000):
    logits = torch.tensor(probabilities).log().expand(draws, -1)
    found = choose(logits, sampling, torch.rand(draws, 1, generator=torch.Generator().manual_seed(0)))
    assert found.shape == (draws, 1)
    return (torch.bincount(found.flatten(), minlength=len(probabilities)) / draws).tolist()


def test_tokens_are_drawn_as_likely_as_the_model_says():
    assert counts(Sampling(1.0), [0.5, 0.3, 0.15, 0.05]) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)


def test_temperature_sharpens():
    squares = [p * p / (0.25 + 0.09 + 0.0225 + 0.0025) for p in (0.5, 0.3, 0.15, 0.05)]
    assert counts(Sampling(0.5), [0.5, 0.3, 0.15, 0.05]) == pytest.approx(squares, abs=0.03)


def test_top_k_leaves_the_k_likeliest():
    assert counts(Sampling(1.0, top_k=2), [0.15, 0.5, 0.05, 0.3]) == pytest.approx([0, 5 / 8, 0, 3 / 8], abs=0.03)


@pytest.mark.parametrize("top_k", [0, 4, 100])
def test_a_top_k_of_nothing_or_all_leaves_all(top_k):
    assert min(counts(Sampling(1.0, top_k=top_k), [0.15, 0.5, 0.05, 0.3])) > 0


def test_top_p_leaves_the_fewest_tokens_that_reach_it():
    assert counts(Sampling(1.0, top_p=0.7), [0.15, 0.5, 0.05, 0.3]) == pytest.approx([0, 5 / 8, 0, 3 / 8], abs=0.03)
    assert counts(Sampling(1.0, top_p=0.9), [0.15, 0.5, 0.05, 0.3])[2] == 0
    assert min(counts(Sampling(1.0, top_p=0.99), [0.15, 0.5, 0.05, 0.3])) > 0


def test_top_p_counts_what_top_k_left():
    assert counts(Sampling(1.0, top_k=2, top_p=0.6), [0.15, 0.5, 0.05, 0.3]) == [0, 1, 0, 0]


def test_impossible_tokens_stay_impossible():
    logits = torch.tensor([[0.0, -math.inf, 0.0]]).expand(200, -1)
    for sampling in (Sampling(1.0), Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.9999)):
        assert 1 not in choose(logits, sampling, torch.rand(200, 1, generator=torch.Generator().manual_seed(0)))
