import copy
import inspect
import sys
from dataclasses import replace
from itertools import islice

import pytest
import torch
from model_kit import CONTEXT, SHAPES, VOCABULARY, assert_same, gradients, make, new, tokens_of
from torch import nn

from ingot.backends.sampling import Sampling
from ingot.backends.torch.build import checkpoint_blocks
from ingot.backends.torch.generate import generate
from ingot.config.schema import FAMILIES as SECTIONS
from ingot.model.gpt2 import GPT2
from ingot.model.registry import FAMILIES, build

torch.set_num_threads(1)

family = pytest.mark.parametrize("family", sorted(FAMILIES))
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-2}  # GPUs may multiply in TF32
LENGTHS = [[5, 9, 1, 17], [20, 12]]  # of the documents in two rows


def numbers_of(lengths):
    """Each token's document: (B, T)."""
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths])


def spans_of(lengths):
    """(row, start, end) of every document."""
    ends = [torch.tensor(row).cumsum(0).tolist() for row in lengths]
    return [(r, end - n, end) for r, row in enumerate(lengths) for n, end in zip(row, ends[r], strict=True)]


@family
def test_every_setting_of_a_family_is_read_by_its_model(family):
    source = inspect.getsource(sys.modules[FAMILIES[family].__module__])
    derived = inspect.getsource(SECTIONS[family])  # numbers that settings give by a property
    for name in set(SECTIONS[family].model_fields) - {"family", "vocab_size", "context"}:
        assert f"s.{name}" in source or f"self.{name}" in derived, name


@family
def test_a_model_refuses_a_setting_that_its_family_does_not_have(family):
    with pytest.raises(ValueError, match="depth"):
        FAMILIES[family](VOCABULARY, CONTEXT, depth=3)


def test_a_model_built_on_one_of_ours_is_given_the_settings_of_its_family(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from ingot.model.golf import Golf\nclass Model(Golf):\n    pass\n")
    section = SECTIONS["file"](file=str(path), layers=1, heads=2, width=8, settings={"kv_heads": 1}).model_dump()
    model = build({**section, "vocab_size": 10, "context": 8})
    assert (len(model.blocks), model.kv_heads) == (1, 1)


@family
def test_a_family_is_built_from_its_settings(family):
    settings = SECTIONS[family](family=family, layers=1, heads=4, width=16).model_dump()
    with torch.device("meta"):
        model = build({**settings, "vocab_size": 10, "context": 8})
        assert model(torch.zeros(1, 8, dtype=torch.long)).shape == (1, 8, 10)


@family
@torch.no_grad()
@pytest.mark.parametrize("place", [0, 1, 17, 31])
def test_a_token_changes_no_logits_before_it(family, place):
    model, tokens = make(family), tokens_of()
    changed = tokens.clone()
    changed[:, place] = (changed[:, place] + 1) % VOCABULARY
    difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))  # (T)
    assert (difference[:place] < 1e-6).all()
    assert (difference[place:] > 1e-6).all()


