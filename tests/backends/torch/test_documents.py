"""Documents of a batch: where they begin in all its tokens, and that training by that is training by their numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_kit import ROWS, SEQ_LEN, VOCABULARY, make, rows_of, step, weights

from ingot.backends.torch import attention
from ingot.backends.torch.documents import LENGTH, boundaries
from ingot.backends.torch.tuning import Tuned


def numbered(rows, length, chance, seed=1):
    """Document numbers of rows in which a document begins with this chance at every token but a row's first."""
    begins = np.random.default_rng(seed).random((rows, length)) < chance
    begins[:, 0] = False
    return np.cumsum(begins, axis=1).astype(np.int32)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 700), st.floats(0, 0.02), st.integers(0, 9))
def test_tokens_between_two_boundaries_are_a_document(rows, length, chance, seed):
    numbers = numbered(rows, length, chance, seed)
    starts = boundaries(numbers)
    count = sum(len(np.unique(row)) for row in numbers)
    if starts is None:
        assert count > rows + rows * length // LENGTH
        return
    assert starts.dtype == np.int32 and starts.shape == (rows + rows * length // LENGTH + 1,)
    assert starts[0] == 0 and np.all(np.diff(starts[: count + 1]) > 0) and np.all(starts[count:] == numbers.size)
    document = np.searchsorted(starts, np.arange(numbers.size), side="right").reshape(rows, length)
    same, found = (x[:, :, None] == x[:, None] for x in (numbers, document))
    assert np.array_equal(found, same)
    assert len(np.unique(document)) == count, "no document goes on in another row"


def test_there_is_room_for_a_document_per_row_and_per_128_tokens():
    rows = np.zeros((2, 256), np.int32)
    rows[0, 1:5] = range(1, 5)
    rows[0, 5:] = 4
    assert boundaries(rows).tolist() == [0, 1, 2, 3, 4, 256, 512]
    rows[0, 6:] = 5
    assert boundaries(rows) is None
    assert boundaries(np.zeros((3, 5), np.int32)).tolist() == [0, 5, 10, 15]


def batch_of(documents):
    batch = rows_of(3)
    return np.concatenate([batch, np.array(documents, np.int32).reshape(-1, 1, SEQ_LEN)], axis=1)


FEW, MANY = np.zeros((ROWS, SEQ_LEN)), np.tile(np.arange(SEQ_LEN) // 5, (ROWS, 1))


@pytest.mark.parametrize(("numbers", "given"), [(FEW, 1), (MANY, 2)])
def test_a_batch_with_more_documents_than_there_is_room_for_is_given_their_numbers(numbers, given):
    backend = make()
    with backend._arithmetic("flash4"):
        *_, documents = backend._upload(batch_of(numbers))
    assert documents.dim() == given
    with backend._arithmetic("default"):
        *_, documents = backend._upload(batch_of(numbers))
    assert documents.dim() == 2


@pytest.mark.parametrize("model", [{"family": "golf", "kv_heads": 1}, {"family": "frontier", "window": 4, "layers": 4}])
def test_a_step_and_a_score_are_the_same_by_boundaries(model, monkeypatch):
    monkeypatch.setattr("ingot.backends.torch.documents.LENGTH", 4)
    settings, found = {"layers": 2, "heads": 2, "width": 32, **model}, []
    for name in ("default", "flash4"):
        backend = make(settings, optimizer={"epsilon": 1e-4}, micro_batch=3)
        backend._stages, backend._attention = [Tuned(3, name)], name
        losses = [step(backend, batch_of(MANY), number).loss for number in range(2)]
        found.append(([*losses, backend.score(batch_of(MANY))], weights(backend)))
    assert found[1][0] == pytest.approx(found[0][0], abs=1e-4)
    torch.testing.assert_close(found[1][1], found[0][1], atol=1e-5, rtol=1e-4)


def test_flash_attention_is_tried_for_documents_of_our_models_where_it_is_installed(monkeypatch):
    backend, tried = make(), []
    monkeypatch.setattr(backend, "_try", lambda batch, times, name: tried.append(name))
    assert backend._fastest_attention(batch_of(MANY)) == "default" and not tried
    monkeypatch.setattr(attention, "find_spec", lambda name: name)
    assert backend._fastest_attention(batch_of(MANY)) in ("default", "flash4")
    assert tried == ["default", "default", "flash4", "flash4"]
    assert attention.candidates(torch.nn.Linear(2, VOCABULARY), {}, True, list) == []
