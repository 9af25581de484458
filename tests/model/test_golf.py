import math

import pytest
import torch
from model_kit import CONTEXT, NUMBERS, assert_same, count_parameters, golden, gradients, make, tokens_of

from ingot.model.golf import Golf

torch.set_num_threads(1)

CASES = {case["file"].removesuffix(".safetensors"): case for case in NUMBERS["golf"]}


@pytest.fixture(params=sorted(CASES))
def original(request):
    """A model with the original's weights, and what the original computed with them."""
    case = CASES[request.param]
    tensors, weights, grads = golden(case["file"], "before.", "grad.")
    model = Golf(
        vocab_size=case["vocab_size"],
        context=48,
        layers=case["num_layers"],
        heads=case["num_heads"],
        width=case["model_dim"],
        kv_heads=case["num_kv_heads"],
        mlp_multiple=case["mlp_mult"],
        tied=case["tie_embeddings"],
        softcap=case["logit_softcap"],
        rope_base=case["rope_base"],
    )
    model.load_state_dict(weights)
    return model, tensors["x"][0], tensors["y"][0], case["losses"][0], grads


@torch.no_grad()
def test_the_first_loss_is_that_of_the_original(original):
    model, tokens, targets, loss, _ = original
    assert model(tokens, targets).item() == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("chunk", [None, 20])
def test_the_first_gradients_are_those_of_the_original(original, chunk):
    model, tokens, targets, _, expected = original
    model.loss_chunk = chunk
    assert_same(gradients(model, tokens, targets), expected, atol=1e-5)
    assert max(value.abs().max() for value in expected.values()) > 1e-2


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 17_059_912),
        ({"layers": 10}, 18_897_488),
        ({"layers": 12}, 22_572_128),
        ({"layers": 2}, 4_198_928),
        ({"layers": 1}, 2_361_352),
        ({"mlp_multiple": 3}, 21_778_504),
        ({"tied": False}, 17_584_200),
        ({"kv_heads": 8}, 19_419_208),
        ({"kv_heads": None}, 19_419_208),
        ({"kv_heads": 1}, 15_290_440),
        ({"width": 256, "heads": 4, "kv_heads": 2, "layers": 4}, 2_101_776),
    ],
)
def test_the_challenges_shapes_have_the_parameters_they_are_known_for(settings, count):
    assert count_parameters("golf", vocab_size=1024, context=1024, **settings) == count


@torch.no_grad()
def test_a_new_model_is_as_good_as_guessing():
    torch.manual_seed(0)
    model = Golf(1024, 256)
    tokens = torch.randint(1024, (2, 257))
    assert 6.93 < model(tokens[:, :-1], tokens[:, 1:]).item() < 6.94


@torch.no_grad()
def test_a_new_model_predicts_from_the_embedding_alone():
    torch.manual_seed(0)
    model = Golf(1024, CONTEXT, layers=5, heads=4, width=48, kv_heads=2)
    tokens = tokens_of()
    before = model(tokens)
    for block in model.blocks:
        for matrix in (block.attn.c_q, block.attn.c_k, block.attn.c_v, block.mlp.fc):
            matrix.weight.normal_()
    assert torch.equal(model(tokens), before)


@torch.no_grad()
def test_louder_queries_change_the_logits_and_louder_keys_do_not():
    model, tokens = make("golf"), tokens_of()
    before = model(tokens)
    model.blocks[2].attn.c_k.weight *= 2
    torch.testing.assert_close(model(tokens), before, atol=1e-5, rtol=0)
    model.blocks[2].attn.q_gain *= 2
    assert (model(tokens) - before).abs().max() > 1e-2


def outputs_of_blocks(model, tokens):
    """What enters and leaves each block."""
    seen = []
    hooks = [block.register_forward_hook(lambda m, args, out: seen.append((args[0], out))) for block in model.blocks]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return seen


