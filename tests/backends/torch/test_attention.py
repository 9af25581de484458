"""Attention by itself: what a pass of a model asks for, and that it can be asked for again without the model."""

import sys
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ingot.backends.torch import tune as attention
from ingot.backends.torch.precision import CUDNN_FLASH4, FLASH4
from ingot.backends.torch.startup import _import_ahead
from ingot.backends.torch.tune import (
    Call,
    Operand,
    attention_form,
    candidates,
    enough,
    recorded_attention,
    replay,
    replayed,
    use_form,
    use_kernels,
)
from ingot.model.kernels.flash import library
from ingot.model.registry import FAMILIES

torch.set_num_threads(1)

MODEL = FAMILIES["gpt2"](vocab_size=50, context=16, layers=1, heads=2, width=16)


def calls_of(family, rows=1, form="repeated", **settings):
    model = FAMILIES[family](vocab_size=50, context=16, layers=3, heads=4, width=32, **settings)
    use_form(model, form)
    tokens = torch.randint(50, (rows, 16))
    with recorded_attention(model) as calls:
        model(tokens, tokens).backward()
    return calls


def test_calls_are_counted_by_their_shapes():
    ((call, times),) = calls_of("golf", kv_heads=2).items()
    assert times == 3
    assert [operand.sizes for operand in (call.query, call.key, call.value)] == [(4, 16, 8)] * 3


@pytest.mark.parametrize(("family", "packed"), [("gpt2", True), ("llama", False), ("golf", False)])
def test_what_one_product_gave_is_told_apart(family, packed):
    assert {call.packed for call in calls_of(family)} == {packed}


def test_parts_of_one_product_that_are_no_equal_heads_are_not_taken_for_it():
    product = torch.randn(2, 16, 24, requires_grad=True)
    for q, k, v in (product.chunk(3, dim=-1), [x[:, None] for x in product.split([8, 8, 8], dim=-1)]):
        with recorded_attention(nn.Module()) as calls:
            F.scaled_dot_product_attention(q, k, v if v.dim() == 3 else v[..., :4], is_causal=True, dropout_p=0.0)
        assert [call.packed for call in calls] == [False]


@pytest.mark.parametrize("form", ["repeated", "flash4"])
def test_bringing_three_gradients_together_is_a_part_of_what_is_timed(form, monkeypatch):
    made = []
    plain = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *given: made.append(plain(*given)) or made[-1])
    replay(calls_of("gpt2"), 5, torch.device("cpu"), form)
    assert [[tuple(grad.shape) for grad in grads] for grads in made] == [[(5, 16, 3, 4, 8)]] * 3


def test_attention_with_dropout_is_not_timed_by_itself():
    assert not calls_of("gpt2", dropout=0.1)
    assert calls_of("gpt2", dropout=0.0).total() == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU records them")
@pytest.mark.parametrize("records", [False, True])
def test_calls_that_cannot_be_recorded_are_made_again_one_by_one(records):
    calls = calls_of("gpt2")
    with recorded_attention(nn.Module()) as first:
        again = replayed(calls, 5, torch.device("cpu"), "repeated", records)
    with recorded_attention(nn.Module()) as second:
        again()
    assert calls and first == second == calls


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", ["repeated", "flash4"])
def test_on_a_gpu_calls_are_recorded(form, packed):
    if form == "flash4":
        pytest.importorskip("flash_attn.cute.interface", reason="needs flash-attn-4")
    operand = Operand((12, 256, 64), (0, 1, 2, 3), torch.bfloat16)
    again = replayed(Counter({Call(operand, operand, operand, packed): 2}), 4, torch.device("cuda"), form, True)
    assert again.__name__ == "replay" and not isinstance(again, partial)
    again()
    torch.cuda.synchronize()


def test_a_replay_makes_the_same_calls_for_other_rows():
    calls = calls_of("gpt2")
    with recorded_attention(nn.Module()) as again:
        replay(calls, 5, torch.device("cpu"))
    assert again == calls
    seen = []
    plain = F.scaled_dot_product_attention
    try:
        F.scaled_dot_product_attention = lambda q, k, v, **how: seen.append(q) or plain(q, k, v, **how)
        replay(calls, 5, torch.device("cpu"))
    finally:
        F.scaled_dot_product_attention = plain
    assert [tuple(q.shape) for q in seen] == [(5, 4, 16, 8)] * 3
    ((operands, _),) = calls.items()
    assert all(sorted(range(4), key=q.stride, reverse=True) == list(operands[0].order) for q in seen)


