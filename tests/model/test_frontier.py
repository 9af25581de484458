import pytest
import torch
from model_kit import CONTEXT, VOCABULARY, count_parameters, make, new, tokens_of
from pydantic import ValidationError
from torch.nn.attention.flex_attention import BlockMask

from ingot.config.loading import load_config
from ingot.model import frontier, layers
from ingot.model.frontier import Frontier
from ingot.model.settings import FrontierSettings

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
ONE_WINDOW = {"pattern": "S", "layers": 2, "values": "none"}  # a layer with a window before the last, which sees the whole row


@pytest.mark.parametrize(("recipe", "millions"), [("golf/frontier", 28.4), ("frontier", 80.9)])
def test_the_recipes_have_the_weights_they_are_known_for(recipe, millions):
    settings = load_config(recipe, environment={}).config.model.model_dump(exclude={"vocab_size", "context", "family"})
    assert count_parameters("frontier", vocab_size=8192, context=4096, **settings) / 1e6 == pytest.approx(millions, abs=0.05)


def test_the_speed_run_has_at_most_125_million_weights():
    config = load_config("speedrun/124m", environment={}).config
    settings = config.model.model_dump(exclude={"family"})
    assert (settings["vocab_size"], settings["context"], config.data.seq_len, config.stride) == (50304, 1024, 1024, 1024)
    assert count_parameters("frontier", **settings) <= 125_000_000


def test_the_layers_that_add_to_their_values_can_be_named():
    plain = make("frontier", values="tables")
    assert [block.attn.value_table is not None for block in plain.blocks] == [True, False, True, False, True]
    named = make("frontier", values="tables", value_layers=[1, 2])
    assert [block.attn.value_table is not None for block in named.blocks] == [False, True, True, False, False]


@torch.no_grad()
def test_without_a_softcap_logits_are_plain_products():
    bent, plain = make("frontier", softcap=2.0), make("frontier", softcap=None)
    plain.load_state_dict(bent.state_dict())
    tokens = tokens_of()
    products = plain.hidden(tokens) @ plain.head.T
    torch.testing.assert_close(plain(tokens), products)
    torch.testing.assert_close(bent(tokens), 2.0 * torch.tanh(products / 2.0))


@torch.no_grad()
def test_a_new_model_predicts_from_the_embedding_alone():
    model, tokens = new("frontier"), tokens_of()
    alone = model(tokens)
    for name, p in model.blocks.named_parameters():
        if not name.endswith((".o.weight", ".down.weight")) and p.dim():
            p.normal_()
    torch.testing.assert_close(model(tokens), alone)
    same = tokens == tokens[0, 0]
    assert same.sum() > 0
    torch.testing.assert_close(alone[same], alone[0, 0].expand(int(same.sum()), -1))


@torch.no_grad()
@pytest.mark.parametrize("window", [1, 4, 40])
def test_a_layer_with_a_window_sees_so_many_tokens_and_no_more(window):
    model, tokens = make("frontier", window=window, **ONE_WINDOW), tokens_of(1)
    seen = []
    model.blocks[0].attn.register_forward_hook(lambda module, args, out: seen.append(out))
    model(tokens)
    for place in (0, 10):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % VOCABULARY
        model(changed)
        moved = (seen[-1] - seen[0]).abs().amax((1, 2)) > 1e-6  # (T, H, D)
        assert moved.nonzero().flatten().tolist() == list(range(place, min(CONTEXT, place + window)))