@torch.no_grad()
@pytest.mark.parametrize(("layers", "skips"), [(9, [(4, 3), (5, 2), (6, 1), (7, 0)]), (4, [(2, 1), (3, 0)]), (1, [])])
def test_skips_join_the_halves_from_the_middle_outwards(layers, skips):
    model = make("golf", layers=layers)
    blocks = outputs_of_blocks(model, tokens_of())
    assert model.skip_weights.shape == (len(skips), 48)
    for i in range(1, layers):
        expected = blocks[i - 1][1]
        for n, (later, earlier) in enumerate(skips):
            if later == i:
                expected = expected + model.skip_weights[n] * blocks[earlier][1]
        torch.testing.assert_close(blocks[i][0], expected, atol=1e-6, rtol=0)


def test_a_single_layer_has_no_skip_to_train():
    model = make("golf", layers=1)
    model(tokens_of(), tokens_of()).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == ["skip_weights"]
    assert not model.skip_weights.requires_grad


@torch.no_grad()
def test_every_block_may_mix_the_embedding_back_in():
    model, tokens = make("golf"), tokens_of()
    before = model(tokens)
    model.blocks[3].resid_mix[1] += 0.5
    assert (model(tokens) - before).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("softcap", [30.0, 2.0])
def test_logits_stay_within_the_softcap(softcap):
    model = make("golf", softcap=softcap)
    model.tok_emb.weight.normal_(std=1.0)
    x = model.hidden(tokens_of())
    bare = x @ model.tok_emb.weight.T
    assert bare.abs().max() > softcap / 2
    assert model.logits(x).abs().max() <= softcap
    torch.testing.assert_close(model.logits(x), softcap * torch.tanh(bare / softcap))


@pytest.mark.parametrize("tied", [True, False])
def test_with_a_bf16_embedding_matrices_and_control_stay_float32(tied):
    model = make("golf", embedding_dtype="bf16", tied=tied)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert dtypes.pop("tok_emb.weight") is torch.bfloat16
    assert set(dtypes.values()) == {torch.float32}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("embedding_dtype", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_residual_stream_runs_in_the_embeddings_format(embedding_dtype, dtype, autocast):
    model = make("golf", embedding_dtype=embedding_dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        stream = outputs_of_blocks(model, tokens_of())
        loss = model(tokens_of(), tokens_of())
    assert {x.dtype for pair in stream for x in pair} == {dtype}
    assert loss.dtype is torch.float32


def test_a_bf16_stream_learns_in_about_the_direction_float32_does():
    exact, rounded = make("golf"), make("golf", embedding_dtype="bf16")
    rounded.load_state_dict(exact.state_dict())
    tokens, targets = tokens_of(8), tokens_of(8)
    expected, found = gradients(exact, tokens, targets), gradients(rounded, tokens, targets)
    for name, value in expected.items():
        assert torch.cosine_similarity(found[name].float().flatten(), value.flatten(), dim=0) > 0.99, name
        assert found[name].dtype is (torch.bfloat16 if name == "tok_emb.weight" else torch.float32)


def test_control_names_what_is_no_matrix():
    model = make("golf", layers=9)
    inside = [(name, p) for name, p in model.blocks.named_parameters()]
    matrices = [name for name, p in inside if p.dim() == 2 and not any(part in name for part in model.control)]
    steering = [name for name, p in model.named_parameters() if any(part in name for part in model.control)]
    assert len(matrices) == 54
    assert all(name.endswith("weight") for name in matrices)
    assert len(steering) == 9 * 4 + 1
    assert {name for name, p in model.named_parameters() if p.dim() == 1} < set(steering)


def test_initial_weights_are_the_originals():
    torch.manual_seed(0)
    tied, untied = Golf(1024, 16, layers=3, width=256), Golf(1024, 16, layers=3, width=256, tied=False)
    assert tied.tok_emb.weight.std().item() == pytest.approx(0.005, rel=0.02)
    assert untied.tok_emb.weight.std().item() == pytest.approx(1.0, rel=0.02)
    assert not untied.lm_head.weight.any()
    for block in tied.blocks:
        assert not block.attn.proj.weight.any() and not block.mlp.proj.weight.any()
        assert block.mlp.fc.weight.abs().max().item() == pytest.approx(1 / math.sqrt(256), rel=1e-3)
        assert (block.attn.q_gain == 1.5).all() and (block.attn_scale == 1).all() and (block.mlp_scale == 1).all()
        assert (block.resid_mix[0] == 1).all() and (block.resid_mix[1] == 0).all()
    assert (tied.skip_weights == 1).all()
