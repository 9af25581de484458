"""The MLX backend computes what the torch backend computes."""

from concurrent.futures import ThreadPoolExecutor

import mlx_kit
import numpy as np
import pytest
from mlx_kit import MODELS, SHAPE, Position, Pupil, both, far, plan_step

from ingot.errors import ConfigError

LLAMA = {**SHAPE, "family": "llama", "inner_width": 64}
FRONTIER = MODELS["frontier"]
OPTIONS = {
    "gpt2 without biases, erf": {**SHAPE, "family": "gpt2", "bias": False, "gelu": "erf"},
    "llama, plain, layernorm": {**LLAMA, "mlp": "plain", "norm": "layernorm", "bias": True, "activation": "gelu", "tied": False},
    "llama, linear": {**LLAMA, "rope_scaling": "linear", "rope_factor": 2.0, "activation": "relu"},
    "llama, ntk": {**LLAMA, "rope_scaling": "ntk", "rope_factor": 4.0},
    "golf of one layer": {**MODELS["golf"], "layers": 1},
    "frontier, tables, untied": {**FRONTIER, "values": "tables", "tied": False, "softcap": None, "head_gate": False},
    "frontier, plain": {**FRONTIER, "values": "none", "key_offset": False, "rope_part": 1.0, "kv_heads": None, "window": 99},
}


@pytest.mark.parametrize("model", [*MODELS, *OPTIONS])
def test_loss_and_gradients_are_those_of_torch(model):
    theirs, ours = both(OPTIONS.get(model, MODELS.get(model)))
    for pupil in (theirs, ours):  # a new golf model predicts from the embedding alone; a few steps later all of it counts
        pupil.losses(10)
    ours.backend.load(theirs.state())
    assert ours.mean() == pytest.approx(theirs.mean(), abs=1e-5)
    batch = ours.rows(3)
    targets = int(np.count_nonzero(batch[:, 1] != -1))
    theirs.backend._accumulate(batch, targets, 0)
    _, grads = ours.backend._accumulate(batch, targets, mlx_kit.plan_step(ours.config, mlx_kit.Position(3)))
    expected = {name: p.grad.numpy() for name, p in theirs.backend.model.named_parameters() if p.requires_grad}
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        assert np.linalg.norm(np.array(grads[name]) - grad) <= 1e-4 * np.linalg.norm(grad), name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("model", MODELS)
def test_ten_steps_are_those_of_torch(model, optimizer):
    theirs, ours = both(model, {"name": optimizer, "clip_norm": 0.5, "muon_weight_decay": 0.1})
    assert far(ours.losses(10), theirs.losses(10)) < 1e-4
    assert ours.mean() == pytest.approx(theirs.mean(), abs=1e-4)


def test_the_other_forms_of_muon_are_those_of_torch():
    optimizer = {"name": "muon", "muon_coefficients": "polar-express", "muon_normalise_rows": True, "muon_nesterov": False}
    theirs, ours = both("llama", optimizer)
    assert far(ours.losses(10), theirs.losses(10)) < 1e-4


@pytest.mark.parametrize("more", [{}, {"muon_normalise_rows": True}])
def test_normuon_with_cautious_weight_decay_is_that_of_torch_and_its_state_moves_to_torch(more):
    optimizer = {"name": "muon", "muon_beta2": 0.9, "muon_cautious": True, "muon_weight_decay": 2.0, **more}
    theirs, ours = both("frontier", optimizer)
    assert far(ours.losses(10), theirs.losses(10)) < 1e-4
    bold = Pupil("mlx", "frontier", {**optimizer, "muon_cautious": False})
    plain = Pupil("mlx", "frontier", {**optimizer, "muon_beta2": None})
    assert all(far(other.losses(10), theirs.losses(10)) > 1e-3 for other in (bold, plain))
    theirs, (resumed, start) = Pupil("cpu", "frontier", optimizer), both("frontier", optimizer)
    expected = theirs.losses(10)
    start.losses(5)
    resumed.backend.load(start.state())
    assert far(resumed.losses(5, first=5), expected[5:]) < 1e-4


def test_stages_set_the_window_and_a_model_is_judged_with_the_last_one():
    stages, fast = [{"steps": 4, "model": {"window": 2}}, {"steps": 4, "model": {"window": 9}}], {"learning_rate": 1e-2}
    theirs, ours = both("frontier", fast, stages=stages, max_steps=8)
    plans = [plan_step(ours.config, Position(number)) for number in (0, 4)]
    for pupil in (theirs, ours):
        pupil.backend.tune([(plan, pupil.rows(0)) for plan in plans], {})
    for first in (0, 3):  # in the first stage, then in the second
        assert far(ours.losses(3, first), theirs.losses(3, first)) < 1e-5
        assert ours.mean() == pytest.approx(theirs.mean(), abs=1e-5)
    for window in (2, 9):
        narrow = Pupil("mlx", {**MODELS["frontier"], "window": window}, fast, max_steps=8)
        narrow.backend.load(ours.state())
        assert (abs(narrow.mean() - ours.mean()) < 1e-6) == (window == 9)
    with pytest.raises(ConfigError, match=r"window=0 .*at least 1"):
        Pupil("mlx", "frontier", stages=[{"steps": 1, "model": {"window": 0}}])


