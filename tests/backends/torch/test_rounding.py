"""Codes of few bits: what GPTQ keeps of a matrix's products, what is stored, and for models of every family."""

import numpy as np
import pytest
import torch

from ingot.artifact.container import read_artifact, write_artifact
from ingot.backends.base import Rounding
from ingot.backends.open import open_backend, open_inference
from ingot.backends.torch import gptq, inference
from ingot.backends.torch.gptq import Moments, TorchRounder
from ingot.config.loading import load_config
from ingot.errors import CheckpointError
from ingot.runtime.ranks import Ranks
from ingot.runtime.tensors import SMALL, to_array

VOCABULARY = 60
FAMILIES = {
    "gpt2": {"layers": 2, "heads": 2, "width": 32},
    "llama": {"layers": 2, "heads": 2, "kv_heads": 1, "width": 32},
    "golf": {"layers": 2, "heads": 2, "kv_heads": 2, "width": 32, "mlp_multiple": 2},
    "frontier": {"layers": 2, "heads": 2, "kv_heads": 2, "width": 32, "window": 4, "pattern": "SL"},
}
COARSE, FINE = Rounding(4, 4.0), Rounding(8, 8.0)


def batches(count=4, length=16):
    rows = np.random.default_rng(0).integers(0, VOCABULARY, (count, 4, length + 1), dtype=np.int32)
    return [np.stack([row[:, :-1], row[:, 1:]], axis=1) for row in rows]


@pytest.fixture(params=FAMILIES)
def opened(request):
    """A model of a family whose matrices that start at zero are drawn too."""
    chosen = {f"model.{name}": value for name, value in FAMILIES[request.param].items()}
    chosen |= {
        "model.family": request.param,
        "data.seq_len": 16,
        "training.device": "cpu",
        "training.threads": 1,
        "training.max_steps": 1,
    }
    chosen |= {"training.tokens_per_step": 16}
    config = load_config(python=chosen, environment={}).config
    trained = open_backend(config, VOCABULARY, Ranks())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in trained.model.parameters():
            if p.dim() == 2 and len(p.unique()) == 1:
                p += 0.1 * torch.randn(p.shape, generator=generator)
    weights = trained.weights()
    backend = open_inference(config, VOCABULARY)
    backend.load_weights({record.name: record for record in weights}, "here")
    return backend, weights


@pytest.mark.parametrize("tiny", [False, True], ids=["", "one of them with steps that float16 does not hold"])
def test_every_large_matrix_and_table_is_rounded_and_read_back_as_the_model_holds_it(opened, tmp_path, tiny):
    backend, weights = opened
    if tiny:
        first = next(p for name, p in backend.model.named_parameters() if p.dim() == 2 and ".0." in name and p.numel() > SMALL)
        first.data *= 1e-6
    rounder = backend.rounder(batches())
    rounder.round(COARSE, FINE)
    codes = rounder.codes()
    large = {name for name, p in backend.model.named_parameters() if p.dim() == 2 and p.numel() > SMALL}
    assert set(codes) == large
    write_artifact(tmp_path / "model.ingot", weights, {"config": {}}, "gptq", "rans", codes=codes)
    stored = read_artifact(tmp_path / "model.ingot").tensors
    for name, p in backend.model.named_parameters():
        found = to_array(stored[name])
        if name in large:
            assert len(np.unique(to_array(codes[name][0]))) <= (15 if name not in _tables(backend.model) else 255)
            np.testing.assert_array_equal(found, p.detach().float().numpy())


def _tables(model):
    return {name for name, p in model.named_parameters() if p is getattr(model, "head", None) or "emb" in name or "wte" in name}


def test_every_matrix_of_every_family_is_rounded_by_its_inputs(opened, monkeypatch):
    """The head too, tied or not; a table that is only looked up has no inputs, and neither has a table of positions."""
    backend, _ = opened
    moments = {}
    monkeypatch.setattr(inference, "TorchRounder", lambda model, found: moments.update(found))
    backend.rounder(batches())
    known = {name for name, p in backend.model.named_parameters() if id(p) in moments}
    large = {name for name, p in backend.model.named_parameters() if p.dim() == 2 and p.numel() > SMALL and "wpe" not in name}
    assert known >= large


def test_weights_are_rounded_from_what_they_were_and_not_from_what_they_became(opened):
    backend, _ = opened
    rounder = backend.rounder(batches())
    fine = rounder.round(FINE, FINE)
    before = {name: p.clone() for name, p in backend.model.named_parameters()}
    assert rounder.round(COARSE, COARSE) < 0.7 * fine
    assert rounder.round(FINE, FINE) == fine
    assert all(torch.equal(p, before[name]) for name, p in backend.model.named_parameters())


@pytest.fixture
def layer():
    """A matrix whose inputs are alike, as those of a trained model are."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 64, bias=False)
    x = torch.randn(4096, 24) @ torch.randn(24, 96) + 0.1 * torch.randn(4096, 96)
    return torch.nn.Sequential(linear), x


def changed(layer, moments):
    model, x = layer
    with torch.no_grad():
        before = model(x)
        size = TorchRounder(model, moments.found).round(COARSE, COARSE)
        return float((model(x) - before).square().mean()), size


def test_gptq_changes_the_products_far_less_than_rounding_to_the_nearest_for_the_same_bytes(layer):
    model, x = layer
    moments = Moments()
    with moments.watching(model):
        model(x)
    weight = model[0].weight.detach().clone()
    nearest, size = changed(layer, Moments())
    model[0].weight.data.copy_(weight)
    found, same = changed(layer, moments)
    assert found < 0.25 * nearest
    assert same == pytest.approx(size, rel=0.03)


def test_gptq_carries_errors_beyond_the_first_block_of_columns(monkeypatch):
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(300, 64, bias=False), torch.randn(4096, 40) @ torch.randn(40, 300) + 0.1 * torch.randn(4096, 300)
    model = torch.nn.Sequential(linear)
    moments, before = Moments(), linear.weight.detach().clone()
    with moments.watching(model):
        model(x)
    rounded = []
    for columns in (128, 512):  # three blocks, and all columns in one
        monkeypatch.setattr(gptq, "BLOCK_COLUMNS", columns)
        linear.weight.data.copy_(before)
        TorchRounder(model, moments.found).round(COARSE, COARSE)
        rounded.append(linear.weight.detach().clone())
    assert (rounded[0] != rounded[1]).float().mean() < 0.01  # sums of floats in another order


def test_rows_of_one_value_and_of_zeros_keep_it():
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False))
    model[0].weight.data[0], model[0].weight.data[1] = 0.0, 0.5
    rounder = TorchRounder(model, {})
    rounder.round(FINE, FINE)
    assert (model[0].weight[0] == 0).all()
    assert torch.allclose(model[0].weight[1], torch.tensor(0.5), atol=0.5 * 8 / 127)


def test_inputs_that_are_always_zero_do_no_harm(layer):
    model, x = layer
    moments = Moments()
    with moments.watching(model):
        model(torch.zeros_like(x))
    assert np.isfinite(changed(layer, moments)[0])


def test_weights_that_are_not_finite_are_refused_by_name():
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    model[0].weight.data[3, 3] = torch.inf
    with pytest.raises(CheckpointError, match=r"^the weight 0\.weight contains values that are not finite"):
        TorchRounder(model, {})


def test_scales_that_float16_cannot_hold_stay_float32():
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False))
    model[0].weight.data *= 1e-6
    rounder = TorchRounder(model, {})
    rounder.round(FINE, FINE)
    assert rounder.codes()["0.weight"][1].dtype == "F32"