@torch.no_grad()
@pytest.mark.parametrize("documents", [None, torch.tensor([[0] * 20 + [1] * 12, [0] * 3 + [1] * 29])], ids=["row", "documents"])
def test_the_masks_that_a_gpus_kernel_gets_are_the_plain_ones(monkeypatch, documents):
    model, tokens = make("frontier", heads=2, width=32), tokens_of()
    plain = model(tokens, None, documents)
    for module in (frontier, layers):
        monkeypatch.setattr(module, "flex_supported", lambda *_: True)
        monkeypatch.setattr(module, "compiled", lambda function: function)
    assert isinstance(model._positions(tokens, None, documents).window_mask, BlockMask)
    torch.testing.assert_close(model(tokens, None, documents), plain, atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_window_as_long_as_the_row_is_no_window():
    wide, whole, tokens = make("frontier", window=CONTEXT), make("frontier", pattern="L"), tokens_of()
    for model in (wide, whole):
        for block in model.blocks:
            block.attn.offset = False  # which long layers alone have
    assert torch.equal(wide(tokens), whole(tokens))


@torch.no_grad()
def test_the_still_part_of_a_key_is_that_of_the_token_before_in_long_layers():
    model = make("frontier", pattern="SL", layers=4)
    assert [block.attn.offset for block in model.blocks] == [False, True, False, True]
    attention = model.blocks[1].attn
    k = torch.randn(2, 5, 2, 12)  # (B, S, K, D)
    moved = attention._offset(k, None)
    assert torch.equal(moved[..., : attention.rotated], k[..., : attention.rotated])
    assert torch.equal(moved[:, 1:, :, attention.rotated :], k[:, :-1, :, attention.rotated :])
    assert torch.equal(moved[:, 0], k[:, 0])
    starts = torch.zeros(2, 5, 1, 1, dtype=torch.bool)
    starts[0, 3] = True
    apart = attention._offset(k, starts)
    assert torch.equal(apart[0, 3], k[0, 3])
    assert torch.equal(apart[1], moved[1])


def test_weights_stay_float32_and_the_stream_runs_in_the_format_of_products():
    model, tokens = make("frontier"), tokens_of()
    with torch.autocast("cpu", torch.bfloat16):
        assert model.hidden(tokens).dtype is torch.bfloat16
        loss = model(tokens, tokens)
    loss.backward()
    assert model.hidden(tokens).dtype is torch.float32
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert loss.item() == pytest.approx(model(tokens, tokens).item(), abs=0.1)


@pytest.mark.parametrize("settings", [{}, {"tied": False, "values": "tables"}])
def test_flops_count_what_multiplies_and_what_a_layer_sees(settings):
    model = Frontier(100, 64, **{"layers": 4, "heads": 4, "width": 32, "pattern": "SSL", "window": 8, **settings})
    tables = [m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    idle = sum(tables) if settings else 0  # the embedding is the head where it is tied
    products = 6 * (sum(p.numel() for p in model.parameters()) - idle)
    assert model.flops(64) == products + 12 * 32 * (8 + 8 + 64 + 64)
    assert model.flops(4) == products + 12 * 32 * 4 * 4


def test_a_stage_may_set_the_window_and_nothing_else():
    model = make("frontier")
    model.set(window=3)
    assert model.window == 3
    with pytest.raises(ValueError, match=r"window=0 must be"):
        model.set(window=0)
    with pytest.raises(TypeError):
        model.set(depth=3)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"rope_part": 1.0}, r"model\.key_offset needs unrotated dimensions; set model\.rope_part below 1"),
        ({"rope_part": 0.001}, r"model\.rope_part=0\.001 rotates none of the 128 dimensions of a head; raise it"),
        ({"value_layers": [0, 10]}, r"model\.value_layers names layer 10, .*the last of 10 layers is 9"),
        ({"pattern": "SXL"}, "pattern"),
        ({"values": "some"}, "values"),
    ],
)
def test_settings_that_do_not_fit_are_told(settings, told):
    with pytest.raises(ValidationError, match=told):
        FrontierSettings(**settings)


def test_the_gradients_of_the_forms_for_a_cpu_are_those_of_the_plain_forms(monkeypatch):
    tokens = torch.randint(VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))
    found = []
    for on_host in (frontier.on_host, lambda *tensors: False):
        monkeypatch.setattr(frontier, "on_host", on_host)
        model = make("frontier")
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-4)
