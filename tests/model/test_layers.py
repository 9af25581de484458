import pytest
import torch
import torch.nn.functional as F

from ingot.model import layers
from ingot.model.layers import LayerCache, Rotation, attention_mask, causal_attention, flex_supported, positions, rotate
from ingot.model.registry import build

torch.set_num_threads(1)


def heads(count, length, size=8, rows=2):
    return torch.randn(rows, count, length, size)


def by_hand(q, k, v, attention_mask):
    """Attention written out; visible: (T, S) or (B, 1, T, S)."""
    group = q.size(1) // k.size(1)
    k, v = (torch.stack([x[:, h // group] for h in range(q.size(1))], dim=1) for x in (k, v))
    scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(~attention_mask, -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("T", "S"), [(6, 6), (1, 6), (3, 6), (1, 1)])
def test_queries_at_the_end_of_the_keys_see_no_later_key(kv_heads, T, S):
    q, k, v = heads(4, T), heads(kv_heads, S), heads(kv_heads, S)
    attention_mask = torch.tensor([[key <= query + S - T for key in range(S)] for query in range(T)])
    torch.testing.assert_close(causal_attention(q, k, v), by_hand(q, k, v, attention_mask), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_a_document_mask_hides_other_documents(kv_heads):
    numbers = [[0, 0, 0, 1, 1, 2], [5, 3, 5, 3, 3, 5]]
    q, k, v = heads(4, 6), heads(kv_heads, 6), heads(kv_heads, 6)
    expected = torch.tensor([[[key <= i and row[key] == row[i] for key in range(6)] for i in range(6)] for row in numbers])
    found = causal_attention(q, k, v, mask=attention_mask(torch.tensor(numbers), None))
    torch.testing.assert_close(found, by_hand(q, k, v, expected[:, None]), atol=1e-6, rtol=0)


def test_without_documents_there_is_no_mask():
    assert attention_mask(None, None) is None


def test_a_document_mask_and_a_filled_cache_are_refused():
    mask = attention_mask(torch.zeros(2, 3, dtype=torch.long), None)
    with pytest.raises(ValueError, match="cannot be used with a filled cache"):
        causal_attention(heads(4, 3), heads(4, 6), heads(4, 6), mask=mask)


def test_rotation_tells_only_how_far_apart_two_places_are():
    q, k, rotary = heads(1, 1, 64), heads(1, 1, 64), Rotation(128, 64, 1e4)

    def score(query, key):
        return (rotate(q, rotary(torch.tensor([query]))) @ rotate(k, rotary(torch.tensor([key]))).mT).squeeze()

    torch.testing.assert_close(score(9, 2), score(107, 100), atol=1e-4, rtol=0)
    assert (score(9, 2) - score(9, 3)).abs().max() > 1e-2


def test_rotation_is_a_rotation_of_the_halves():
    x = heads(1, 3, 4)
    angles = torch.arange(3.0)[:, None] * torch.tensor([1.0, 10.0**-2])
    pairs = torch.complex(x[..., :2], x[..., 2:]) * torch.polar(torch.ones_like(angles), angles)
    found = rotate(x, Rotation(3, 4, 1e4)(torch.arange(3)))
    torch.testing.assert_close(found, torch.cat([pairs.real, pairs.imag], dim=-1), atol=1e-6, rtol=0)


def test_far_places_keep_their_angles_in_low_precision_training():
    with torch.autocast("cpu", torch.bfloat16):
        cos, sin = Rotation(4096, 64, 1e4)(torch.arange(4000, 4096))
    exact = torch.arange(4000, 4096).double()[:, None] * 1e4 ** -(torch.arange(0, 64, 2).double() / 64)
    torch.testing.assert_close(cos.double(), exact.cos(), atol=1e-3, rtol=0)
    torch.testing.assert_close(sin.double(), exact.sin(), atol=1e-3, rtol=0)


def test_rotation_keeps_the_number_format():
    assert rotate(heads(1, 3).bfloat16(), Rotation(3, 8, 1e4)(torch.arange(3))).dtype is torch.bfloat16


def test_places_follow_what_the_cache_holds():
    cache = [LayerCache(1, 1, 8, 2, torch.device("cpu"), torch.float32)]
    cache[0].extend(heads(1, 3, 2, rows=1), heads(1, 3, 2, rows=1))
    assert positions(torch.zeros(1, 5, dtype=torch.long), cache, 8).tolist() == [3, 4, 5, 6, 7]
    with pytest.raises(ValueError, match="9 tokens do not fit into a context of 8"):
        positions(torch.zeros(1, 6, dtype=torch.long), cache, 8)


def test_attention_with_dropout_is_still_causal():
    torch.manual_seed(0)
    q, k = heads(2, 5), heads(2, 5)
    v = F.one_hot(torch.arange(5), 8).float().expand(2, 2, 5, 8)
    weights = causal_attention(q, k, v, dropout=0.5)[..., :5]
    assert (weights.triu(1) == 0).all()
    assert (weights == 0).sum() > 2 * 2 * 10


@pytest.mark.parametrize(
    ("device", "head_size", "dropout", "fused"),
    [("cuda", 16, 0.0, True), ("cuda", 8, 0.0, False), ("cuda", 64, 0.1, False), ("cpu", 64, 0.0, False)],
)
def test_flex_attention_gets_the_masks_that_it_can_take(device, head_size, dropout, fused):
    assert flex_supported(torch.device(device), head_size, dropout) is fused


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_asks_for_a_mask_for_its_own_heads_and_for_dropout_only_while_it_trains(family, monkeypatch):
    asked = []
    monkeypatch.setattr(layers, "flex_supported", lambda device, head_size, dropout: asked.append((head_size, dropout)))
    model = build({"family": family, "vocab_size": 40, "context": 8, "layers": 1, "heads": 4, "width": 32, "dropout": 0.25})
    tokens = torch.zeros(2, 8, dtype=torch.long)
    model(tokens, tokens, tokens)
    model.eval()(tokens, tokens, tokens)
    assert asked == [(8, 0.25), (8, 0.0)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")
@pytest.mark.parametrize(("heads", "dropout"), [(8, 0.0), (2, 0.25), (8, 0.25), (2, 0.0)])
def test_document_masks_on_a_gpu_are_those_of_a_cpu_for_any_heads_and_with_dropout(heads, dropout):
    torch.manual_seed(0)
    model = build(
        {"family": "llama", "vocab_size": 40, "context": 64, "layers": 2, "heads": heads, "width": 64, "dropout": dropout}
    )
    tokens = torch.randint(40, (3, 64))
    documents = (torch.arange(64) // 10).expand(3, 64).contiguous()
    expected = model.eval()(tokens, tokens, documents)
    model.cuda()
    tokens, documents = tokens.cuda(), documents.cuda()
    torch.testing.assert_close(model(tokens, tokens, documents).cpu(), expected, atol=2e-3, rtol=0)
    model.train()(tokens, tokens, documents).backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())
    other = tokens.clone()
    other[:, 10:20] += 1  # another document
    assert torch.equal(model.eval()(tokens, None, documents)[:, 20:], model(other % 40, None, documents)[:, 20:])
