"""The forms of attention, and the attention of a model alone, by which kernels are timed."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ingot.backends.torch import tune as attention
from ingot.backends.torch.startup import _import_ahead
from ingot.backends.torch.tune import CUDNN_FLASH4, FLASH4, attention_alone, attention_form, candidates, use_form, use_kernels
from ingot.model.kernels.flash import library
from ingot.model.registry import FAMILIES

torch.set_num_threads(1)

CPU = torch.device("cpu")


def model_of(family, layers=1, **settings):
    return FAMILIES[family](vocab_size=50, context=16, layers=layers, heads=4, width=32, **settings)


def calls_of(monkeypatch, work):
    """The shapes of queries and keys of torch's attention in a call, and of the gradients of each of its passes."""
    calls, grads, plain, grad = [], [], F.scaled_dot_product_attention, torch.autograd.grad

    def noted(q, k, v, **settings):
        calls.append((tuple(q.shape), tuple(k.shape)))
        return plain(q, k, v, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", noted)
        patch.setattr(torch.autograd, "grad", lambda *inputs: grads.append(grad(*inputs)) or grads[-1])
        work()
    return calls, [[tuple(x.shape) for x in each] for each in grads]


@pytest.mark.parametrize("form", ["repeated", "grouped"])
@pytest.mark.parametrize(("family", "settings"), [("gpt2", {}), ("golf", {"kv_heads": 2}), ("llama", {"kv_heads": 2})])
def test_attention_alone_makes_the_calls_of_a_pass_of_the_model(monkeypatch, family, settings, form):
    model, tokens = model_of(family, layers=3, **settings), torch.randint(50, (5, 16))
    use_form(model, form)
    expected, _ = calls_of(monkeypatch, lambda: model(tokens, tokens).backward())
    for records in (False, True):  # without a GPU nothing is recorded
        again = attention_alone(model, 5, 16, "fp32", CPU, form, records)
        assert calls_of(monkeypatch, again)[0] == expected


@pytest.mark.parametrize("form", ["repeated", "flash4"])
def test_packing_three_gradients_is_a_part_of_what_is_timed(monkeypatch, form):
    passes = attention_alone(model_of("gpt2", layers=3), 5, 16, "fp32", CPU, form, False)
    assert calls_of(monkeypatch, passes)[1] == [[(5, 16, 3, 4, 8)]] * 3


@pytest.mark.parametrize(("enough", "times"), [(1, 1), (2 * 5 * 4 * 16**2, 2), (2**32, 3)])
def test_long_calls_are_timed_less_often_than_a_pass_makes_them(monkeypatch, enough, times):
    monkeypatch.setattr(attention, "ENOUGH_SCORES", enough)
    passes = attention_alone(model_of("golf", layers=3, kv_heads=2), 5, 16, "fp32", CPU, "repeated", False)
    assert len(calls_of(monkeypatch, passes)[0]) == times


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["gpt2", "golf"])
@pytest.mark.parametrize("form", ["repeated", "flash4"])
def test_on_a_gpu_calls_are_recorded(form, family):
    if form == "flash4":
        pytest.importorskip("flash_attn.cute.interface", reason="needs flash-attn-4")
    model = FAMILIES[family](vocab_size=50, context=256, layers=2, heads=12, width=768)
    again = attention_alone(model, 4, 256, "bf16", torch.device("cuda"), form, True)
    assert again.__name__ == "replay"
    again()
    torch.cuda.synchronize()


def test_grouped_heads_are_tried_where_there_are_fewer_of_keys():
    plain = ["cudnn", "flash", "efficient"]
    assert candidates(model_of("golf", kv_heads=2), True, False, list) == [*plain, *(f"{name}-grouped" for name in plain)]
    for alone in (True, False):
        assert candidates(model_of("gpt2"), alone, False, list) == candidates(nn.Linear(2, 2), alone, False, list) == plain


def test_flash_attention_of_a_package_is_tried_where_it_is_installed(monkeypatch):
    model = model_of("gpt2")
    assert FLASH4 not in candidates(model, True, False, list)
    monkeypatch.setattr(attention, "has_flash4", lambda: True)
    assert candidates(model, True, False, list) == ["cudnn", "flash", "efficient", FLASH4, CUDNN_FLASH4]
    assert candidates(model, False, True, list) == ["default", FLASH4], "documents"
    grouped = candidates(model_of("golf", kv_heads=2), True, False, list)
    assert FLASH4 in grouped and CUDNN_FLASH4 not in grouped, "cuDNN's pass is for as many heads of keys"
    whole = model_of("llama")
    assert CUDNN_FLASH4 in candidates(whole, True, False, list)
    use_kernels(whole, ["qkv"])
    assert CUDNN_FLASH4 not in candidates(whole, True, False, list), "whose forward pass is FlashAttention's"
    assert [attention_form(name) for name in (FLASH4, CUDNN_FLASH4)] == ["flash4", "cudnn-flash4"]
    assert FLASH4 not in candidates(model, False, False, list), "attention with dropout is not its"
    assert FLASH4 not in candidates(nn.Linear(2, 2), True, False, list), "a custom model calls torch"
    assert FLASH4 not in candidates(model, True, False, lambda mine: [1.0]), "another rank does not have it"


