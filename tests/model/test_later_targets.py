"""`training.later_targets`: the same logits also learn to predict the tokens after the next one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from model_kit import SHAPES, assert_same, gradients, make, tokens_of

from ingot.model.cross_entropy import IGNORED


@pytest.mark.parametrize("family", SHAPES)
def test_the_loss_is_that_of_the_next_token_and_the_gradient_that_of_all(family):
    model = make(family)
    tokens = tokens_of()
    x, y = tokens[:, :-1], tokens[:, 1:].clone()
    y[1, 3] = IGNORED
    plain = model(x, y).item()
    model.later_weights, model.later_scale = (0.5, 0.25), torch.tensor(0.8)
    found = gradients(model, x, y)
    assert model(x, y).item() == pytest.approx(plain, rel=1e-6)
    with torch.no_grad():
        assert model(x, y).item() == pytest.approx(plain, rel=1e-6)

    model.zero_grad()
    logits = model(x).float().flatten(0, 1)
    first, following = y.flatten(), torch.cat([y, torch.full((2, 2), IGNORED)], 1)
    next_loss = total = F.cross_entropy(logits, first, ignore_index=IGNORED)
    for k, weight in ((1, 0.5), (2, 0.25)):
        later = following[:, k : k + y.size(1)].flatten()
        both = (later != IGNORED) & (first != IGNORED)  # elsewhere, the next target takes the place of the later one
        more = F.cross_entropy(logits[both], later[both]) - F.cross_entropy(logits[both], first[both])
        total = total + 0.8 * weight * (next_loss + more)
    total.backward()
    assert_same(found, {name: p.grad for name, p in model.named_parameters()}, atol=1e-5, rtol=1e-4)


def test_one_graph_of_the_loss_serves_all_weights_of_later_targets():
    model = make("frontier", window=64)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    tokens = tokens_of()
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    model.later_weights, model.later_scale = (0.5,), torch.zeros(())
    step = torch.compile(model, backend=backend, dynamic=False)
    for scale in (1.0, 0.5, 0.25):
        model.later_scale.fill_(scale)
        assert_same(
            {name.removeprefix("_orig_mod."): grad for name, grad in gradients(step, x, y).items()},
            gradients(model, x, y),
            atol=1e-6,
        )
    assert len(graphs) == 1
