import numpy as np
import pytest
import torch
from torch_kit import SMALL, by_name, make, plan_of, raw, rows_of, take, weights, written

from ingot.backends.torch.state import WeightAverage, tensor


def averaging(decay=0.5, **training):
    return make(optimizer={"ema_decay": decay}, **training)


def average_of(backend):
    return {record.name: tensor(record) for record in backend.snapshot()()["ema"]}


def test_the_average_moves_towards_the_weights_and_faster_at_first():
    backend = averaging(0.25)
    expected = weights(backend)
    for step in range(4):
        take(backend, 1, first=step)
        decay = min(0.25, (1 + step) / (10 + step))
        expected = {
            name: old * decay + new * (1 - decay)
            for (name, old), new in zip(expected.items(), weights(backend).values(), strict=True)
        }
    found = average_of(backend)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


def test_the_average_stays_where_it_is_in_a_skipped_step():
    model = torch.nn.Linear(2, 2)
    average = WeightAverage(model)
    before = [held.clone() for _, held in average.tensors()]
    with torch.no_grad():
        model.weight += 1
    average.update(0.5, torch.tensor(True))
    assert all(torch.equal(held, old) for (_, held), old in zip(average.tensors(), before, strict=True))
    average.update(0.5, torch.tensor(False))
    torch.testing.assert_close(dict(average.tensors())["weight"], before[0] + 0.5)


def test_training_is_the_same_with_and_without_an_average():
    plain, with_average = make(), averaging()
    for step in range(3):
        assert take(plain, 1, first=step) == take(with_average, 1, first=step)
        with_average.score(rows_of(9))  # which the average answers
    state = raw(with_average)
    assert {key: value for key, value in state.items() if key[0] != "ema"} == raw(plain)


def test_evaluation_samples_and_exports_are_the_averages():
    backend = averaging(0.9)
    take(backend, 5)
    average = average_of(backend)
    judged = make()
    judged.model.load_state_dict(average)
    assert backend.score(rows_of(9)) == judged.score(rows_of(9)) != make_trained().score(rows_of(9))
    assert written(backend, [1], 8, temperature=1.0) == written(judged, [1], 8, temperature=1.0)
    for record in backend.weights():
        assert torch.equal(tensor(record), average[record.name])


def make_trained():
    backend = make()
    take(backend, 5)
    return backend


def test_a_continued_run_has_the_average_it_would_have_had():
    straight, first, second = averaging(), averaging(), averaging()
    take(straight, 6)
    take(first, 3)
    first.score(rows_of(9))  # the state is saved while the average is shown
    second.load(by_name(first.snapshot()()))
    take(second, 3, first=3)
    assert raw(second) == raw(straight)


def test_an_average_that_is_asked_for_later_begins_with_the_weights():
    first, second = make(), averaging()
    take(first, 3)
    second.load(by_name(first.snapshot()()))
    for name, value in average_of(second).items():
        assert torch.equal(value, weights(first)[name])


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_the_average_of_bf16_weights_is_kept_in_float32():
    golf = {"family": "golf", "layers": 2, "heads": 2, "kv_heads": 1, "width": 32, "embedding_dtype": "bf16"}
    backend = make(golf, {"ema_decay": 0.999}, precision="bf16")
    take(backend, 3)
    assert average_of(backend)["tok_emb.weight"].dtype == torch.float32
    assert {r.name: r.dtype for r in backend.weights()}["tok_emb.weight"] == "BF16"


def test_a_step_weighs_targets_alike_however_they_are_spread():
    batch = rows_of(0)
    batch[0, 1, 3:] = -1  # a row with few targets
    whole, parts = make(), make(micro_batch=1)
    for backend in (whole, parts):
        backend.step(batch, int(np.count_nonzero(batch[:, 1] != -1)), plan_of(backend)).result()
    for name, value in weights(whole).items():
        torch.testing.assert_close(value, weights(parts)[name], rtol=0, atol=1e-5)


def test_the_momentum_of_muon_is_the_steps_own():
    found = []
    for momentum in (0.5, 0.9):
        backend = make(optimizer={"name": "muon"})
        for step in range(2):
            batch = rows_of(step)
            backend.step(batch, batch[:, 1].size, plan_of(backend, step, momentum=momentum)).result()
        found.append(weights(backend)["transformer.h.0.mlp.c_fc.weight"])
    assert not torch.equal(*found)


@pytest.mark.parametrize("family", ["gpt2", "llama", "golf"])
def test_chunks_of_the_loss_give_the_same_step(family):
    model = {"family": family, **{k: v for k, v in SMALL.items() if k != "bias"}, **({} if family == "gpt2" else {"kv_heads": 1})}
    plain, chunked = make(model), make(model, loss_chunk=5)
    assert take(chunked, 1)[0].loss == pytest.approx(take(plain, 1)[0].loss, abs=1e-6)
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(chunked)[name], value, rtol=0, atol=2e-5)
