"""Prompts of different lengths in one batch: each is continued as if it stood alone."""

from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch import nn

from ingot.backends.sampling import Sampling
from ingot.backends.torch.generate import generate
from ingot.model.registry import build

torch.set_num_threads(1)

VOCABULARY, CONTEXT = 50, 16
GREEDY = Sampling(temperature=0.0)
SHAPES = {
    "gpt2": {"layers": 2, "heads": 2},
    "llama": {"layers": 2, "heads": 4, "kv_heads": 2},
    "golf": {"layers": 3, "heads": 4, "kv_heads": 2},
    "frontier": {"layers": 3, "heads": 4, "kv_heads": 2, "window": 4, "pattern": "SL"},
}


@pytest.fixture(scope="module", params=SHAPES)
def model(request):
    """Weights ten times the usual, so that the likeliest token leads clearly."""
    torch.manual_seed(0)
    model = build({"family": request.param, "vocab_size": VOCABULARY, "context": CONTEXT, "width": 32, **SHAPES[request.param]})
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(std=0.2)
    return model.eval()


def prompts_of(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def together(model, prompts, sampling=GREEDY, tokens=20):
    longest = max(map(len, prompts))
    padded = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
    rows = generate(model, padded, sampling, lengths=[len(prompt) for prompt in prompts])
    return torch.stack(list(islice(rows, tokens)), dim=1).tolist()


@torch.no_grad()
def by_hand(model, prompt, tokens=20):
    """Greedy decoding without a cache, one text at a time."""
    seen = torch.tensor([prompt])
    for _ in range(tokens):
        seen = torch.cat([seen, model(seen[:, -CONTEXT:])[:, -1].argmax(-1, keepdim=True)], dim=1)
    return seen[0, len(prompt) :].tolist()


@pytest.mark.parametrize("lengths", [(1, 5, 3), (2, 16, 9), (20, 3, 40), (7, 7)], ids=str)
@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_texts_of_a_batch_are_those_of_the_uncached_argmax(model, lengths, use_cache):
    prompts = prompts_of(*lengths)
    expected = [by_hand(model, prompt) for prompt in prompts]
    assert len({token for row in expected for token in row}) > 3
    assert together(model, prompts, replace(GREEDY, use_cache=use_cache)) == expected


def test_a_text_of_a_batch_is_drawn_as_it_would_be_alone_with_its_seed(model):
    prompts, sampling = prompts_of(2, 6, 4), Sampling(1.0, top_k=30, top_p=0.95, seeds=(7, 3, 9))
    rows = together(model, prompts, sampling)
    alone = [
        together(model, [prompt], replace(sampling, seeds=(seed,)))[0] for prompt, seed in zip(prompts, (7, 3, 9), strict=True)
    ]
    assert rows == alone


def test_a_cached_step_of_a_ragged_batch_computes_one_token_per_row(model):
    lengths = []
    plain = model.hidden
    model.hidden = lambda tokens, *rest: lengths.append(tokens.size(1)) or plain(tokens, *rest)
    try:
        together(model, prompts_of(2, 5), tokens=14)
    finally:
        del model.hidden
    assert lengths == [5, *[1] * 11, 16, 16]  # after the context every step computes the last 16 tokens


def test_a_model_of_ones_own_without_a_cache_continues_ragged_prompts(model):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, tokens, targets=None):
            return self.inner(tokens, targets)

    prompts = prompts_of(2, 5)
    assert together(Own(), prompts, tokens=9) == together(model, prompts, tokens=9)


def penalised_by_hand(model, prompt, penalty, tokens):
    """Greedy decoding in which what was written, and not what was given, is penalised."""
    seen, written = list(prompt), []
    for _ in range(tokens):
        with torch.no_grad():
            scores = model(torch.tensor([seen[-CONTEXT:]]))[0, -1].tolist()
        for token in set(written):
            scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
        written.append(max(range(VOCABULARY), key=scores.__getitem__))
        seen.append(written[-1])
    return written


def test_a_repetition_penalty_counts_what_was_written_and_not_the_prompt(model):
    prompts = prompts_of(3, 6)
    expected = [penalised_by_hand(model, prompt, 1.5, 12) for prompt in prompts]
    assert together(model, prompts, replace(GREEDY, repetition_penalty=1.5), tokens=12) == expected
    assert together(model, prompts, tokens=12) != expected


def test_a_large_repetition_penalty_lets_no_token_come_twice(model):
    for row in together(model, prompts_of(3, 6), replace(GREEDY, repetition_penalty=1e9), tokens=30):
        assert len(set(row)) == 30
