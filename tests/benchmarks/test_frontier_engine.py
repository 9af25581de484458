"""The engine's frontier family and recipes compute what the bench does that found them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from frontier.arms import TOY, TOY_A
from frontier.model import Frontier as BenchModel
from frontier.optimizer import Optimizer as BenchOptimizer

from ingot.backends.open import open_backend
from ingot.config.loading import load_config
from ingot.runtime.ranks import Ranks
from ingot.train.step_plan import Position, plan_step

CPU, VOCABULARY, LENGTH, ROWS, STEPS = torch.device("cpu"), 40, 32, 4, 10
NEW = {"layers": 5, "pattern": "SSL", "rope_part": 0.5, "key_offset": True, "tokens": ROWS * LENGTH, "rows": (LENGTH,)}
BY_WIDTH = math.sqrt(768 / TOY.width)  # by which the bench scales the rates that the recipe has as they are
ARMS = {
    "golf/frontier": replace(TOY, **NEW),
    "frontier": replace(TOY_A, **NEW, embedding_rate=0.9859 / BY_WIDTH, head_rate=0.005477 / BY_WIDTH),
}
PARTS = {"embedding": "embedding.weight", "head": "lm_head.weight", "mix_x": "mix_x", "mix_x0": "mix_x0"}


def engine_name(name):
    """The engine's name of a weight of the bench."""
    layer, _, part = name.rpartition(".")
    inside = PARTS.get(part) or f"{'mlp' if part in ('fc', 'down') else 'attn'}.{part}.weight"
    return f"blocks.{layer}.{inside}" if layer else inside


@pytest.fixture(scope="module", params=ARMS)
def pair(request):
    """The bench's model and the engine's with the recipe's settings and the same weights, whose zeros are drawn too."""
    arm = ARMS[request.param]
    shape = {
        "layers": arm.layers, "heads": arm.heads, "width": arm.width, "kv_heads": arm.kv_heads, "window": arm.window,
        "pattern": arm.pattern,
    }  # fmt: skip
    changed = {f"model.{name}": value for name, value in shape.items()} | {
        "data.seq_len": LENGTH, "training.tokens_per_step": ROWS * LENGTH, "training.stages": [], "training.max_steps": STEPS,
        "budget.seconds": None, "training.device": "cpu", "training.threads": 1,
    }  # fmt: skip
    config = load_config(request.param, python=changed, environment={}).config
    backend = open_backend(config, VOCABULARY, Ranks())
    bench = BenchModel(arm, VOCABULARY, CPU)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, p in bench.named_parameters():
            if len(p.unique()) == 1:
                p += 0.02 * torch.randn(p.shape, generator=generator)
    backend.model.load_state_dict({engine_name(name): p.detach() for name, p in bench.named_parameters()})
    return arm, bench, config, backend


def rows_of(step):
    windows = np.random.default_rng(step).integers(0, VOCABULARY, (ROWS, LENGTH + 1), dtype=np.int32)
    return np.stack([windows[:, :-1], windows[:, 1:]], axis=1)  # (ROWS, 2, LENGTH)


def logits_apart(bench, backend):
    tokens = torch.from_numpy(rows_of(99)[:, 0]).long()
    with torch.no_grad():
        return (bench.logits(tokens) - backend.model(tokens)).abs().max().item()


def test_logits_and_ten_steps_of_a_recipe_are_those_of_the_bench(pair):
    arm, bench, config, backend = pair
    assert logits_apart(bench, backend) < 1e-5
    optimizer = BenchOptimizer(arm, bench.named_parameters())
    backend.tune([(plan_step(config, Position()), rows_of(0))], {})
    losses, start = [], {name: p.detach().clone() for name, p in bench.named_parameters()}
    for step in range(STEPS):
        batch = rows_of(step)
        tokens, targets = torch.from_numpy(batch).long().unbind(1)
        loss = bench.losses(tokens, targets).mean()
        loss.backward()
        optimizer.step(step, step / STEPS)
        done = backend.step(batch, ROWS * LENGTH, plan_step(config, Position(step))).result()
        losses.append((loss.item(), done.loss))
    ours, theirs = np.array(losses).T
    np.testing.assert_allclose(ours, theirs, atol=3e-5)  # the bench sums its loss in another order
    assert logits_apart(bench, backend) < 1e-3
    for name, p in bench.named_parameters():
        found = dict(backend.model.named_parameters())[engine_name(name)]
        # On average and of the way: where an update is nearly zero, its sign, which decides about the decay, is one of rounding.
        assert (found - p).abs().mean() < 5e-3 * (p - start[name]).abs().mean(), name
