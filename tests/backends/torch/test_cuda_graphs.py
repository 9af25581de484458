"""Passes as CUDA graphs (`training.cuda_graphs`): what they need, and that a run learns what it learns without them."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch_kit import by_name, make, rows_of, take

from ingot.backends.torch import backend as backends
from ingot.backends.torch.compile import MAX_RECORDED_WEIGHTS, begin_pass, uses_cuda_graphs
from ingot.config.schema import Config
from ingot.errors import ConfigError
from ingot.runtime.ranks import Ranks

MODEL = {"family": "golf", "layers": 2, "heads": 4, "kv_heads": 2, "width": 64}


def config(**training):
    return Config(model=MODEL, training={"max_steps": 1, "cuda_graphs": True, **training})


def test_they_are_recorded_on_cuda_where_they_are_asked_for():
    assert uses_cuda_graphs(config(), 64, True, on_cuda=True, ranks=Ranks())
    assert not uses_cuda_graphs(config(), 64, True, on_cuda=False, ranks=Ranks())
    assert not uses_cuda_graphs(config(cuda_graphs=False), 64, True, on_cuda=True, ranks=Ranks())


def auto(compiles=True, world_size=1, data=None, model=MODEL, vocab_size=64, **training):
    found = Config(model=model, data=data or {}, training={"max_steps": 1, "cuda_graphs": "auto", **training})
    return uses_cuda_graphs(found, vocab_size, compiles, on_cuda=True, ranks=Ranks(world_size=world_size))


def test_auto_records_short_steps_that_are_all_alike():
    assert auto(tokens_per_step=32768)
    assert not auto(tokens_per_step=65536)
    assert not auto(tokens_per_step=32768, vocab_size=MAX_RECORDED_WEIGHTS // 64)
    assert not auto(compiles=False)
    assert not auto(compile="blocks")
    assert not auto(world_size=2)
    assert not auto(deterministic=True)
    assert not auto(data={"document_mask": True})
    assert not auto(stages=[{"share": 0.5}, {"share": 0.5}])
    assert not auto(model={"family": "file", "file": "mine.py"})


def test_what_cannot_be_recorded_is_refused():
    with pytest.raises(ConfigError, match="needs a model that is compiled as a whole"):
        uses_cuda_graphs(config(compile=False), 64, False, on_cuda=True, ranks=Ranks())
    with pytest.raises(ConfigError, match="needs a model that is compiled as a whole"):
        uses_cuda_graphs(config(compile="blocks"), 64, True, on_cuda=True, ranks=Ranks())
    with pytest.raises(ConfigError, match="works on one GPU only"):
        uses_cuda_graphs(config(), 64, True, on_cuda=True, ranks=Ranks(rank=0, world_size=2))


def test_gradients_of_a_pass_are_copied_before_the_next_one_adds_to_them(monkeypatch):
    backend = make(MODEL, micro_batch=2)
    plain = [found.loss for found in take(backend, 2)]
    backend = make(MODEL, micro_batch=2)
    backend._cuda_graphs, copied = True, []

    def begun(parameters):
        assert all(p.grad is not None for p in parameters)
        before = [p.grad for p in parameters if p.grad is not None]
        begin_pass(parameters)
        after = [p.grad for p in parameters if p.grad is not None]
        assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in zip(before, after, strict=True))
        copied.append(len(after))

    monkeypatch.setattr(backends, "begin_pass", begun)
    assert [found.loss for found in take(backend, 2)] == plain
    parameters = len(list(backend.model.parameters()))
    assert copied == [0, parameters, 0, 0] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("optimizer", "training"),
    [
        ({"name": "muon", "ema_decay": 0.9}, {"micro_batch": 7}),
        ({"name": "adamw", "clip_norm": 1.0}, {"micro_batch": 3}),
        ({"name": "adamw"}, {"micro_batch": 3, "precision": "fp16"}),
        ({"name": "muon"}, {"micro_batch": 7, "gradient_checkpointing": True, "loss_chunk": 16}),
    ],
)
def test_a_recorded_run_learns_what_one_that_is_not_does(optimizer, training):
    losses = []
    for recorded in (False, True):
        asked = {"device": "cuda", "precision": "bf16", "compile": True, "cuda_graphs": recorded}
        backend = make(MODEL, optimizer, **asked | training)
        losses.append([found.loss for found in take(backend, 12)])
    assert losses[1] == pytest.approx(losses[0], abs=2e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("model", [{"family": "gpt2"}, {"family": "llama"}, {"family": "frontier", "window": 4, "pattern": "SL"}])
def test_every_family_is_recorded_by_auto_and_evaluated_as_one_that_is_not(model):
    found = []
    for graphs in (False, "auto"):
        backend = make(
            {"layers": 2, "heads": 4, "width": 64} | model, device="cuda", precision="bf16", compile=True, cuda_graphs=graphs
        )
        assert backend._cuda_graphs == bool(graphs)
        counters["inductor"].clear()
        before = [r.loss for r in take(backend, 4)]
        scores = [backend.score(rows) / rows[:, 1].size for rows in (rows_of(90), rows_of(91, 3))]
        found.append([*before, *scores, *(r.loss for r in take(backend, 4, first=4))])
        assert not counters["inductor"]["cudagraph_skips"]
    assert found[1] == pytest.approx(found[0], abs=2e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_recorded_run_with_dropout_goes_on_with_the_masks_of_the_one_before():
    def begun():
        model = {"family": "gpt2", "layers": 2, "heads": 2, "width": 64, "dropout": 0.2}
        return make(model, device="cuda", precision="bf16", micro_batch=7, compile=True, cuda_graphs=True)

    first, second = begun(), begun()
    take(first, 4)
    second.load(by_name(first.snapshot()()))
    continued, whole = ([found.loss for found in take(backend, 4, first=4)] for backend in (second, first))
    assert continued[0] == whole[0], "the same masks, to the bit"
    assert continued == pytest.approx(whole, abs=2e-4)  # a GPU adds up gradients of an embedding in any order
