"""Models compiled block by block; what the compiler is given is counted, not compiled."""

import copy

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from ingot.backends.torch import compile as regions
from ingot.backends.torch.build import checkpoint_blocks
from ingot.backends.torch.compile import CompiledBlocks, compiled
from ingot.errors import ConfigError
from ingot.model import frontier
from ingot.model.registry import FAMILIES

torch.set_num_threads(1)


@pytest.fixture
def graphs(monkeypatch):
    """The forward graphs that were compiled."""
    torch._dynamo.reset()
    seen = []

    def compiler(graph, inputs):
        seen.append(graph)
        return graph.forward

    plain = torch.compile
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=lambda graph, inputs: graph.forward)
    monkeypatch.setattr(regions.torch, "compile", lambda function, **how: plain(function, backend=backend, **how))
    yield seen
    torch._dynamo.reset()


def make(family, layers=5):
    torch.manual_seed(0)
    return FAMILIES[family](vocab_size=50, context=16, layers=layers, heads=4, width=16)


def gradients(call, model, tokens):
    model.zero_grad()
    call(tokens, tokens).backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("family", "compiled"),
    # golf's first block reads the same tensor twice; frontier's begin in two ways (values) and have two attentions
    [("gpt2", 2), ("golf", 3), ("frontier", 6)],
)
def test_equal_blocks_are_compiled_once_and_learn_the_same(graphs, family, compiled):
    model, tokens = make(family), torch.randint(50, (2, 16))
    whole = copy.deepcopy(model)
    parts = CompiledBlocks(model)
    for found, expected in zip(gradients(parts, model, tokens), gradients(whole, whole, tokens), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert len(graphs) == compiled
    gradients(parts, model, tokens)
    assert len(graphs) == compiled


def test_rows_of_another_length_are_new_to_the_attention_of_the_frontier_alone(graphs):
    model, tokens = make("frontier", layers=2), torch.randint(50, (2, 16))
    parts = CompiledBlocks(model)
    gradients(parts, model, tokens)
    before = len(graphs)
    found = gradients(parts, model, tokens.view(4, 8))
    assert len(graphs) == before + 2  # layers that see the whole row, and those that see a window
    for one, expected in zip(found, gradients(model, model, tokens.view(4, 8)), strict=True):
        torch.testing.assert_close(one, expected, atol=1e-6, rtol=1e-5)


def test_blocks_that_are_recomputed_learn_the_same(graphs):
    model, tokens = make("frontier", layers=2), torch.randint(50, (2, 16))
    expected = gradients(model, model, tokens)
    checkpoint_blocks(model, every=2)
    for found, one in zip(gradients(CompiledBlocks(model), model, tokens), expected, strict=True):
        torch.testing.assert_close(found, one, atol=1e-6, rtol=1e-5)
    assert graphs


def test_the_model_called_by_its_own_name_is_not_compiled(graphs):
    model = make("gpt2")
    CompiledBlocks(model)
    gradients(model, model, torch.randint(50, (3, 16)))
    assert not graphs


def test_a_model_without_blocks_is_told():
    with pytest.raises(ConfigError, match=r"training\.compile=blocks needs a model with `blocks`"):
        CompiledBlocks(torch.nn.Linear(2, 2))


@torch.no_grad()
@pytest.mark.parametrize(("blocks", "graphs"), [(False, 2), (True, 7)])
def test_masks_of_rows_are_made_outside_of_graphs_and_rows_of_a_length_compiled_once(monkeypatch, blocks, graphs):
    torch._dynamo.reset()
    model = FAMILIES["frontier"](vocab_size=50, context=32, layers=2, heads=1, width=16, kv_heads=1, window=4)
    for block in model.blocks:
        block.attn.o.weight.normal_()
    batches = [torch.randint(50, shape) for shape in ((2, 32), (4, 16), (2, 32))]
    plain, seen, compile_it = [model(tokens) for tokens in batches], [], torch.compile
    monkeypatch.setattr(frontier, "flex_supported", lambda *_: True)
    backend = lambda graph, inputs: seen.append(graph.code) or graph.forward  # noqa: E731
    monkeypatch.setattr(regions.torch, "compile", lambda function, **how: compile_it(function, backend=backend, **how))
    module = compiled(model, nested=True, stages=1, blocks=blocks)
    for tokens, expected in zip(batches, plain, strict=True):
        torch.testing.assert_close(module(tokens), expected, atol=1e-5, rtol=1e-4)
    assert len(seen) == graphs and not any("vmap" in code for code in seen)
    assert sum("flex_attention" in code for code in seen) == 2
    torch._dynamo.reset()
