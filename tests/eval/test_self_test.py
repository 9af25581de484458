"""The self-test of scores: every family passes it, and whatever would make a score better than it is fails it."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from ingot.backends.torch.collectives import Collectives
from ingot.backends.torch.device import find_torch_device
from ingot.backends.torch.inference import TorchInference
from ingot.data.tokenizers import ByteTokenizer
from ingot.eval.evaluator import Evaluator
from ingot.eval.self_test import self_test
from ingot.model.registry import FAMILIES, build
from ingot.runtime.ranks import Ranks

VOCABULARY, LENGTH = 260, 24
SHAPES = {"frontier": {"window": 5, "kv_heads": 1}, "golf": {"kv_heads": 1}, "llama": {}, "gpt2": {}}
ONCE, FUTURE, LOSSES, SUM = (
    "every token is scored once",
    "predictions depend only on earlier tokens",
    "losses match the model's probabilities",
    "probabilities sum to one",
)


class Tokens:
    """A split in memory."""

    def __init__(self, tokens):
        self.ids = np.random.default_rng(1).integers(0, 256, tokens).astype(np.uint16)
        self.tokens, self.bytes, self.piece_bytes = tokens, 0, None

    def read(self, start, stop):
        return self.ids[start:stop]


def backend_of(model):
    device = find_torch_device("cpu", 0)
    return TorchInference(model.eval(), VOCABULARY, device, "fp32", Collectives(Ranks(), device))


def evaluator_of(tokens=101, stride=LENGTH, kind=Evaluator, **more):
    return kind(Tokens(tokens), ByteTokenizer(), LENGTH, stride, 4, **more)


def failed(model, evaluator=None, rows=VOCABULARY):
    backend = backend_of(model)
    checks = self_test(evaluator or evaluator_of(), backend.score, backend.score_rows, VOCABULARY, rows)
    assert [check.name for check in checks] == [ONCE, FUTURE, LOSSES, SUM]
    return [check.name for check in checks if not check.passed]


def family_model(family, rows=VOCABULARY):
    torch.manual_seed(0)
    settings = {"family": family, "vocab_size": rows, "context": LENGTH, "layers": 2, "heads": 2, "width": 16}
    model = build({**settings, **SHAPES[family]})
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape)
    return model


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize(("tokens", "stride"), [(101, LENGTH), (101, 7), (10, 3), (97, 1)])
def test_every_family_is_scored_as_it_must_be(family, tokens, stride):
    assert failed(family_model(family), evaluator_of(tokens, stride)) == []


def test_rows_of_a_head_that_stand_for_no_token_may_have_a_share():
    assert failed(family_model("frontier", 384), rows=384) == []
    assert failed(family_model("frontier", 384)) == [SUM]


class Plain(nn.Module):
    """A model of one's own: the embedding, mixed with what `seen` makes of all of it."""

    def __init__(self, seen=lambda x: torch.zeros_like(x)):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.seen = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY), seen

    def scores(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.seen(x))

    def forward(self, tokens, targets=None):
        scores = self.scores(tokens)
        return (
            scores if targets is None else nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=-1)
        )


class Peeking(Plain):
    """Its loss knows the target."""

    def forward(self, tokens, targets=None):
        scores = self.scores(tokens)
        if targets is None:
            return scores
        hint = nn.functional.one_hot(targets.clamp(min=0), VOCABULARY)
        return nn.functional.cross_entropy((scores + hint).flatten(0, 1), targets.flatten(), ignore_index=-1)


def test_a_model_of_ones_own_passes():
    assert failed(Plain()) == []


def test_a_model_that_sees_the_next_token_or_the_whole_row_is_found_out():
    assert failed(Plain(lambda x: torch.roll(x, -1, 1))) == [FUTURE, LOSSES]
    assert FUTURE in failed(Plain(lambda x: x.mean(1, keepdim=True).expand_as(x)))


def test_a_loss_that_knows_its_target_is_found_out():
    assert failed(Peeking()) == [LOSSES]


def test_probabilities_that_sum_to_more_are_found_out():
    backend = backend_of(Plain())

    @dataclass
    class Louder:
        chosen: np.ndarray
        top: np.ndarray

    def louder(rows, firsts, top):
        return [Louder(one.chosen, one.top + 0.1) for one in backend.score_rows(rows, firsts, top)]

    checks = self_test(evaluator_of(), backend.score, louder, VOCABULARY, VOCABULARY)
    assert [check.name for check in checks if not check.passed] == [SUM]


@pytest.mark.parametrize("mistake", ["again", "skipped", "shifted"])
def test_rows_that_score_a_token_twice_or_never_are_found_out(monkeypatch, mistake):
    fill = Evaluator._fill

    def wrong(self, line, row):
        fill(self, line, row)
        if mistake == "shifted":
            line[0, 1:] = line[0, :-1].copy()
        elif row:
            line[1, 0] = line[0, 1] if mistake == "again" else line[1, 0]
            line[1, -1] = line[1, -1] if mistake == "again" else -1

    monkeypatch.setattr(Evaluator, "_fill", wrong)
    assert ONCE in failed(Plain(), evaluator_of(stride=7))


def test_a_last_row_that_is_left_out_is_no_mistake():
    assert failed(Plain(), evaluator_of(whole_rows=True)) == []