def test_long_calls_are_timed_less_often_than_a_pass_makes_them():
    def operands(length):
        return Call(*[Operand((8, length, 64), (0, 2, 1, 3), torch.bfloat16)] * 3, packed=False)

    golf, mixed, small = {operands(4096): 9}, {operands(1024): 2, operands(512): 8}, {operands(64): 12}
    assert list(enough(golf, 96).values()) == [1]
    assert list(enough(mixed, 256).values()) == [1, 4]  # half of what a pass has
    assert enough(small, 12) == small and not enough({}, 12)


@pytest.mark.parametrize("family", ["golf", "llama"])
def test_keys_and_values_can_be_given_with_the_heads_they_have(family):
    (((query, key, value, _), times),) = calls_of(family, kv_heads=2, form="grouped").items()
    assert times == 3 and query.sizes == (4, 16, 8) and key.sizes == value.sizes == (2, 16, 8)


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


def test_grouped_heads_are_tried_where_there_are_fewer_of_keys():
    assert candidates(MODEL, calls_of("golf", kv_heads=2, form="grouped"), False, list) == [
        "cudnn", "flash", "efficient", "cudnn-grouped", "flash-grouped", "efficient-grouped",
    ]  # fmt: skip
    assert (
        candidates(MODEL, calls_of("gpt2"), False, list) == ["cudnn", "flash", "efficient"] == candidates(MODEL, {}, False, list)
    )


def test_flash_attention_of_a_package_is_tried_where_it_is_installed(monkeypatch):
    calls = calls_of("gpt2")
    assert FLASH4 not in candidates(MODEL, calls, False, list)
    monkeypatch.setattr(attention, "has_flash4", lambda: True)
    assert candidates(MODEL, calls, False, list) == ["cudnn", "flash", "efficient", FLASH4, CUDNN_FLASH4]
    grouped = candidates(MODEL, calls_of("golf", kv_heads=2, form="grouped"), False, list)
    assert FLASH4 in grouped and CUDNN_FLASH4 not in grouped, "cuDNN's pass is for as many heads of keys"
    whole = FAMILIES["llama"](vocab_size=50, context=16, layers=1, heads=2, width=16)
    assert CUDNN_FLASH4 in candidates(whole, calls, False, list)
    use_kernels(whole, ["qkv"])
    assert CUDNN_FLASH4 not in candidates(whole, calls, False, list), "whose forward pass is FlashAttention's"
    assert [attention_form(name) for name in (FLASH4, CUDNN_FLASH4)] == ["flash4", "cudnn-flash4"]
    assert FLASH4 not in candidates(MODEL, {}, False, list), "calls that are not known might not be its"
    assert FLASH4 not in candidates(nn.Linear(2, 2), calls, False, list), "a model of one's own calls torch"
    assert FLASH4 not in candidates(MODEL, calls, False, lambda mine: [1.0]), "another rank does not have it"


def test_what_a_model_of_ones_own_calls_form_stays():
    mine = nn.Linear(2, 2)
    mine.form = "square"
    use_form(mine, "grouped")
    assert mine.form == "square"


@pytest.mark.parametrize("form", ["repeated", "grouped"])
def test_a_replay_repeats_keys_and_values_unless_they_are_grouped(form, monkeypatch):
    calls, heads, plain = calls_of("golf", kv_heads=2, form="grouped"), [], F.scaled_dot_product_attention

    def noted(q, k, v, **how):
        heads.append(k.size(1))
        return plain(q, k, v, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    replay(calls, 2, torch.device("cpu"), form)
    assert heads == [2 if form == "grouped" else 4] * 3


def test_torch_has_its_own_function_back():
    plain = F.scaled_dot_product_attention
    calls_of("gpt2")
    assert F.scaled_dot_product_attention is plain


@pytest.mark.parametrize("how", [{"enable_gqa": True}, {}])
def test_fewer_heads_of_a_model_of_ones_own_are_left_to_whole_passes(how):
    class Mine(nn.Module):
        def forward(self, q, k):
            F.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=0.0)
            return F.scaled_dot_product_attention(q, k, k, is_causal=True, dropout_p=0.0, **how)

    q, k, mine = torch.randn(1, 4, 8, 8), torch.randn(1, 1, 8, 8), Mine()
    expected = mine(q, k)
    with recorded_attention(mine) as calls:
        found = mine(q, k)
    assert not calls
    torch.testing.assert_close(found, expected)


def test_a_pass_that_is_recorded_asks_no_kernel_to_group_heads():
    asked = []
    plain = F.scaled_dot_product_attention
    try:
        F.scaled_dot_product_attention = lambda *operands, **how: asked.append(how) or plain(*operands, **how)
        calls = calls_of("golf", kv_heads=2, form="grouped")
    finally:
        F.scaled_dot_product_attention = plain
    assert asked and not any("enable_gqa" in how for how in asked)
    assert {call.key.sizes[0] for call in calls} == {2}


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