@family
@torch.no_grad()
@pytest.mark.parametrize("pieces", [[32], [1] * 32, [5, 1, 9, 1, 16]])
def test_tokens_fed_piece_by_piece_through_a_cache_give_the_logits_of_all_at_once(family, pieces):
    model, tokens = make(family), tokens_of()
    cache = model.new_cache(2)
    parts = [model.logits(model.hidden(piece, cache)) for piece in tokens.split(pieces, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama", "golf", "frontier"])
def test_a_cache_holds_only_the_heads_of_keys_and_values(family):
    cache = make(family, heads=4, kv_heads=1).new_cache(3)
    assert cache[0].keys.shape == cache[0].values.shape == (3, 1, CONTEXT, 12)
    assert len(cache) == SHAPES[family]["layers"]


@pytest.mark.parametrize("settings", [{"kv_heads": None}, {"kv_heads": 2}, {"kv_heads": 1}])
@pytest.mark.parametrize("family", ["llama", "golf", "frontier"])
def test_greedy_text_is_the_same_with_and_without_a_cache(family, settings):
    model, prompts = make(family, tied=False, **settings), tokens_of(length=4)
    greedy = Sampling(temperature=0.0)
    texts = [torch.stack([*islice(generate(model, prompts, replace(greedy, use_cache=cached)), 40)]) for cached in (True, False)]
    assert torch.equal(*texts)
    assert len(texts[0].unique()) > 3


@torch.no_grad()
def test_a_golf_model_with_a_bf16_stream_generates_through_its_cache():
    model, tokens = make("golf", embedding_dtype="bf16"), tokens_of()
    cache = model.new_cache(2)
    assert cache[0].keys.dtype is torch.bfloat16
    parts = [model.logits(model.hidden(piece, cache)) for piece in tokens.split(8, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), atol=0.1, rtol=0)


@family
@torch.no_grad()
def test_more_tokens_than_the_context_are_refused(family):
    model = make(family)
    with pytest.raises(ValueError, match="33 tokens do not fit into a context of 32"):
        model(tokens_of(length=33))
    cache = model.new_cache(2)
    model.hidden(tokens_of(), cache)
    with pytest.raises(ValueError, match="33 tokens do not fit"):
        model.hidden(tokens_of(length=1), cache)


def alone(model, tokens, start):
    """Logits of a document by itself; learned positions are those it had in its row."""
    if isinstance(model, GPT2):
        model = copy.deepcopy(model)
        model.transformer.wpe.weight.data = model.transformer.wpe.weight.data.roll(-start, dims=0)
    return model(tokens[None])[0]


@family
@device
@torch.no_grad()
def test_packed_documents_have_the_logits_each_has_alone(family, device):
    model, tokens = make(family, width=64).to(device), tokens_of().to(device)
    packed = model(tokens, None, numbers_of(LENGTHS).to(device))
    for row, start, end in spans_of(LENGTHS):
        expected = alone(model, tokens[row, start:end], start)
        torch.testing.assert_close(packed[row, start:end], expected, atol=TOLERANCE[device], rtol=0)


@family
@device
def test_packed_documents_teach_what_each_teaches_alone(family, device):
    model, tokens = make(family, width=64).to(device), tokens_of().to(device)
    targets = tokens_of().to(device)
    packed = gradients(model, tokens, targets, numbers_of(LENGTHS).to(device))
    model.zero_grad()
    for row, start, end in spans_of(LENGTHS):
        rest = torch.full_like(targets[:1], -1)
        rest[0, start:end] = targets[row, start:end]
        noise = tokens_of(1).to(device)
        noise[0, start:end] = tokens[row, start:end]
        share = (end - start) / targets.numel()
        (share * model(noise, rest, numbers_of([LENGTHS[row]]).to(device))).backward()
    together = {name: p.grad for name, p in model.named_parameters()}
    assert_same(together, packed, atol=TOLERANCE[device])
    assert all(g.any() for g in packed.values())


@family
@torch.no_grad()
def test_one_document_a_row_is_no_mask(family):
    model, tokens = make(family), tokens_of()
    whole = torch.zeros(2, CONTEXT, dtype=torch.long)
    torch.testing.assert_close(model(tokens, None, whole), model(tokens), atol=1e-6, rtol=0)


@needs_cuda
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_document_masks_on_a_gpu_hold_with_dropout(family):
    model, tokens, documents = make(family, dropout=0.1).train().cuda(), tokens_of().cuda(), numbers_of(LENGTHS).cuda()
    row, start, end = next(iter(spans_of(LENGTHS)))
    changed = tokens.clone()
    changed[row, end:] = (changed[row, end:] + 1) % 7

    def logits_of(given):
        torch.manual_seed(0)  # the same are dropped
        return model(given, None, documents)[row, start:end]

    torch.testing.assert_close(logits_of(changed), logits_of(tokens), atol=1e-6, rtol=0)
    assert not torch.equal(logits_of(tokens), model.eval()(tokens, None, documents)[row, start:end])


@family
@pytest.mark.parametrize("documents", [None, numbers_of(LENGTHS)])
def test_recomputed_blocks_give_the_same_gradients(family, documents):
    model = make(family)
    tokens, targets = tokens_of(), tokens_of()
    expected = gradients(model, tokens, targets, documents)
    checkpoint_blocks(model)
    assert_same(gradients(model, tokens, targets, documents), expected, atol=1e-7)


@family
def test_a_model_keeps_nothing_but_its_parameters(family):
    model = make(family)
    assert not list(model.buffers())
    assert model.state_dict().keys() == dict(model.named_parameters()).keys()


@family
@torch.no_grad()
def test_a_copy_computes_the_same_and_is_its_own(family):
    model, tokens = make(family), tokens_of()
    before, twin = model(tokens), copy.deepcopy(model)
    for p in model.parameters():
        p.zero_()
    assert torch.equal(twin(tokens), before)


@family
@torch.no_grad()
def test_a_model_moved_off_the_meta_device_computes_the_same(family):
    model, tokens = make(family), tokens_of()
    with torch.device("meta"):
        empty = new(family)
    filled = empty.to_empty(device="cpu")
    filled.load_state_dict(model.state_dict())
    assert torch.equal(filled(tokens), model(tokens))


@family
def test_blocks_are_the_repeated_part(family):
    blocks = make(family).blocks
    assert isinstance(blocks, nn.ModuleList)
    assert len(blocks) == SHAPES[family]["layers"]


@pytest.mark.parametrize(
    ("family", "chunk", "documents", "backend"),
    [
        ("llama", None, torch.tensor([[0] * 5 + [1] * 11, [0] * 16]), "aot_eager"),  # without the minute of a C++ compiler
        pytest.param("llama", None, torch.tensor([[0] * 5 + [1] * 11, [0] * 16]), "inductor", marks=pytest.mark.long),
        pytest.param("gpt2", 12, None, "inductor", marks=pytest.mark.long),
        pytest.param("golf", None, None, "inductor", marks=pytest.mark.long),
        pytest.param("frontier", None, None, "inductor", marks=pytest.mark.long),
    ],
)
def test_a_compiled_model_computes_the_same(family, chunk, documents, backend):
    model = make(family, context=16, layers=2 if family in ("golf", "frontier") else 1, width=16)
    model.loss_chunk = chunk
    tokens, targets = tokens_of(length=16), tokens_of(length=16)
    targets[0, :5] = -1
    expected = gradients(model, tokens, targets, documents)
    loss = model(tokens, targets, documents).item()
    compiled = torch.compile(model, backend=backend)
    assert_same(
        gradients(compiled, tokens, targets, documents), {f"_orig_mod.{name}": g for name, g in expected.items()}, atol=1e-5
    )
    assert compiled(tokens, targets, documents).item() == pytest.approx(loss, abs=1e-5)
