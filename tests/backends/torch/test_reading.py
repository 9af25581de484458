"""What a reader of a growing text computes, keeps, and reads again."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from ingot.backends.open import find_device
from ingot.backends.sampling import Sampling
from ingot.backends.torch import generate as reading
from ingot.backends.torch.collectives import Collectives
from ingot.backends.torch.generate import Reader, Step, generate, uniform_draws, write_texts
from ingot.backends.torch.inference import TorchInference
from ingot.config.loading import load_config
from ingot.data.tokenizers import NumberTokenizer
from ingot.inference.model import LoadedModel, Weights
from ingot.model.registry import build
from ingot.runtime.ranks import Ranks

torch.set_num_threads(1)

VOCABULARY, CONTEXT = 50, 16
GREEDY = Sampling(temperature=0.0)
SHAPES = {
    "gpt2": {"layers": 2, "heads": 2},
    "llama": {"layers": 2, "heads": 4, "kv_heads": 2},
    "golf": {"layers": 3, "heads": 4, "kv_heads": 2},
}


def make(family):
    """Weights ten times the usual, so that the likeliest token leads clearly."""
    torch.manual_seed(0)
    model = build({"family": family, "vocab_size": VOCABULARY, "context": CONTEXT, "width": 32, **SHAPES[family]})
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(std=0.2)
    return model.eval()


@pytest.fixture(scope="module", params=SHAPES)
def model(request):
    return make(request.param)


@pytest.fixture(scope="module")
def gpt2():
    return make("gpt2")


@pytest.fixture(autouse=True)
def record_here(monkeypatch):
    """A step that a GPU would record is computed as it is on a CPU: the same arithmetic, without the recording."""
    monkeypatch.setattr(reading, "RECORDS_ON", {"cuda", "cpu"})


def prompts_of(length, rows=2, seed=1):
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def continuation(model, prompts, sampling=GREEDY, tokens=30, **options):
    return torch.stack(list(islice(generate(model, prompts, sampling, **options), tokens)), dim=1)  # (B, tokens)


@torch.no_grad()
def half_by_half(model, prompts, tokens=30):
    """Greedy decoding without a cache: a full window is cut to its second half, and grows again."""
    window, written = prompts[:, -CONTEXT:], []
    for _ in range(tokens):
        if window.size(1) > CONTEXT:
            window = window[:, -CONTEXT // 2 :]
        written.append(model(window)[:, -1].argmax(-1, keepdim=True))
        window = torch.cat([window, written[-1]], dim=1)
    return torch.cat(written, dim=1)


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("length", [1, 5, 16, 17, 40])
def test_behind_the_context_half_of_the_window_is_kept_and_read_again(model, length, record):
    prompts = prompts_of(length)
    assert torch.equal(continuation(model, prompts, keep_half=True, record=record), half_by_half(model, prompts))


@pytest.mark.parametrize("keep_half", [False, True])
def test_steps_that_can_be_recorded_write_the_same(model, keep_half, monkeypatch):
    """Also while their buffers grow: 4, 8, 16 tokens."""
    monkeypatch.setattr(reading, "STEP_CAPACITY", 4)
    prompts, sampling = prompts_of(3), Sampling(temperature=1.0, top_k=20, seed=3)
    plain, recorded = (continuation(model, prompts, sampling, keep_half=keep_half, record=record) for record in (False, True))
    assert torch.equal(plain, recorded)


def test_reading_half_again_computes_little(model):
    lengths = []
    original = model.hidden
    model.hidden = lambda tokens, *rest: lengths.append(tokens.size(1)) or original(tokens, *rest)
    continuation(model, prompts_of(5), tokens=30, keep_half=True)
    del model.hidden
    assert lengths == [5, *[1] * 11, 8, *[1] * 8, 8, *[1] * 8]


def test_a_context_of_one_token_is_enough():
    model = build({"family": "gpt2", "vocab_size": 7, "context": 1, "width": 8, "layers": 1, "heads": 1})
    assert torch.equal(
        continuation(model, torch.ones(1, 1, dtype=torch.long), tokens=5, keep_half=True),
        continuation(model, torch.ones(1, 1, dtype=torch.long), sampling=replace(GREEDY, use_cache=False), tokens=5),
    )


def test_only_our_models_outside_of_autocast_are_recorded(gpt2, monkeypatch):
    def recorded(model):
        return Reader(model, 1, None, use_cache=True, record=True)._step is not None

    assert recorded(gpt2)
    with torch.autocast("cpu", torch.bfloat16):
        assert not recorded(gpt2)
    assert not recorded(torch.nn.Linear(2, 2))
    mine = type("Mine", (type(gpt2),), {"__module__": "mine"})(VOCABULARY, CONTEXT, layers=1, heads=2, width=32)
    assert not recorded(mine)
    monkeypatch.setattr(reading, "RECORDS_ON", {"cuda"})
    assert not recorded(gpt2)


def test_a_loaded_model_writes_with_recorded_steps(monkeypatch):
    model, read = make("gpt2"), Step.read
    steps = []
    monkeypatch.setattr(Step, "read", lambda self, new, held, *rest: steps.append(held) or read(self, new, held, *rest))
    config = load_config(python={"training": {"max_steps": 1}}, environment={}).config
    device = find_device("cpu")
    backend = TorchInference(model, VOCABULARY, device, "fp32", Collectives(Ranks(), device))
    loaded = LoadedModel(Weights(Path("run"), None, {}, {}, config), NumberTokenizer(VOCABULARY), backend)
    text = loaded.generate("3 1 4", tokens=6, temperature=0.0)
    assert steps == [3, 4, 5, 6, 7]
    assert text == loaded.generate("3 1 4", tokens=6, temperature=0.0, use_cache=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="recording needs a GPU")
def test_a_gpu_replays_what_it_would_compute(model):
    model, prompts = model.cuda(), prompts_of(5).cuda()
    try:
        plain, recorded = (continuation(model, prompts, tokens=60, keep_half=True, record=record) for record in (False, True))
    finally:
        model.cpu()
    assert torch.equal(plain, recorded)


def test_row_i_writes_what_a_single_text_writes_with_the_seed_plus_i(gpt2):
    prompts = prompts_of(5, rows=1)
    together = continuation(gpt2, prompts.expand(3, -1), Sampling(1.0, seed=7), keep_half=True)
    alone = [continuation(gpt2, prompts, Sampling(1.0, seed=7 + row), keep_half=True) for row in range(3)]
    assert torch.equal(together, torch.cat(alone))
    assert len({tuple(row.tolist()) for row in together}) == 3


def test_throws_are_spread_evenly():
    draws = uniform_draws(range(200), torch.device("cpu"))
    throws = torch.cat(list(islice(draws, 100)), dim=1)  # (200, 100)
    assert throws.min() >= 0 and throws.max() < 1
    assert abs(float(throws.mean()) - 0.5) < 0.01
    assert (throws.mean(dim=1) - 0.5).abs().max() < 0.15  # each row by itself
    assert len(throws.unique()) > 19_900


def written(model, texts=5, tokens=20, sampling=GREEDY, **options):
    return list(write_texts(model, [1, 2, 3], texts, tokens, sampling, **options))


def test_many_texts_are_written_in_turns_and_stay_the_same(gpt2, monkeypatch):
    expected, rows, original = written(gpt2, sampling=Sampling(1.0, seed=3)), [], gpt2.new_cache
    monkeypatch.setattr(reading, "TEXTS_AT_ONCE", 2)
    monkeypatch.setattr(gpt2, "new_cache", lambda count: rows.append(count) or original(count))
    assert written(gpt2, sampling=Sampling(1.0, seed=3)) == expected and rows == [2, 2, 1]
    assert len(expected) == 5 and all(len(text) == 20 for text in expected)


def test_no_tokens_are_no_text(gpt2):
    assert written(gpt2, texts=2, tokens=0) == [[], []]
    assert written(gpt2, texts=0) == []