def test_groups_of_ones_own_and_the_average_of_the_weights_are_those_of_torch():
    groups = [{"name": "gains", "match": "*q_gain", "learning_rate": 0.1, "beta1": 0.5, "epsilon": 1e-3}]
    theirs, ours = both("golf", {"groups": groups, "ema_decay": 0.8})
    assert far(ours.losses(5), theirs.losses(5)) < 1e-5
    assert ours.mean() == pytest.approx(theirs.mean(), abs=1e-5)
    average = theirs.weights()
    assert all(np.allclose(value, average[name], atol=1e-5) for name, value in ours.weights().items())
    assert ours.state()["ema"].keys() == theirs.state()["ema"].keys()


@pytest.mark.parametrize("model", ["golf", "gpt2", "frontier"])
def test_document_masks_are_those_of_torch(model):
    theirs, ours = both(model, data={"document_mask": True})
    assert far(ours.losses(3), theirs.losses(3)) < 1e-5
    unmasked = Pupil("mlx", model)
    assert far(unmasked.losses(3), ours.losses(3)) > 1e-4


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "setting",
    [
        {"micro_batch": 3},
        {"micro_batch": 3, "eager": False},
        {"loss_chunk": 10},
        {"loss_chunk": 1 << 40},
        {"gradient_checkpointing": True},
    ],
)
def test_what_saves_memory_changes_no_loss(model, setting):
    plain, saving = Pupil("mlx", model), Pupil("mlx", model, **setting)
    assert far(plain.losses(3), saving.losses(3)) < 1e-6


def test_a_model_is_judged_in_any_thread():
    with ThreadPoolExecutor(1) as other:
        pupil = Pupil("mlx", "golf")
        assert other.submit(pupil.mean).result() == pupil.mean()


@pytest.mark.parametrize("model", MODELS)
def test_bf16_is_near(model):
    theirs, ours = Pupil("cpu", model), Pupil("mlx", model, precision="bf16")
    assert 0 < far(ours.losses(3), theirs.losses(3)) < 1e-2


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_dropout_depends_on_seed_and_step_alone(model):
    model = {**MODELS[model], "dropout": 0.3}
    plain, dropping, again, recomputing, other = (
        Pupil("mlx", {**model, **more}, **training)
        for more, training in [
            ({"dropout": 0.0}, {}),
            ({}, {}),
            ({}, {}),
            ({}, {"gradient_checkpointing": True}),
            ({}, {"seed": 7}),
        ]
    )
    start = plain.state()
    for pupil in (dropping, again, recomputing, other):
        pupil.backend.load(start)
    assert dropping.mean() == plain.mean()  # nothing is dropped where a model is judged
    losses = dropping.losses(3)
    assert again.losses(3) == losses
    assert far(recomputing.losses(3), losses) < 1e-6
    assert other.losses(3) != losses and far(plain.losses(3), losses) > 1e-3
    again.backend.load(start)
    assert again.step(1, rows=0).loss != losses[0]  # the same rows, at another step


def test_dropout_in_attention_keeps_its_mean():
    import mlx.core as mx

    from ingot.backends.mlx.models import Pass, attention

    q, k, v = (
        mx.random.normal(shape, key=mx.random.key(i)) for i, shape in enumerate([(1, 4, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8)])
    )
    plain = attention(q, k, v, Pass(), 0)
    keys = mx.random.split(mx.random.key(9), num=2000)
    mean = sum(attention(q, k, v, Pass(dropout=0.2), 0, key) for key in keys) / len(keys)
    assert float(mx.abs(mean - plain).max()) < 0.1


def test_a_step_that_is_not_finite_changes_nothing():
    pupil = Pupil("mlx", "gpt2")
    pupil.step(0)
    records = pupil.state()
    broken = np.full(records["model"]["transformer.ln_f.weight"].shape, np.inf, np.float32)
    records["model"]["transformer.ln_f.weight"] = mlx_kit.to_record("transformer.ln_f.weight", broken, "F32")
    pupil.backend.load(records)
    before = pupil.raw()
    assert pupil.step(1).skipped and pupil.raw() == before


def test_steps_without_trace_leave_none():
    pupil = Pupil("mlx", "golf", {"name": "muon", "ema_decay": 0.9})
    pupil.step(0)
    before = pupil.raw()
    with pupil.backend.without_trace():
        pupil.step(1)
        assert pupil.raw() != before
    assert pupil.raw() == before


@pytest.mark.parametrize("model", MODELS)
def test_scores_of_tokens_that_are_there_are_those_of_torch(model):
    theirs, ours = both(MODELS[model])
    rows, firsts = [[1, 5, 9, 2, 7], [3, 4, 8]], [1, 2]
    for here, there in zip(ours.backend.score_rows(rows, firsts, 3), theirs.backend.score_rows(rows, firsts, 3), strict=True):
        assert (here.first, here.top.shape) == (there.first, there.top.shape)
        np.testing.assert_allclose(here.chosen, there.chosen, atol=1e-4)
        np.testing.assert_allclose(here.top, there.top, atol=1e-4)
