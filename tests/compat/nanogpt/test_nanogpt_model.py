"""GPT and GPTConfig, as notebooks and forks of nanoGPT use them."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ingot.compat.nanogpt.gpt import GPT, MLP, Block, CausalSelfAttention, GPTConfig
from ingot.errors import ConfigError

torch.set_num_threads(1)

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests/golden"
CASES = {Path(case["file"]).stem: case for case in json.loads((GOLDEN / "golden.json").read_text())["nanogpt"]}
FIELDS = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout", "bias")
SMALL = {"block_size": 16, "vocab_size": 40, "n_layer": 2, "n_head": 2, "n_embd": 32}


@pytest.fixture
def small():
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SMALL))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(std=0.2)
    return model.eval()


def tokens(rows=2, length=16, seed=1):
    return torch.randint(40, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("bias", "total", "reported", "tensors"), [(True, 124_475_904, 123_689_472, 98), (False, 124_373_760, 123_587_328, 25)]
)
def test_the_124m_shape_has_nanogpt_s_parameters(capsys, bias, total, reported, tensors):
    with torch.device("meta"):
        model = GPT(GPTConfig(bias=bias))
    model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cpu")
    assert (model.get_num_params(non_embedding=False), model.get_num_params()) == (total, reported)
    assert capsys.readouterr().out.splitlines() == [
        f"number of parameters: {reported / 1e6:.2f}M",
        "num decayed parameter tensors: 50, with 124,354,560 parameters",
        f"num non-decayed parameter tensors: {tensors}, with {total - 124_354_560:,} parameters",
        "using fused AdamW: False",
    ]


@pytest.mark.parametrize(
    ("shape", "millions"),
    [
        ({"bias": True, "vocab_size": 50257}, "123.65"),
        ({"bias": False, "vocab_size": 65, "block_size": 256, "n_layer": 6, "n_head": 6, "n_embd": 384}, "10.65"),
        ({"bias": False, "vocab_size": 65, "block_size": 64, "n_layer": 4, "n_head": 4, "n_embd": 128}, "0.80"),
    ],
)
def test_the_known_shapes_print_nanogpt_s_line(capsys, shape, millions):
    with torch.device("meta"):
        GPT(GPTConfig(**shape))
    assert capsys.readouterr().out == f"number of parameters: {millions}M\n"


def test_utilisation_is_nanogpt_s_where_no_data_sheet_says_otherwise():
    with torch.device("meta"):
        model = GPT(GPTConfig(bias=False))
    assert model.estimate_mfu(480, 1.0) == pytest.approx(1.3466, abs=5e-5)
    assert model.estimate_mfu(480, 2.0, peak=624e12) == pytest.approx(1.3466 / 4, abs=5e-5)


@pytest.mark.parametrize("name", CASES)
def test_three_steps_from_nanogpt_s_weights_are_nanogpt_s(name):
    """Loss, gradient norm, logits and the weights afterwards, by the functions a copy of its loop would call."""
    case, golden = CASES[name], load_file(GOLDEN / CASES[name]["file"])
    model = GPT(GPTConfig(**{field: case[field] for field in FIELDS}))
    weights = {key.removeprefix("before."): value for key, value in golden.items() if key.startswith("before.")}
    model.load_state_dict({**weights, "lm_head.weight": weights["transformer.wte.weight"]})
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    torch.testing.assert_close(model(golden["x"][0], golden["y"][0])[0], golden["logits"], atol=1e-5, rtol=1e-4)
    for x, y, (loss, norm) in zip(golden["x"], golden["y"], case["loss_and_grad_norm"], strict=True):
        found = model(x, y)[1]
        found.backward()
        assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)) == pytest.approx(norm, rel=1e-4)
        assert found.item() == pytest.approx(loss, abs=1e-5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    for key, value in model.state_dict().items():
        if key != "lm_head.weight":
            torch.testing.assert_close(value, golden[f"after.{key}"], atol=5e-5, rtol=1e-3)


def test_a_state_dict_has_nanogpt_s_keys_and_the_head_is_the_embedding(small):
    keys = list(small.state_dict())
    assert keys[:4] == [
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.h.0.ln_1.weight",
        "transformer.h.0.ln_1.bias",
    ]
    assert keys[-1] == "lm_head.weight"
    assert len(keys) == 2 + 2 * 12 + 2 + 1
    assert small.lm_head.weight is small.transformer.wte.weight


def test_without_targets_only_the_last_position_has_logits(small):
    logits, loss = small(tokens())
    assert (logits.shape, loss) == ((2, 1, 40), None)
    torch.testing.assert_close(logits[:, 0], small(tokens(), tokens())[0][:, -1])


def test_targets_of_minus_one_are_not_predicted(small):
    x, y = tokens(), tokens(seed=2)
    logits, _ = small(x, y)
    y[:, 5:] = -1
    expected = torch.nn.functional.cross_entropy(logits[:, :5].reshape(-1, 40), y[:, :5].reshape(-1))
    torch.testing.assert_close(small(x, y)[1], expected)


def test_a_row_longer_than_the_block_is_refused(small):
    with pytest.raises(ConfigError, match=r"17 tokens do not fit into block_size=16; crop the input"):
        small(tokens(length=17))


def test_cropping_keeps_the_first_positions_and_their_logits(small):
    x = tokens(length=8)
    before, kept = small(x, x)[0], small.transformer.wpe.weight[:8].clone()
    small.crop_block_size(8)
    assert small.config.block_size == 8
    assert torch.equal(small.transformer.wpe.weight, kept)
    assert torch.equal(small(x, x)[0], before)
    with pytest.raises(ConfigError, match="do not fit into block_size=8"):
        small(tokens(length=9))
    with pytest.raises(ConfigError, match="block_size=8 cannot be cropped to 9"):
        small.crop_block_size(9)
    assert small.generate(tokens(length=5), 20, temperature=0).shape == (2, 25)


def test_generated_tokens_stand_behind_the_given_ones_and_greedy_is_the_likeliest(small):
    x = tokens(length=4)
    found = small.generate(x, 12, temperature=0)
    expected = x
    for _ in range(12):
        expected = torch.cat([expected, small(expected)[0].argmax(-1)], dim=1)
    assert torch.equal(found, expected)
    assert torch.equal(small.generate(x, 12, temperature=1.0, top_k=1), expected)


def test_generating_follows_the_global_seed_and_writes_something_else_each_time(small):
    def texts():
        torch.manual_seed(5)
        return [small.generate(tokens(length=4), 30, top_k=30) for _ in range(2)]

    (one, other), again = texts(), texts()
    assert torch.equal(one, again[0]) and torch.equal(other, again[1])
    assert not torch.equal(one, other)
    assert not torch.equal(one[0], one[1])


def test_what_a_model_cannot_be_asked_is_said_in_a_sentence(small):
    with pytest.raises(ConfigError, match="n_head=3 does not divide n_embd=32"):
        GPT(GPTConfig(n_embd=32, n_head=3))
    with pytest.raises(ConfigError, match="needs at least one prompt token"):
        small.generate(torch.zeros(1, 0, dtype=torch.long), 5)


def test_a_copy_of_the_model_learns(small):
    """torch.compile, deepcopy and a state dict see one model, whose tied weight is one tensor."""
    import copy

    twin = copy.deepcopy(small).train()
    assert twin.lm_head.weight is twin.transformer.wte.weight
    optimizer = twin.configure_optimizers(0.0, 1e-2, (0.9, 0.95), "cpu")
    losses = []
    for _ in range(5):
        loss = twin(tokens(), tokens())[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    fresh = GPT(GPTConfig(**SMALL)).eval()
    fresh.load_state_dict(twin.state_dict())
    assert torch.equal(fresh(tokens())[0], twin.eval()(tokens())[0])


def test_the_parts_of_a_model_take_a_config_and_compute_what_the_model_s_do(small):
    block, x = small.transformer.h[0], torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(2))
    assert isinstance(block, Block) and isinstance(block.attn, CausalSelfAttention) and isinstance(block.mlp, MLP)
    for kind, part in ((Block, block), (CausalSelfAttention, block.attn), (MLP, block.mlp)):
        fresh = kind(GPTConfig(**SMALL)).eval()
        fresh.load_state_dict(part.state_dict())
        assert torch.equal(fresh(x), part(x, None, None) if part is block.attn else part(x)), kind
    with torch.no_grad():
        expected = x + block.attn(block.ln_1(x))
        assert torch.equal(block(x), expected + block.mlp(block.ln_2(expected)))


def test_the_file_model_py_gives_them_and_says_how_to_get_in_from_outside():
    inside = runpy.run_path(str(ROOT / "model.py"))
    assert (inside["GPT"], inside["GPTConfig"]) == (GPT, GPTConfig)
    assert inside["__all__"] == ["GPT", "MLP", "Block", "CausalSelfAttention", "GPTConfig", "LayerNorm"]
    assert inside["LayerNorm"](ndim=8, bias=False)(torch.ones(1, 8)).shape == (1, 8)
    without = "import sys; sys.path[:] = [p for p in sys.path if 'python3' in p and 'site-' not in p] + ['.']; import model"
    outside = subprocess.run([sys.executable, "-I", "-S", "-c", without], cwd=ROOT, capture_output=True, text=True)
    assert re.search(r"ImportError: (ingot|torch) is not installed here: run `make train` once", outside.stderr.splitlines()[-1])