FAMILY_SETTINGS = [
    ("golf", {"kv_heads": 2}),
    ("llama", {"kv_heads": 2}),
    ("frontier", {"kv_heads": 2, "window": 5}),
    ("frontier", {"kv_heads": 2, "window": 99, "key_offset": False}),
    ("gpt2", {}),
]


@pytest.mark.parametrize(("family", "settings"), FAMILY_SETTINGS)
def test_a_model_computes_the_same_in_every_form_of_attention(family, settings):
    torch.manual_seed(1)
    model = FAMILIES[family](vocab_size=50, context=16, layers=6, heads=4, width=32, **settings)
    with torch.no_grad():
        for parameter in model.parameters():  # what ends a branch is zero at first
            parameter += 0.1 * torch.randn_like(parameter)
    tokens, losses, grads = torch.randint(50, (2, 16)), [], []
    for form in ("repeated", "grouped", "flash4", "cudnn-flash4"):
        use_form(model, form)
        model.zero_grad()
        losses.append(loss := model(tokens, tokens))
        loss.backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for loss, grad in zip(losses[1:], grads[1:], strict=True):
        torch.testing.assert_close(loss, losses[0])
        torch.testing.assert_close(grad, grads[0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("family", "settings"), FAMILY_SETTINGS)
def test_a_model_learns_the_same_by_where_documents_begin(family, settings):
    torch.manual_seed(1)
    model = FAMILIES[family](vocab_size=50, context=16, layers=6, heads=4, width=32, **settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    tokens, found = torch.randint(50, (3, 16)), []
    numbers = torch.tensor([[0] * 7 + [1] + [2] * 8, [0] * 16, [*range(15), 14]])
    starts = torch.tensor([0, 7, 8, 16, *range(32, 47), 48, 48, 48], dtype=torch.int32)
    for form, documents in (("repeated", numbers), ("flash4", numbers), ("flash4", starts), ("flash4", None)):
        use_form(model, form)
        model.zero_grad()
        loss = model(tokens, tokens, documents)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for other in found[1:3]:
        torch.testing.assert_close(other, found[0], atol=1e-5, rtol=1e-4)
    assert (found[3][0] - found[0][0]).abs() > 1e-3, "documents matter"


def test_the_gradient_of_the_one_matrix_for_queries_keys_and_values_comes_whole():
    model = FAMILIES["gpt2"](vocab_size=50, context=16, layers=1, heads=2, width=16)
    use_form(model, "flash4")
    tokens = torch.randint(50, (2, 16))
    with torch.profiler.profile() as seen:
        model(tokens, tokens).backward()
    called = {event.key: event.count for event in seen.key_averages() if event.key.startswith("ingot::")}
    assert called["ingot::packed_flash_attention_backward"] == 1


def test_where_documents_begin_is_refused_by_other_forms_and_with_a_cache():
    model = FAMILIES["gpt2"](vocab_size=50, context=16, layers=1, heads=2, width=16, dropout=0.1)
    tokens, starts = torch.randint(50, (1, 8)), torch.tensor([0, 3, 8], dtype=torch.int32)
    use_form(model, "flash4")
    with pytest.raises(ValueError, match="dropout"):
        model(tokens, tokens, starts)
    model.eval()
    assert model(tokens, tokens, starts).isfinite()
    cache = model.new_cache(1)
    model.hidden(tokens, cache)
    with pytest.raises(ValueError, match="cache"):
        model.hidden(tokens, cache, starts)
    use_form(model, "repeated")
    with pytest.raises(ValueError, match="flash4"):
        model(tokens, tokens, starts)


@pytest.mark.parametrize("window", [5, 99])
def test_flash_attention_leaves_documents_and_a_cache_to_masks(window):
    torch.manual_seed(1)
    model = FAMILIES["frontier"](vocab_size=50, context=16, layers=6, heads=4, width=32, window=window)
    tokens = torch.randint(50, (2, 16))
    documents = torch.arange(16).div(7, rounding_mode="floor").expand(2, 16)
    found = []
    for form in ("repeated", "flash4"):
        use_form(model, form)
        cache = model.new_cache(2)
        pieces = [model.logits(model.hidden(part, cache)) for part in (tokens[:, :9], tokens[:, 9:10], tokens[:, 10:])]
        found.append((model(tokens, tokens, documents), torch.cat(pieces, dim=1)))
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[1][1], model(tokens), atol=1e-5, rtol=1e-4)


def test_what_a_model_of_ones_own_calls_form_stays():
    mine = nn.Linear(2, 2)
    mine.form = "square"
    use_form(mine, "grouped")
    assert mine.form == "square"


@pytest.mark.parametrize(("source", "imported"), [("import os\nkept = os.environ[NAME]\n", True), ("1 / 0\n", False)])
def test_the_package_is_imported_ahead_and_keeps_what_it_compiles(tmp_path, monkeypatch, source, imported):
    folder = tmp_path / "flash_attn" / "cute"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").touch()
    name = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
    (folder / "interface.py").write_text(source.replace("NAME", repr(name)))
    monkeypatch.syspath_prepend(tmp_path)
    for variable in (name, "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"):
        monkeypatch.setenv(variable, "1")
        monkeypatch.delenv(variable)
    for module in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.delitem(sys.modules, module)
    library.cache_clear()
    _import_ahead(compiler=False, flash4=True)
    assert ("flash_attn.cute.interface" in sys.modules) == imported
    assert not imported or sys.modules["flash_attn.cute.interface"].kept == "1"
    library.cache_clear()
